"""The comparison of Kimi K3 in miniature with the plain hybrid: equal sizes, summary and picture, from finished runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openkda.lab import k3_mini
from openkda.models.hybrid import HybridLM
from openkda.models.inspect import describe
from openkda.models.presets import PRESETS


def finished(out: Path, side: str, seed: int, last: float) -> None:
    run = out / f"{side}-{seed}"
    run.mkdir(parents=True)
    lines = [{"step": 1, "loss": 5.0}, {"step": 2, "val_loss": last + 1}, {"step": 4, "val_loss": last}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "done").write_text("12.5\n")


def test_both_sides_multiply_a_token_with_as_many_weights() -> None:
    sides = {side: PRESETS[preset] for side, preset in k3_mini.SIDES.items()}
    assert len({describe(c).active_parameters for c in sides.values()}) == 1
    assert HybridLM(sides["k3"]).num_parameters() > HybridLM(sides["plain"]).num_parameters()


def test_summary_and_picture_of_finished_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for seed, (plain, k3) in enumerate([(2.0, 1.9), (1.0, 1.1)]):
        finished(tmp_path, "plain", seed, plain)
        finished(tmp_path, "k3", seed, k3)
    curves = k3_mini.compare(tmp_path, seeds=(0, 1))
    assert [(c.side, c.seed, c.val_loss[-1]) for c in curves][:2] == [("plain", 0, (4, 2.0)), ("k3", 0, (4, 1.9))]
    assert (tmp_path / "curves.png").stat().st_size > 1000 and (tmp_path / "curves.json").is_file()
    assert k3_mini.summary(curves).splitlines()[1:] == [
        "   0  2.0000  1.9000  0.9500",
        "   1  1.0000  1.1000  1.1000",
        "mean  1.5000  1.5000  1.0000",
    ]

"""The demo from end to end in seconds: everything but the learning."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from openkda.lab import demo
from openkda.lab.demo import compare, run_demo
from openkda.lab.ngram import NGram
from openkda.models.checkpoint import load_checkpoint
from openkda.models.presets import PRESETS
from openkda.training.corpus import TextFile
from openkda.training.token_file import TokenFile


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the standard library: the same code, less to read."""
    from openkda.training import corpus

    whole = corpus.stdlib_files
    monkeypatch.setattr(corpus, "stdlib_files", lambda: [f for i, f in enumerate(whole()) if keep(f, i)])


def keep(file: TextFile, index: int) -> bool:
    return index % 10 == 0 or file.name in ("json/decoder.py", "bisect.py")


def quick(out: Path | None, **options: object) -> tuple[demo.DemoResult, str]:
    screen = io.StringIO()
    console = Console(file=screen, width=100)
    return run_demo(out, quick=True, console=console, **options), screen.getvalue()  # type: ignore[arg-type]


def test_whole_demo(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result, screen = quick(out)
    assert result.checkpoint == out / "step-8" and (out / "last").resolve() == result.checkpoint.resolve()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses = [m["loss"] for m in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "loss" in m]
    assert len(losses) == 8 and losses[-1] < losses[0]
    assert f"{result.loss:.3f}" in screen and f"{result.baseline:.3f}" in screen and f"{result.ratio:.3f}" in screen
    assert "full attention" in screen and "a token" in screen
    assert len(result.samples) == len(demo.PROMPTS) == 3
    for prompt, sample in zip(demo.PROMPTS, result.samples, strict=True):
        assert prompt in screen
        assert max(map(len, re.findall(" +", sample)), default=0) <= 24
    for command in ("generate --checkpoint", "inspect", "train --data", "eval --checkpoint"):
        assert re.search(rf"^  .*openkda {command}", screen, re.MULTILINE)


def test_losses_are_on_the_same_windows(tmp_path: Path) -> None:
    """Both numbers again, by hand, over all windows."""
    result, _ = quick(tmp_path / "run")
    data, T = tmp_path / "run" / "data", 128
    model = load_checkpoint(result.checkpoint)
    loss, baseline = compare(model, data, T, 10**9)
    held = torch.from_numpy(np.asarray(TokenFile(data / "val").tokens, dtype=np.int64))
    whole = held[: (len(held) - 1) // T * T + 1]
    nats = []
    with torch.no_grad():
        for b in range(0, len(held) - 1, T):
            logits = model(held[None, b : b + T][:, : len(held) - 1 - b]).logits[0]
            nats.append(torch.nn.functional.cross_entropy(logits, held[b + 1 : b + 1 + T], reduction="none"))
    # Documents that begin inside a window start with an empty state in `compare`; an untrained model hardly notices.
    assert loss == pytest.approx(float(torch.cat(nats).mean()), rel=2e-2)
    trigram = NGram(np.asarray(TokenFile(data / "train").tokens), vocab_size=257)
    assert baseline == pytest.approx(trigram.loss(whole.numpy()), rel=1e-3)


def test_fixed_steps_repeat_to_the_bit(tmp_path: Path) -> None:
    a, b = (quick(tmp_path / name, steps=3)[0] for name in "ab")
    other = quick(tmp_path / "c", steps=3, seed=1)[0]
    assert (a.loss, a.samples) == (b.loss, b.samples) and other.loss != a.loss
    weights = [load_checkpoint(r.checkpoint).state_dict() for r in (a, b)]
    assert all(torch.equal(t, weights[1][name]) for name, t in weights[0].items())


def test_full_run_is_bounded_by_the_clock_or_the_steps(tmp_path: Path) -> None:
    clock = demo.demo_options(tmp_path, seconds=200, steps=None, quick=False, seed=0)
    assert clock.max_seconds == 200 and clock.preset == "demo"
    steps = demo.demo_options(tmp_path, seconds=200, steps=50, quick=False, seed=0)
    assert steps.max_seconds is None and steps.steps == 50
    for quickly in (False, True):  # 0 steps is a number, not the default
        with pytest.raises(ValueError, match="steps: expected a positive integer, received 0"):
            demo.demo_options(tmp_path, seconds=200, steps=0, quick=quickly, seed=0)
    config = PRESETS["demo"]
    assert config.kda_layers == (1, 2, 3, 5, 6, 7) and config.full_attn_layers == (4, 8)
    assert config.gate_lower_bound == -5.0 and config.use_full_rank_gate and config.mla_use_output_gate


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"

    over = threading.Event()

    def interrupt_after_the_first_step() -> None:
        while not over.wait(0.02):
            if (out / "metrics.jsonl").exists():
                os.kill(os.getpid(), signal.SIGINT)
                return

    watcher = threading.Thread(target=interrupt_after_the_first_step)
    watcher.start()
    try:
        result, screen = quick(out, steps=100000)
    finally:
        over.set()
        watcher.join()
    assert result.interrupted and math.isnan(result.loss)
    assert result.checkpoint.is_dir() and load_checkpoint(result.checkpoint).config.vocab_size == 257
    assert f"train --resume {out}" in screen


def test_default_directory_is_a_free_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert quick(None, steps=1)[0].out == Path("runs/demo")
    assert quick(None, steps=1)[0].out == Path("runs/demo-2")
    with pytest.raises(FileExistsError, match="runs/demo"):
        quick(Path("runs/demo"), steps=1)

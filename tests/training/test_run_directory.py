"""Directories of runs: taken only when free, cleaned after a failure, damage named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from openkda.models.checkpoint import load_checkpoint
from openkda.training.options import TrainOptions
from openkda.training.run_directory import RunBusy, alone, find_checkpoint, load, new_run
from openkda.training.train import resume, train


def test_failure_takes_back_what_it_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "a" / "b" / "c", tmp_path / "empty"):
        with pytest.raises(RuntimeError), new_run(path) as out:
            (out / "data").mkdir()
            (out / "data" / "x").write_text("x")
            (out / "last").symlink_to("data")
            raise RuntimeError
    assert [p.name for p in tmp_path.rglob("*")] == ["empty"]


def test_a_directory_in_use_is_left_alone(options: Callable[..., TrainOptions], tmp_path: Path) -> None:
    train(options("run", steps=1))
    with pytest.raises(FileExistsError, match=r"holds a run \(continue it with --resume\)"):
        train(options("run"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds other files"):
        train(options("notes"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="expected a directory"):
        train(options("file"))
    assert (tmp_path / "notes" / "mine.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_damage_is_named(options: Callable[..., TrainOptions]) -> None:
    checkpoint = train(options("run", steps=1)).checkpoint
    assert find_checkpoint(checkpoint) == find_checkpoint(checkpoint.parent) == checkpoint
    with pytest.raises(FileNotFoundError, match=r"the newest checkpoint of this run is .*last"):
        load_checkpoint(checkpoint.parent)
    tensors = checkpoint / "trainer.pt"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"trainer\.pt: not readable"):
        load(checkpoint)
    tensors.write_bytes(whole)
    (checkpoint / "trainer.json").write_text('{"step": 1}')
    with pytest.raises(ValueError, match=r"trainer\.json: expected a trainer record"):
        resume(checkpoint)
    (checkpoint / "trainer.json").unlink()
    with pytest.raises(ValueError, match=r"expected trainer\.json, found none"):
        resume(checkpoint)
    with pytest.raises(FileNotFoundError, match="is none"):
        resume(checkpoint / "nothing")


def test_lost_token_files_are_named(options: Callable[..., TrainOptions]) -> None:
    out = train(options("run", steps=1)).out
    (out / "data" / "train.tokens").unlink()
    with pytest.raises(ValueError, match=r"train\.tokens: expected \d+ bytes as its header says, received 0"):
        resume(out, settings=["steps=2"])


@pytest.mark.parametrize("field", ["step", "tokens", "seconds"])
def test_counts_that_are_none(options: Callable[..., TrainOptions], field: str) -> None:
    checkpoint = train(options("run", steps=1)).checkpoint
    record = json.loads((checkpoint / "trainer.json").read_text())
    for value in ("x", None, -1, float("nan"), float("inf"), [], True, 10**30):
        (checkpoint / "trainer.json").write_text(json.dumps(record | {field: value}))
        with pytest.raises(ValueError, match=r"trainer\.json: expected a trainer record"):
            load(checkpoint)


def test_parts_of_the_state_that_do_not_fit(options: Callable[..., TrainOptions]) -> None:
    checkpoint = train(options("run", steps=1)).checkpoint
    whole = torch.load(checkpoint / "trainer.pt")
    short = {"cpu": torch.zeros(3, dtype=torch.uint8)}
    for bad in ({}, [1], torch.zeros(2), whole | {"rng": {}}, whole | {"rng": short}, whole | {"optimizer": 5}):
        torch.save(bad, checkpoint / "trainer.pt")
        with pytest.raises(ValueError, match=r"trainer\.pt: "):
            resume(checkpoint, settings=["steps=2"])
    for part in whole["optimizer"].values():
        for values in part["state"].values():
            values |= {k: v.flatten()[:1] for k, v in values.items() if isinstance(v, torch.Tensor) and v.dim()}
    torch.save(whole, checkpoint / "trainer.pt")
    with pytest.raises(ValueError, match=r"optimizer state: .*expected .* received"):
        resume(checkpoint, settings=["steps=2"])


def test_a_full_disk_is_named(options: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own error is a RuntimeError without a path."""

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 847616 vs 847504")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"trainer\.pt: could not be written"):
        train(options("run", steps=1))
    assert not [p for p in (Path(options("run").out)).iterdir() if "step-" in p.name]


def test_no_checkpoint_is_ever_half_removed(
    options: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is taken apart no longer has a checkpoint's name, so that a kill leaves none half; the next save clears it away."""
    out = train(options("run", steps=2, checkpoint_every=1)).out
    taken, real = [], shutil.rmtree
    for left in (".step-9.partial", "..step-9.partial.partial", ".step-1.old"):
        (out / left).mkdir()

    def rmtree(path: Path, **options: bool) -> None:
        taken.append(Path(path).name)
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    resume(out / "step-1", settings=["steps=3", "keep=1"])  # writes step 2 once more, and keeps step 3 alone
    assert ".step-2.old" in taken and not [name for name in taken if name.startswith("step-")]
    assert sorted(p.name for p in out.iterdir() if "step-" in p.name) == ["step-3"]


@pytest.mark.parametrize("line", ["not json", "[]", "5", '{"step": "x"}', "\xff", "[" * 100_000])
def test_a_metrics_line_that_is_none_is_named(options: Callable[..., TrainOptions], line: str) -> None:
    out = train(options("run", steps=1)).out
    (out / "metrics.jsonl").write_text('{"step": 1}\n' + line + "\n", encoding="latin-1")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: expected a JSON object"):
        resume(out, settings=["steps=2"])


def test_two_runs_never_share_a_directory(options: Callable[..., TrainOptions]) -> None:
    out = train(options("run", steps=1)).out
    before = (out / "metrics.jsonl").read_bytes()
    with alone(out), pytest.raises(RunBusy, match="no other process trains in"):
        resume(out, settings=["steps=2"])
    assert (out / "metrics.jsonl").read_bytes() == before
    empty = out.parent / "empty"
    empty.mkdir()
    with alone(empty), pytest.raises(RunBusy):
        train(options("empty", steps=1))
    assert list(empty.iterdir()) == []  # and the other's directory is still there
    assert resume(out, settings=["steps=2"]).step == 2

"""Directories of runs: taken only when free, cleaned after a failure, damage named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from openkda.training.options import TrainOptions
from openkda.training.run_directory import find_checkpoint, load, new_run
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

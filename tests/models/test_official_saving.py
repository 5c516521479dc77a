"""Saving published checkpoints: all or nothing, one save at a time, and nothing that could not be loaded again."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from openkda.models import official, whole_directory
from openkda.models.make_checkpoint import make_checkpoint, random_model
from openkda.models.official import load_official, read_config, save_official

K3 = {"layers": 5, "hidden": 64, "heads": 2, "head_dim": 16, "experts": 4, "vocab_size": 96}


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published") / "k3"
    make_checkpoint(directory, **K3)
    return directory


@pytest.fixture
def copy_of_k3(k3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(k3, tmp_path / "k3"))


def test_saving_is_all_or_nothing(k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_official(k3)
    with pytest.raises(ValueError, match="expected a HybridLM"):
        save_official(model, tmp_path / "out", kind="kimi_linear")
    calls = []
    real = official.save_file

    def failing(values: dict, path: str, **options: object) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError("disk full")
        real(values, path, **options)

    monkeypatch.setattr(official, "save_file", failing)
    with pytest.raises(OSError, match="disk full"):
        save_official(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(official, "save_file", real)
    save_official(model, tmp_path / "out")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_official(model, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "model-00001-of-000003.safetensors").write_bytes(b"of an earlier checkpoint")
    save_official(model, tmp_path / "out", overwrite=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


class Stop(BaseException):
    """As Ctrl-C, anywhere."""


@pytest.mark.parametrize("cut", range(1, 18, 2))
def test_an_interrupted_replacement_leaves_the_old_checkpoint(
    k3: Path, copy_of_k3: Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine files move out and eight in: any of the moves may be the last. Both checkpoints used to be gone then."""
    before = {p.name: p.read_bytes() for p in copy_of_k3.iterdir()}
    real, moves = os.replace, []

    def interrupted(source: Path, target: Path) -> None:
        moves.append(source)
        if len(moves) == cut:
            raise Stop
        real(source, target)

    other = random_model(read_config(k3).model, seed=7)
    monkeypatch.setattr(whole_directory.os, "replace", interrupted)
    with pytest.raises(Stop):
        save_official(other, copy_of_k3, overwrite=True)
    assert {p.name: p.read_bytes() for p in copy_of_k3.iterdir()} == before


def test_what_a_killed_save_left_does_no_harm(k3: Path, copy_of_k3: Path, tmp_path: Path) -> None:
    for name in (".partial", ".replaced"):
        (copy_of_k3 / name).mkdir()
        (copy_of_k3 / name / "model-00001-of-000008.safetensors").write_bytes(b"half")
    save_official(load_official(k3), copy_of_k3, overwrite=True)
    assert sorted(p.name for p in copy_of_k3.iterdir()) == sorted(p.name for p in k3.iterdir())
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "junk").write_bytes(b"half")
    save_official(load_official(k3), tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(p.name for p in k3.iterdir())


def test_two_saves_at_once(k3: Path, copy_of_k3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = load_official(k3), official.save_file

    def meanwhile(values: dict, path: str, **options: object) -> None:
        with pytest.raises(FileExistsError, match="another save is writing there"):
            save_official(model, copy_of_k3, overwrite=True)
        real(values, path, **options)

    monkeypatch.setattr(official, "save_file", meanwhile)
    save_official(model, copy_of_k3, overwrite=True)
    assert load_official(copy_of_k3)


def test_file_systems_without_locks_and_directory_syncs(
    k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network and user-space file systems have neither."""
    real = os.fsync

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def no_directories(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(whole_directory.fcntl, "flock", no_locks)
    monkeypatch.setattr(whole_directory.os, "fsync", no_directories)
    save_official(load_official(k3), tmp_path / "out")
    assert load_official(tmp_path / "out")

    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(whole_directory.os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        save_official(load_official(k3), tmp_path / "other")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_named(k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(values: dict, path: str, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(official, "save_file", full)
    with pytest.raises(OSError, match=r"model-00001-of-000008\.safetensors: could not be written .*No space left"):
        save_official(load_official(k3), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_loaded_again_is_not_saved(k3: Path, tmp_path: Path) -> None:
    model = load_official(k3)
    state = dict(model.state_dict())
    norm, head = "language_model.model.norm.weight", "language_model.lm_head.weight"
    short = {n: t for n, t in state.items() if n != norm} | {"extra": torch.ones(1), head: state[head][:5]}
    with pytest.raises(ValueError, match=rf"state: .*missing: {norm}; unexpected: extra; shape: {head}"):
        save_official(model, tmp_path / "out", state=short)
    with pytest.raises(ValueError, match=r"kind: expected 'kimi_linear' or 'kimi_k3', received 'gpt'"):
        save_official(model, tmp_path / "out", kind="gpt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a_log: expected .*, received 'flat'"):
        save_official(model, tmp_path / "out", a_log="flat")  # type: ignore[arg-type]
    next(b for n, b in model.named_buffers() if n.endswith("w1_scale"))[1, 0, 0] = 255
    with pytest.raises(ValueError, match=r"experts\.1\.w1\.weight_scale: expected scale bytes 0\.\.254, received 255"):
        save_official(model, tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="expected a directory for the checkpoint, found a file"):
        save_official(load_official(k3), tmp_path / "file", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "sizes",
    [{"hidden": 100}, {"layers": 0}, {"experts": 1}, {"layers": "4"}, {"vocab_size": 3}, {"heads": 1.5}, {"seed": "a"}],
)
def test_impossible_miniatures(sizes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected"):
        make_checkpoint(tmp_path / "out", **{**K3, **sizes})
    with pytest.raises(ValueError, match="kimi-k3, kimi-linear-48b"):
        make_checkpoint(tmp_path / "out", like="kimi-k4")
    assert list(tmp_path.iterdir()) == []

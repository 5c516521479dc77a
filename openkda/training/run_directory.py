"""A run on disk. Everything in it is whole or absent.

OUT/data/train.*, val.*     token files
OUT/metrics.jsonl           training and validation numbers
OUT/loss.png                their picture
OUT/step-N/                 a checkpoint: model, tokenizer, trainer.json (options, counts), trainer.pt (optimizer, RNG)
OUT/last                    link to the newest of them
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openkda.models.checkpoint import save_checkpoint
from openkda.models.hybrid import HybridLM
from openkda.models.tokenizer import Tokenizer
from openkda.training.options import TrainOptions

try:
    import fcntl
except ModuleNotFoundError:  # not on this system
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("openkda.training")

STATE_JSON, STATE_TENSORS = "trainer.json", "trainer.pt"


@dataclass
class TrainerState:
    """What, beside the model, makes the next step what it would have been. tokens, seconds: since the run began."""

    options: TrainOptions
    step: int
    tokens: int
    seconds: float
    optimizer: dict[str, Any]
    rng: dict[str, Any]


class RunBusy(FileExistsError):
    """Another process (or thread) is writing to this run."""


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the run's directory, so that two processes never mix their files; RunBusy for the second. Ends with the process."""
    if fcntl is None:
        yield
        return
    handle = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusy(f"out: expected a directory that no other process trains in, {out} is busy") from None
        except OSError as error:  # some network file systems have no locks: then nobody is kept out
            log.info("%s: not locked against other processes (%s)", out, error)
        yield
    finally:
        os.close(handle)


@contextmanager
def new_run(out: str | Path) -> Iterator[Path]:
    """The directory of a new run; if the body fails before a number or a checkpoint is written, what it made goes away again.

    Raises FileExistsError if a run is there already.
    """
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"out: expected a directory, {path} is a file")
    if path.exists() and any(path.iterdir()):
        what = "a run (continue it with --resume)" if newest(path) else "other files"
        raise FileExistsError(f"out: expected a new or empty directory, {path} holds {what}")
    first_made = next((p for p in reversed([path, *path.parents]) if not p.exists()), None)
    path.mkdir(parents=True, exist_ok=True)
    try:
        with alone(path):
            yield path
    except RunBusy:
        raise
    except BaseException:
        if (path / "metrics.jsonl").exists() or steps_of(path):
            raise
        for entry in path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        if first_made is not None:
            shutil.rmtree(first_made)
        raise


def steps_of(out: Path) -> list[int]:
    """Steps with a checkpoint in the run `out`, rising."""
    return sorted(int(m[1]) for p in out.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name)) and p.is_dir())


def newest(out: Path) -> Path | None:
    """The checkpoint written last (after resuming an older one, not the one of the highest step), or None."""
    last = out / "last"
    if last.is_dir():
        named = out / last.resolve().name
        return named if named.is_dir() else last  # a link to a checkpoint elsewhere
    steps = steps_of(out)
    return out / f"step-{steps[-1]}" if steps else None


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint directory: `path` itself, or the newest one of the run `path`."""
    if path == "" or not Path(path).is_dir():  # a variable of a shell that is not set is not where one stands
        raise FileNotFoundError(f"expected a checkpoint or run directory, received {str(path)!r}, which is none")
    return newest(Path(path)) or Path(path)


def save(out: Path, state: TrainerState, model: HybridLM, tokenizer: Tokenizer, *, keep: int) -> Path:
    """Write `out/step-N`, let `out/last` name it, and of the checkpoints up to there keep the newest `keep`."""
    final = out / f"step-{state.step}"
    partial = out / f".step-{state.step}.partial"
    for left in out.glob(".*step-*"):  # by a killed process
        shutil.rmtree(left, ignore_errors=True)
    try:
        save_checkpoint(model, partial)
        tokenizer.save(partial)
        _save_tensors({"optimizer": state.optimizer, "rng": state.rng}, partial / STATE_TENSORS)
        counts = {"step": state.step, "tokens": state.tokens, "seconds": state.seconds}
        record = {**counts, "options": state.options.to_dict(), "torch": torch.__version__}
        (partial / STATE_JSON).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        _remove(final)
        os.rename(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    link = out / ".last.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name, target_is_directory=True)
    os.replace(link, out / "last")
    for step in [step for step in steps_of(out) if step <= state.step][:-keep]:
        _remove(out / f"step-{step}")
    return final


def _remove(checkpoint: Path) -> None:
    """Whole until it is gone: what a process that is killed leaves half is no longer named like a checkpoint."""
    if checkpoint.exists():
        going = checkpoint.with_name(f".{checkpoint.name}.old")
        shutil.rmtree(going, ignore_errors=True)
        os.rename(checkpoint, going)
        shutil.rmtree(going)


def _save_tensors(parts: dict[str, Any], path: Path) -> None:
    """torch.save; OSError with the path where the disk is full (torch's own is a RuntimeError that names neither)."""
    try:
        torch.save(parts, path)
    except RuntimeError as error:
        raise OSError(f"{path}: could not be written ({str(error).splitlines()[0]})") from error


def load(checkpoint: Path) -> TrainerState:
    """The trainer's side of a checkpoint. ValueError for a missing or damaged file, naming it."""
    for name in (STATE_JSON, STATE_TENSORS):
        if not (checkpoint / name).is_file():
            raise ValueError(f"{checkpoint}: expected {name}, found none: only a checkpoint made by training resumes")
    try:
        record = json.loads((checkpoint / STATE_JSON).read_text(encoding="utf-8"))
        counts = _counts(record)
        options = TrainOptions.from_dict(record["options"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{checkpoint / STATE_JSON}: expected a trainer record, received a damaged file") from None
    try:
        tensors = torch.load(checkpoint / STATE_TENSORS, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{checkpoint / STATE_TENSORS}: not readable ({reason})") from None
    parts = tensors if isinstance(tensors, dict) else {}
    rng = parts["rng"] if isinstance(parts.get("rng"), dict) else {}
    cpu = rng.get("cpu")
    now = torch.get_rng_state()
    if not isinstance(parts.get("optimizer"), dict) or not isinstance(cpu, torch.Tensor):
        raise ValueError(f"{checkpoint / STATE_TENSORS}: expected the parts optimizer and rng, received a damaged file")
    if (cpu.dtype, cpu.shape) != (now.dtype, now.shape):
        want, got = (f"{t.dtype} {list(t.shape)}" for t in (now, cpu))
        raise ValueError(f"{checkpoint / STATE_TENSORS}: random state: expected {want}, received {got}")
    return TrainerState(options, **counts, optimizer=parts["optimizer"], rng=rng)


def _counts(record: dict[str, Any]) -> dict[str, Any]:
    """step, tokens and seconds of a trainer record; TypeError for one that is no count."""
    counts = {name: record[name] for name in ("step", "tokens", "seconds")}
    for name, value in counts.items():
        kinds = (int, float) if name == "seconds" else (int,)
        if type(value) not in kinds or not 0 <= value < 1 << 62:
            raise TypeError(f"{name}: expected 0 or more, received {value!r}")
    return counts

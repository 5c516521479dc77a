"""Checkpoints: a directory with `model.safetensors` and `config.json`.

A save is all or nothing. Both files are written beside their place, flushed to the disk and renamed; a directory that did
not exist appears complete. The weights file carries its config in its own header, so that even a machine that stops
between the two renames leaves one whole checkpoint: the header decides, `config.json` is its readable copy.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from openkda.models.config import ModelConfig
from openkda.models.field_types import parse_json
from openkda.models.hybrid import HybridLM
from openkda.models.official import is_published, load_text_model, read_config
from openkda.models.official_names import plain_names
from openkda.models.whole_directory import flush

log = logging.getLogger("openkda.models.checkpoint")

WEIGHTS = "model.safetensors"
CONFIG = "config.json"

_HEADER_KEY = "openkda_config"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def save_checkpoint(model: HybridLM, directory: str | Path) -> None:
    """Write `model` to `directory`, every tensor in its own dtype. Replaces an earlier checkpoint there, and leaves other
    files alone; on any failure the earlier one is still whole.

    Raises: OSError with the path (disk full, not a directory, no permission).
    """
    directory = Path(directory)
    config = json.dumps(model.config.to_dict(), indent=2) + "\n"
    tensors = {name: t.detach().contiguous() for name, t in plain_names(model.state_dict()).items()}
    if directory.exists():
        if not directory.is_dir():
            raise NotADirectoryError(f"{directory}: expected a directory for the checkpoint, found a file")
        _write_files(tensors, config, directory)
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    whole = directory.parent / f".{directory.name}.partial"
    shutil.rmtree(whole, ignore_errors=True)  # left by a process that was killed
    whole.mkdir()
    try:
        _write_files(tensors, config, whole)
        os.rename(whole, directory)
    except BaseException:
        shutil.rmtree(whole, ignore_errors=True)
        raise
    flush(directory.parent)


def load_config(directory: str | Path) -> ModelConfig:
    """The configuration of the checkpoint in `directory`; of a published one (openkda/models/official.py) its text model's.

    Raises: FileNotFoundError or ValueError naming the file.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such checkpoint directory")
    path = directory / CONFIG
    if is_published(directory):
        return read_config(directory).model.replace(vision=None)
    if not path.is_file():
        run = f"; the newest checkpoint of this run is {directory / 'last'}" if (directory / "last").is_dir() else ""
        raise FileNotFoundError(f"{path}: not found; a checkpoint has {CONFIG} and {WEIGHTS}{run}")
    fields = _parse(path, path.read_bytes())
    with _opened(directory / WEIGHTS, "cpu") as file:
        header = (file.metadata() or {}).get(_HEADER_KEY)
    if header is not None:
        saved = _parse(directory / WEIGHTS, header)
        differing = sorted(k for k in saved.keys() | fields.keys() if saved.get(k) != fields.get(k))
        if differing:
            log.warning("%s differs from the config inside %s in %s; the latter is used", path, WEIGHTS, differing)
        fields, path = saved, directory / WEIGHTS
    try:
        return ModelConfig.from_dict(fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def stored_dtype(directory: str | Path) -> torch.dtype:
    """The dtype of the embedding in the checkpoint, which stands for that of its activations."""
    with _opened(Path(directory) / WEIGHTS, "cpu") as file:
        return file.get_slice("model.embed_tokens.weight")[:0].dtype


def load_checkpoint(
    directory: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> HybridLM:
    """The model saved in `directory`, in eval mode; bit-equal to what was saved unless `dtype` converts it (float32
    parameters such as A_log stay float32 even then). Of a published checkpoint, its text model.

    Raises: FileNotFoundError for a missing directory or file; ValueError naming the file, and every tensor that is
        missing, unexpected or of another shape. Nothing is initialised: each parameter comes from the file.
    """
    directory = Path(directory)
    config = load_config(directory)
    if is_published(directory):
        return load_text_model(directory, device=device, dtype=dtype)
    path = directory / WEIGHTS
    with torch.device("meta"):
        model = HybridLM(config)
    wanted = model.state_dict()
    with _opened(path, "cpu") as file:
        _compare(path, wanted, {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
        tensors = {name: _read(file, path, name, wanted[name], device) for name in wanted}
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.to(device=device, dtype=dtype).eval()  # also widens what must be float32 and was stored narrower


def _read(file: Any, path: Path, name: str, like: Tensor, device: str | torch.device) -> Tensor:
    try:
        t = file.get_tensor(name)
    except (SafetensorError, RuntimeError, OSError) as error:
        raise ValueError(f"{path}: tensor {name} cannot be read ({error})") from None
    if like.is_floating_point() and t.dtype not in _FLOATS:  # 8-bit floats need scales that we do not have
        raise ValueError(f"{path}: tensor {name}: expected a float dtype, found {t.dtype}")
    if not like.is_floating_point() and t.dtype != like.dtype:
        raise ValueError(f"{path}: tensor {name}: expected {like.dtype}, found {t.dtype}")
    # A copy: the tensor read is a view of the mapped file, which a later save may replace.
    return t.to(device=device, copy=True)


def _compare(path: Path, wanted: dict[str, Tensor], found: dict[str, tuple[int, ...]]) -> None:
    missing = sorted(wanted.keys() - found.keys())
    unexpected = sorted(found.keys() - wanted.keys())
    shapes = [
        f"{name}: expected {list(wanted[name].shape)}, found {list(found[name])}"
        for name in sorted(wanted.keys() & found.keys())
        if tuple(wanted[name].shape) != found[name]
    ]
    faults = (("missing", missing), ("unexpected", unexpected), ("shape", shapes))
    if missing or unexpected or shapes:
        listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in faults if names)
        raise ValueError(f"{path}: tensors do not fit the config. {listed}")


@contextmanager
def _opened(path: Path, device: str) -> Iterator[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found; a checkpoint has {CONFIG} and {WEIGHTS}")
    try:
        handle = safe_open(str(path), framework="pt", device=device)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from None
    with handle as file:
        yield file


def _parse(path: Path, text: str | bytes) -> dict[str, Any]:
    try:
        fields = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(fields).__name__}")
    return fields


def _write_files(tensors: dict[str, Tensor], config: str, directory: Path) -> None:
    """Both files complete and on the disk first, then the two renames: weights (the moment of truth), then config."""
    partial = {name: directory / f".{name}.partial" for name in (WEIGHTS, CONFIG)}
    try:
        save_file(tensors, str(partial[WEIGHTS]), metadata={"format": "pt", _HEADER_KEY: config})
        partial[CONFIG].write_text(config)
        partial[WEIGHTS].chmod(
            partial[CONFIG].stat().st_mode & 0o777
        )  # safetensors makes files that only the owner reads
        for path in partial.values():
            flush(path)
        for name in (WEIGHTS, CONFIG):
            os.replace(partial[name], directory / name)
        flush(directory)
    except SafetensorError as error:
        raise OSError(f"{directory / WEIGHTS}: could not be written ({error})") from None
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)

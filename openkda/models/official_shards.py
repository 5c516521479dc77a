"""The files of a sharded checkpoint: index, headers, and the comparison of what they hold with what a model wants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from openkda.models.field_types import parse_json
from openkda.models.official_names import PublishedTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Widened where they are used: the router, pseudo-queries; and what is float32 in any case.
_OF_ANY_DTYPE = (".gate.weight", "res_proj.weight", ".A_log", "conv1d.weight")

_FLOATS = ("F64", "F32", "F16", "BF16")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An open safetensors file. Raises: FileNotFoundError or ValueError naming it (corrupt, cut off)."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found")
    try:
        handle = safe_open(str(path), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from None
    with handle as file:
        yield file


class Shards:
    """A directory of safetensors files. files: tensor name -> file name, from the index (or the one file there is).

    Files that hold nothing of what is wanted need not be there: a download may stop at the layers asked for.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: dict[str, Identity | None] = {}  # files that were read, as they were before
        if not directory.is_dir():
            raise FileNotFoundError(f"{directory}: no such checkpoint directory")
        index = directory / INDEX
        self.seen[INDEX] = identity(index)
        if index.is_file():
            self.files = _read_index(index)
        elif (directory / SINGLE).is_file():
            with opened(directory / SINGLE) as file:
                self.files = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise FileNotFoundError(f"{directory}: expected {INDEX} or {SINGLE}")
        self._headers: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}

    def header(self, file_name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """name -> (dtype, shape) of every tensor in a file; read once."""
        if file_name not in self._headers:
            self.seen[file_name] = identity(self.directory / file_name)
            with opened(self.directory / file_name) as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                self._headers[file_name] = {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
        return self._headers[file_name]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None where its file does not exist."""
        if not self.exists(self.files[name]):
            return None
        return self.header(self.files[name]).get(name, ("", ()))[1]

    def exists(self, file_name: str) -> bool:
        return (self.directory / file_name).is_file()

    def check(self, wanted: Sequence[PublishedTensor], left_out: set[str]) -> None:
        """Raise ValueError that lists every wanted tensor that is missing, misshapen or of a wrong dtype, every tensor
        that nobody wants, and every disagreement of the index with the files."""
        names = {t.name for t in wanted}
        faults: dict[str, list[str]] = {"missing": sorted(names - self.files.keys())}
        faults["unexpected"] = sorted(self.files.keys() - names - left_out)
        present = [t for t in wanted if t.name in self.files]
        absent = sorted(f for f in {self.files[t.name] for t in present} if not self.exists(f))
        if absent:
            raise FileNotFoundError(f"{self.directory / INDEX}: names files that do not exist: {some(absent)}")
        by_file: dict[str, set[str]] = {}
        for name, file_name in self.files.items():
            by_file.setdefault(file_name, set()).add(name)
        for file_name in sorted({self.files[t.name] for t in present}):
            header, listed = self.header(file_name), by_file[file_name]
            faults.setdefault("in the index, not in the file", []).extend(sorted(listed - header.keys()))
            faults.setdefault("in the file, not in the index", []).extend(sorted(header.keys() - listed))
        for t in present:
            dtype, shape = self.header(self.files[t.name]).get(t.name, (None, t.shape))
            if shape != t.shape:
                faults.setdefault("shape", []).append(f"{t.name}: expected {list(t.shape)}, found {list(shape)}")
            allowed = ("U8",) if t.dtype == torch.uint8 else _FLOATS
            if dtype is not None and dtype not in allowed:
                faults.setdefault("dtype", []).append(f"{t.name}: expected {' or '.join(allowed)}, found {dtype}")
        found = [f"{kind}: {some(items)}" for kind, items in faults.items() if items]
        if found:
            raise ValueError(f"{self.directory}: tensors do not fit the config. {'; '.join(found)}")

    def check_matrices(self, wanted: Sequence[PublishedTensor]) -> None:
        """Raise ValueError where matrices that are multiplied with the same activations have several dtypes."""
        dtypes: dict[str, list[str]] = {}
        for t in wanted:
            if len(t.shape) > 1 and not t.name.endswith(_OF_ANY_DTYPE):
                dtypes.setdefault(self.header(self.files[t.name])[t.name][0], []).append(t.name)
        found = sorted((names, dtype) for dtype, names in dtypes.items() if dtype != "U8")
        if len(found) > 1:
            listed = "; ".join(f"{dtype}: {some(names, 3)}" for names, dtype in sorted(found, key=lambda f: -len(f[0])))
            raise ValueError(
                f"{self.directory}: expected matrices of one dtype (dtype=... converts them), found {listed}"
            )

    def check_unchanged(self) -> None:
        """Raise ValueError where a file is not the one that was read: parts of two checkpoints are no model."""
        changed = sorted(name for name, before in self.seen.items() if identity(self.directory / name) != before)
        if changed:
            raise ValueError(f"{self.directory}: changed while it was loaded: {some(changed)}; load it again")


Identity = tuple[int, int, int, int]


def identity(path: Path) -> Identity | None:
    """What tells a file from one that replaced or changed it; None for none."""
    try:
        s = path.stat()
    except OSError:
        return None
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns


def some(items: list[str], limit: int = 50) -> str:
    rest = f", and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = parse_json(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object with weight_map ({error!r})") from None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ValueError(f"{path}: weight_map: expected tensor names and file names")
    outside = sorted({f for f in weight_map.values() if Path(f).name != f})
    if outside:
        raise ValueError(f"{path}: expected plain file names, found {', '.join(outside)}")
    return weight_map

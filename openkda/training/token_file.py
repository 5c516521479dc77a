"""Token files: a corpus as one flat array on disk, memory-mapped, so that it may be larger than memory.

    NAME.json     header, written last: without it there is no token file
    NAME.tokens   uint16 or uint32: eos, document, eos, document, ..., eos
    NAME.starts   int64: where each document begins, its leading eos included

One eos both ends a document and begins the next. A document therefore is trained from its first token on (the eos is
what the first token is predicted from) up to its end (the next eos is the last target), and no position is masked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openkda.models.tokenizer import Tokenizer
from openkda.training.corpus import TextFile, read_pieces

FORMAT = 1
PARTS = ("tokens", "starts", "json")
DTYPES = ("uint16", "uint32")


class TokenFile:
    """Read side. `tokens` and `starts` are memory maps; nothing is read before it is indexed.

    Raises ValueError for a missing, damaged or truncated file, showing expected and received.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header = _read_header(self.path)
        self.text_bytes: int = self.header["text_bytes"]
        self.eos_id: int = self.header["eos_id"]
        self.vocab_size: int = self.header["vocab_size"]
        self.tokens = _map(self.path, "tokens", np.dtype(self.header["dtype"]), self.header["tokens"])
        self.starts = _map(self.path, "starts", np.dtype(np.int64), self.header["documents"])
        ends = [int(self.starts[i]) for i in (0, -1) if len(self.starts)]
        if ends and not 0 == ends[0] <= ends[1] < len(self.tokens):
            want = f"document starts from 0 to below {len(self.tokens)}"
            raise ValueError(f"{_part(self.path, 'starts')}: expected {want}, received {ends[0]}..{ends[1]}")

    def __len__(self) -> int:
        return len(self.tokens)

    def starts_between(self, begin: int, end: int) -> NDArray[np.int64]:
        """Document starts p with begin < p < end."""
        first = np.searchsorted(self.starts, begin, side="right")
        last = np.searchsorted(self.starts, end, side="left")
        return np.asarray(self.starts[first:last])


def write_token_file(
    path: str | Path,
    files: Sequence[TextFile],
    tokenizer: Tokenizer,
    *,
    advance: Callable[[int], None] = lambda text_bytes: None,
) -> TokenFile:
    """Encode `files` into a new token file; `advance` is told the bytes of text done since it was last called.

    Atomic: an interrupted or failed call leaves no file behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = {part: path.with_name(f"{path.name}.{part}.partial") for part in PARTS}
    try:
        header = _write_arrays(partial, files, tokenizer, advance)
        partial["json"].write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        for part in PARTS:
            os.replace(partial[part], _part(path, part))
    finally:
        for leftover in partial.values():
            leftover.unlink(missing_ok=True)
    return TokenFile(path)


def _write_arrays(
    partial: dict[str, Path], files: Sequence[TextFile], tokenizer: Tokenizer, advance: Callable[[int], None]
) -> dict[str, Any]:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    starts, length, text_bytes = [], 0, 0
    with open(partial["tokens"], "wb") as out:
        for file in files:
            starts.append(length)
            length += _append(out, [tokenizer.eos_id], dtype)
            for piece in read_pieces(file):
                length += _append(out, tokenizer.encode(piece), dtype)
                size = len(piece.encode("utf-8"))
                text_bytes += size
                advance(size)
        length += _append(out, [tokenizer.eos_id], dtype)
    with open(partial["starts"], "wb") as out:
        _append(out, starts, np.dtype(np.int64))
    return {
        "format": FORMAT,
        "dtype": dtype.name,
        "tokens": length,
        "documents": len(starts),
        "text_bytes": text_bytes,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    }


def _append(out: Any, values: Sequence[int], dtype: np.dtype[Any]) -> int:
    out.write(np.asarray(values, dtype=dtype).tobytes())
    return len(values)


def _part(path: Path, part: str) -> Path:
    return path.with_name(f"{path.name}.{part}")


def _read_header(path: Path) -> dict[str, Any]:
    file = _part(path, "json")
    if not file.exists():
        raise ValueError(f"token file {path}: expected {file.name} beside it, found none")
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
        received = header["format"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{file}: expected the header of a token file, received a damaged file") from None
    if received != FORMAT:
        raise ValueError(f"{file}: expected format {FORMAT}, received {received!r}")
    for name in ("tokens", "documents", "text_bytes", "vocab_size", "eos_id"):
        value = header.get(name)
        if type(value) is not int or value < 0:
            raise ValueError(f"{file}: {name}: expected an integer, 0 or more, received {value!r}")
    if header.get("dtype") not in DTYPES:
        raise ValueError(f"{file}: dtype: expected {' or '.join(DTYPES)}, received {header.get('dtype')!r}")
    return header


def _map(path: Path, part: str, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
    file = _part(path, part)
    expected = length * dtype.itemsize
    received = file.stat().st_size if file.exists() else 0
    if received != expected:
        raise ValueError(f"{file}: expected {expected} bytes as its header says, received {received}")
    return np.memmap(file, dtype=dtype, mode="r", shape=(length,))

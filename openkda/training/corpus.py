"""Which text a run reads, and which part of it is held out. Nothing here opens a file for longer than a look at it.

A file is held out by the hash of its path below the directory that was named: the same file falls on the same side
on every machine and however many files stand beside it.
"""

from __future__ import annotations

import codecs
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PYTHON_STDLIB = "python-stdlib"  # as a data path: the source of the running Python's standard library
# pydoc_data is one generated file of escaped prose, 7 % of all bytes: held out by chance, it would be most of that side.
STDLIB_LEFT_OUT = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "pydoc_data", "__pycache__"})
_LOOK = 1 << 16  # bytes looked at to tell text from other files
_PIECE = 1 << 22  # bytes read at a time


@dataclass(frozen=True)
class TextFile:
    """Bytes [begin, end) of a UTF-8 file: one document. `name` is its path below the directory that was named."""

    name: str
    path: Path
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def find_files(paths: Sequence[str | Path]) -> list[TextFile]:
    """Every text file at or below `paths`, in the order given, directories sorted by name.

    Directories are walked without hidden entries and `__pycache__`; files there that are not UTF-8 text are passed
    over. Raises FileNotFoundError for a path that does not exist, ValueError for a named file that is not UTF-8 text
    and when nothing at all is found; an unreadable file raises the system's PermissionError.
    """
    if not paths:
        raise ValueError("data: expected at least one path, received none")
    found: list[TextFile] = []
    for given in paths:
        path = Path(given)
        if not str(given):
            raise ValueError("data: expected a file or directory, received an empty name")
        if str(given) == PYTHON_STDLIB and not path.exists():
            found += stdlib_files()
        elif path.is_dir():
            found += [_text_file(p, path) for p in _walk(path) if is_text(p)]
        elif not path.exists():
            raise FileNotFoundError(f"data: no such file or directory: {str(given)!r}")
        elif not path.is_file():  # a pipe or a device: it would be read more than once, or for ever
            raise ValueError(f"data: {path}: expected a file or directory, received neither")
        elif not is_text(path):
            raise ValueError(f"data: {path}: expected UTF-8 text, received other bytes")
        else:
            found.append(_text_file(path, path.parent))
    found = [f for f in found if f.size > 0]
    if not found:
        raise ValueError(f"data: expected text, found no text file that is not empty in {[str(p) for p in paths]}")
    return found


def stdlib_files() -> list[TextFile]:
    """The `.py` files of the standard library, without its tests, idlelib and installed packages: about 10 MB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in _walk(root, STDLIB_LEFT_OUT) if p.suffix == ".py" and is_text(p))
    return [_text_file(p, root) for p in files]


def is_text(path: Path) -> bool:
    """Whether the first 64 KiB are UTF-8 without a NUL byte."""
    with open(path, "rb") as file:
        head = file.read(_LOOK)
    if b"\0" in head:
        return False
    try:  # an incremental decoder, because the look may end inside a character (a whole file may not)
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < _LOOK)
    except UnicodeDecodeError:
        return False
    return True


def hold_out(files: Sequence[TextFile], fraction: float) -> tuple[list[TextFile], list[TextFile]]:
    """(training files, held-out files), split by `path_hash`.

    With files so few that one side would be empty, the last `fraction` of every file is held out instead.
    """
    train = [f for f in files if path_hash(f.name) >= fraction]
    held = [f for f in files if path_hash(f.name) < fraction]
    if train and held:
        return train, held
    cuts = [_character_start(f, f.end - int(f.size * fraction)) for f in files]
    train = [replace(f, end=cut) for f, cut in zip(files, cuts, strict=True)]
    held = [replace(f, begin=cut) for f, cut in zip(files, cuts, strict=True)]
    return [f for f in train if f.size], [f for f in held if f.size]


def path_hash(name: str) -> float:
    """A number in [0, 1) from the SHA-256 of a path; uniform over paths, the same everywhere."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64


def read_pieces(file: TextFile) -> Iterator[str]:
    """The document's text in pieces of about 4 MB that end at a line end, so that no file has to fit in memory.

    Bytes that are not UTF-8 (past the first 64 KiB, which `is_text` has seen) become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    held, left = "", file.size
    with open(file.path, "rb") as stream:
        stream.seek(file.begin)
        while left > 0 and (block := stream.read(min(_PIECE, left))):
            left -= len(block)
            held += decoder.decode(block)
            cut = held.rfind("\n") + 1
            if cut:
                yield held[:cut]
                held = held[cut:]
    held += decoder.decode(b"", final=True)
    if held:
        yield held


def _walk(root: Path, left_out: frozenset[str] = frozenset({"__pycache__"})) -> Iterator[Path]:
    for entry in sorted(root.iterdir()):
        if entry.name.startswith(".") or entry.name in left_out:
            continue
        if entry.is_dir():
            if not entry.is_symlink():  # a link to a parent would never end
                yield from _walk(entry, left_out)
        elif entry.is_file():
            yield entry


def _text_file(path: Path, root: Path) -> TextFile:
    return TextFile(path.relative_to(root).as_posix(), path, 0, path.stat().st_size)


def _character_start(file: TextFile, position: int) -> int:
    """The first position from `position` on that does not cut a UTF-8 character."""
    with open(file.path, "rb") as stream:
        stream.seek(position)
        tail = stream.read(4)
    skip = next((i for i, byte in enumerate(tail) if byte & 0xC0 != 0x80), len(tail))
    return min(position + skip, file.end)

"""A directory of files that appears whole, or whose files take the place of older ones: all or nothing."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on Windows: there two saves at once are not told apart
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("openkda.models.checkpoint")

_REPLACED = ".replaced"


@contextmanager
def whole_directory(directory: Path, is_old: Callable[[str], bool]) -> Iterator[Path]:
    """A fresh directory to write files into; when the block ends, they are in `directory`, and on the disk.

    Files of `directory` whose names satisfy `is_old` go, others stay. If the block or the exchange is interrupted, `directory`
    is what it was. A process that is killed during the exchange leaves the older files in its subdirectory `.replaced`.
    Raises: OSError with the path; FileExistsError where another save is at work.
    """
    exists = directory.exists()
    if exists and not directory.is_dir():
        raise NotADirectoryError(f"{directory}: expected a directory for the checkpoint, found a file")
    # Beside the files that it replaces: the parent of an existing directory may be another disk.
    partial = directory / ".partial" if exists else directory.parent / f".{directory.name}.partial"
    partial.parent.mkdir(parents=True, exist_ok=True)
    with _locked(partial, directory):
        try:
            yield partial
            for path in partial.iterdir():
                flush(path)
            if exists:
                _exchange(partial, directory, is_old)
            else:
                os.rename(partial, directory)
            flush(directory if exists else directory.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on the disk.

    Some file systems in user space cannot say so of a directory; they are believed.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS) or not path.is_dir():
            raise
    finally:
        os.close(handle)


@contextmanager
def _locked(partial: Path, directory: Path) -> Iterator[None]:
    """`partial` as an empty directory of this call alone; what a killed process left there is removed."""
    partial.mkdir(exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FileExistsError(f"{directory}: another save is writing there ({partial})") from None
            except OSError as error:
                log.info("%s: no locks on this file system (%s)", directory, error)
        for left in partial.iterdir():
            left.unlink()
        yield
    finally:
        os.close(handle)


def _exchange(partial: Path, directory: Path, is_old: Callable[[str], bool]) -> None:
    away = directory / _REPLACED
    shutil.rmtree(away, ignore_errors=True)  # left by a process that was killed
    away.mkdir()
    moves: list[tuple[Path, Path]] = []

    def move(source: Path, target: Path) -> None:
        moves.append((source, target))  # first: an interrupt between the two lines must not lose it
        os.replace(source, target)

    try:
        for name in sorted(p.name for p in directory.iterdir() if is_old(p.name) and not p.is_dir()):
            move(directory / name, away / name)
        for name in sorted(p.name for p in partial.iterdir()):
            move(partial / name, directory / name)
    except BaseException:
        for source, target in reversed(moves):
            if not source.exists() and not source.is_symlink():
                os.replace(target, source)
        with suppress(OSError):  # not empty where moving back failed: then the files stay there
            away.rmdir()
        raise
    shutil.rmtree(away)

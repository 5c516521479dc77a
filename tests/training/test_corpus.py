"""Which files are read, which are held out, and how a file larger than a piece is read."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from openkda.training import corpus
from openkda.training.corpus import PYTHON_STDLIB, TextFile, find_files, hold_out, path_hash, read_pieces


def whole(file: TextFile) -> str:
    return "".join(read_pieces(file))


def test_hash_is_the_published_one() -> None:
    """Pinned: a split must never move, or a checkpoint would be scored on what it was trained on."""
    assert path_hash("json/decoder.py") == pytest.approx(0.2311742724, abs=1e-9)
    values = [path_hash(f"{i}.py") for i in range(2000)]
    assert min(values) >= 0.0 and max(values) < 1.0
    assert abs(sum(v < 0.05 for v in values) / 2000 - 0.05) < 0.02


def test_a_file_stays_on_its_side(text: Path) -> None:
    files = find_files([text])
    train, held = hold_out(files, 0.2)
    assert len(files) == 40 and 0 < len(held) < 20
    assert sorted(f.name for f in train + held) == sorted(f.name for f in files)
    fewer_train, fewer_held = hold_out(files[:30], 0.2)
    assert set(fewer_train) <= set(train) and set(fewer_held) <= set(held)


def test_names_do_not_depend_on_where_the_directory_is(text: Path, tmp_path: Path) -> None:
    (tmp_path / "moved").symlink_to(text)
    assert [f.name for f in find_files([tmp_path / "moved"])] == [f.name for f in find_files([text])]


def test_one_file_gives_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("漢" * 1000, encoding="utf-8")
    (train,), (held,) = hold_out(find_files([path]), 0.05)
    assert whole(train) + whole(held) == "漢" * 1000  # no character cut in half
    assert 48 <= len(whole(held)) <= 51


def test_directories_pass_over_what_is_no_text(tmp_path: Path) -> None:
    for name, content in {
        "a.txt": b"text", "zero.bin": b"a\0b", "latin.txt": "é".encode("latin-1"), ".hidden": b"x", "empty.txt": b"",
        "__pycache__/c.py": b"x", ".git/d": b"x", "sub/e.md": b"deep",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert [f.name for f in find_files([tmp_path])] == ["a.txt", "sub/e.md"]


@pytest.mark.parametrize(
    ("content", "error"), [(None, "no such file"), (b"a\0b", "UTF-8 text"), (b"\xff\xfe", "UTF-8"), (b"", "not empty")]
)
def test_a_named_file_must_be_text(tmp_path: Path, content: bytes | None, error: str) -> None:
    path = tmp_path / "named.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        find_files([path])


def test_an_empty_name_is_not_the_working_directory() -> None:
    with pytest.raises(ValueError, match="received an empty name"):
        find_files([""])


def test_pipes_are_refused_by_name_and_passed_over_in_directories(tmp_path: Path) -> None:
    """Opening one would wait for a writer, for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: expected a file or directory"):
        find_files([tmp_path / "pipe"])
    (tmp_path / "a.txt").write_text("text")
    assert [f.name for f in find_files([tmp_path])] == ["a.txt"]


def test_a_file_name_may_be_any_bytes(tmp_path: Path) -> None:
    try:
        for name in (b"n\xff.txt", b"a.txt"):
            Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("some text\n" * 40)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    train, held = hold_out(find_files([tmp_path]), 0.5)
    assert len({f.name for f in train + held}) == 2


def test_no_paths() -> None:
    with pytest.raises(ValueError, match="at least one path"):
        find_files([])


def test_standard_library() -> None:
    files = find_files([PYTHON_STDLIB])
    root = Path(sysconfig.get_paths()["stdlib"])
    names = {f.name for f in files}
    assert {"json/decoder.py", "argparse.py"} <= names and all((root / n).is_file() for n in list(names)[:5])
    parts = {part for name in names for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "idlelib", "site-packages", "pydoc_data", "__pycache__"}
    assert 5e6 < sum(f.size for f in files) < 30e6
    train, held = hold_out(files, 0.05)
    assert 0.01 < sum(f.size for f in held) / sum(f.size for f in train) < 0.2


@pytest.mark.parametrize("piece", [1, 3, 7, 64, 100_000])
def test_pieces_join_to_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(corpus, "_PIECE", piece)
    path = tmp_path / "a.txt"
    content = "añ漢🙂\n" * 20 + "no line end at the end"
    path.write_text(content, encoding="utf-8")
    pieces = list(read_pieces(find_files([path])[0]))
    assert "".join(pieces) == content
    assert all(p.endswith("\n") for p in pieces[:-1])
    assert len(pieces) >= 5 or piece > 64


def test_broken_bytes_far_into_a_file_become_replacement_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 70_000 + b"\xff" + b"b")
    assert whole(find_files([path])[0]) == "a" * 70_000 + "\ufffd" + "b"

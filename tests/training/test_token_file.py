"""Token files: the same tokens come back, from disk, and nothing half-written is ever taken for whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from openkda.models.tokenizer import ByteTokenizer
from openkda.training import corpus
from openkda.training.corpus import find_files
from openkda.training.token_file import TokenFile, write_token_file


class WideTokenizer(ByteTokenizer):
    """Ids past 65,535."""

    vocab_size = 70_257
    eos_id = 70_256

    def encode(self, text: str) -> list[int]:
        return [70_000 + b for b in text.encode("utf-8")]


def test_documents_come_back(text: Path, tmp_path: Path) -> None:
    files = find_files([text])
    done: list[int] = []
    tokens = write_token_file(tmp_path / "d" / "t", files, ByteTokenizer(), advance=done.append)
    assert isinstance(tokens.tokens, np.memmap) and tokens.tokens.dtype == np.uint16
    ends = [*tokens.starts[1:], len(tokens) - 1]
    assert len(tokens.starts) == len(files) and tokens.tokens[-1] == tokens.eos_id
    for file, start, end in zip(files, tokens.starts, ends, strict=True):
        assert tokens.tokens[start] == tokens.eos_id
        assert bytes(tokens.tokens[start + 1 : end].astype(np.uint8)) == file.path.read_bytes()
    assert tokens.text_bytes == sum(f.size for f in files) == sum(done)


def test_a_file_of_many_pieces_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus larger than a piece: what is in memory at a time is a piece, not the file."""
    monkeypatch.setattr(corpus, "_PIECE", 1000)
    path = tmp_path / "big.txt"
    path.write_text("".join(f"line {i} é\n" for i in range(5000)), encoding="utf-8")
    longest = 0

    class Watching(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            nonlocal longest
            longest = max(longest, len(text))
            return super().encode(text)

    tokens = write_token_file(tmp_path / "t", find_files([path]), Watching())
    assert len(tokens.starts) == 1 and longest < 1100
    assert bytes(tokens.tokens[1:-1].astype(np.uint8)) == path.read_bytes()


def test_large_vocabularies_take_four_bytes(text: Path, tmp_path: Path) -> None:
    tokens = write_token_file(tmp_path / "t", find_files([text])[:2], WideTokenizer())
    assert tokens.tokens.dtype == np.uint32 and tokens.tokens.max() == 70_256


def test_starts_between(text: Path, tmp_path: Path) -> None:
    tokens = write_token_file(tmp_path / "t", find_files([text])[:9], ByteTokenizer())
    for begin, end in ((0, len(tokens)), (int(tokens.starts[2]), int(tokens.starts[4])), (5, 6)):
        want = [s for s in tokens.starts if begin < s < end]
        assert tokens.starts_between(begin, end).tolist() == want


def test_failure_leaves_nothing(text: Path, tmp_path: Path) -> None:
    class Failing(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        write_token_file(tmp_path / "t", find_files([text]), Failing())
    assert list(tmp_path.iterdir()) == []


def test_damage_is_named(text: Path, tmp_path: Path) -> None:
    write_token_file(tmp_path / "t", find_files([text]), ByteTokenizer())
    arrays = tmp_path / "t.tokens"
    size = arrays.stat().st_size
    arrays.write_bytes(arrays.read_bytes()[:-2])
    with pytest.raises(ValueError, match=rf"t\.tokens: expected {size} bytes .* received {size - 2}"):
        TokenFile(tmp_path / "t")
    header = json.loads((tmp_path / "t.json").read_text())
    (tmp_path / "t.json").write_text(json.dumps(header | {"format": 99}))
    with pytest.raises(ValueError, match="expected format 1, received 99"):
        TokenFile(tmp_path / "t")
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        TokenFile(tmp_path / "t")
    (tmp_path / "t.json").unlink()
    with pytest.raises(ValueError, match=r"expected t\.json"):
        TokenFile(tmp_path / "t")


@pytest.mark.parametrize("name", ["dtype", "tokens", "documents", "text_bytes", "vocab_size", "eos_id"])
def test_header_values_of_another_kind_are_named(text: Path, tmp_path: Path, name: str) -> None:
    write_token_file(tmp_path / "t", find_files([text])[:2], ByteTokenizer())
    header = json.loads((tmp_path / "t.json").read_text())
    for value in ("x", "object", "float32", None, -1, 1.5, [], True):
        (tmp_path / "t.json").write_text(json.dumps(header | {name: value}))
        with pytest.raises(ValueError, match=rf"t\.json: {name}: expected"):
            TokenFile(tmp_path / "t")
    del header[name]
    (tmp_path / "t.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match=rf"t\.json: {name}: expected"):
        TokenFile(tmp_path / "t")


def test_document_starts_outside_the_text_are_named(text: Path, tmp_path: Path) -> None:
    tokens = write_token_file(tmp_path / "t", find_files([text])[:2], ByteTokenizer())
    for bad in ([-1, 5], [1, 5], [0, len(tokens)], [5, 0]):
        np.array(bad, dtype=np.int64).tofile(tmp_path / "t.starts")
        with pytest.raises(ValueError, match=r"t\.starts: expected document starts from 0"):
            TokenFile(tmp_path / "t")

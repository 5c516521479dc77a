"""Text to token ids and back: bytes, any file of the `tokenizers` library, or a tiktoken rank file.

A checkpoint directory records its tokenizer (`save`), so that generation and evaluation find the right one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from openkda.models.tiktoken_file import RANK_FILE, load_tiktoken

RECORD = "openkda_tokenizer.json"  # in a checkpoint directory: which tokenizer, and the file it reads


class Tokenizer(Protocol):
    """What training, evaluation and generation ask of a tokenizer.

    vocab_size: number of ids, special ones included; every id is below it.
    eos_id: stands between documents: it ends one and begins the next, so it is also the id to begin a prompt with.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; never a special id, whatever the text spells."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special ids are left out."""
        ...

    def save(self, directory: Path) -> None:
        """Write what `load_tokenizer(directory)` needs."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and 256 between documents."""

    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are not UTF-8 (a character cut in half) become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        _write_record(directory, {"kind": "bytes"})


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library. Needs the extra `hf`.

    Special tokens spelled out in a text are encoded as ordinary text. The id between documents is the file's own end
    token where it has one of the usual names, else one new id past its vocabulary.
    """

    END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "[EOS]", "</s>", "<eos>", "<|im_end|>")

    def __init__(self, path: str | Path) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ModuleNotFoundError:
            raise ModuleNotFoundError(f"reading {path} needs tokenizers: pip install 'openkda[hf]'") from None
        self._content = _read(Path(path))
        try:
            self._backend = Backend.from_str(self._content)
        except Exception as error:  # the library raises plain Exception for every malformed file
            raise ValueError(f"{path}: expected a tokenizers file, received something else ({error})") from None
        self._backend.encode_special_tokens = True
        size = self._backend.get_vocab_size(with_added_tokens=True)
        known = (self._backend.token_to_id(name) for name in self.END_TOKENS)
        found = next((i for i in known if i is not None), None)
        self.eos_id: int = size if found is None else found
        self.vocab_size: int = max(size, self.eos_id + 1)
        self._extra = found is None

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        kept = [i for i in ids if not (self._extra and i == self.eos_id)]
        return self._backend.decode(kept, skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        _write_record(directory, {"kind": "tokenizers", "file": "tokenizer.json"})
        (Path(directory) / "tokenizer.json").write_text(self._content, encoding="utf-8")


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer named "bytes", of a `tokenizers` JSON or tiktoken rank file, or recorded in a checkpoint directory.

    Raises ValueError naming what was expected, FileNotFoundError for a path that does not exist.
    """
    if name_or_path == "bytes":
        return ByteTokenizer()
    path = Path(name_or_path)
    if path.is_dir():
        return _from_directory(path)
    if not path.exists():
        raise FileNotFoundError(
            f"tokenizer: expected 'bytes', a tokenizers JSON file or a tiktoken rank file, received {str(path)!r}"
        )
    return load_tiktoken(path) if path.suffix in (".model", ".tiktoken") else FileTokenizer(path)


def _from_directory(directory: Path) -> Tokenizer:
    record = directory / RECORD
    if record.exists():
        try:
            fields = json.loads(_read(record))
            kind = fields["kind"]
            if kind == "bytes":
                return ByteTokenizer()
            if kind == "tokenizers":
                name = fields["file"]
                if Path(name).name != name:  # a record from elsewhere must not name files outside its directory
                    raise ValueError(f"{record}: expected a plain file name, received {name!r}")
                return FileTokenizer(directory / name)
        except (KeyError, TypeError, json.JSONDecodeError, RecursionError):
            raise ValueError(f"{record}: expected a tokenizer record with a kind, received a damaged file") from None
        raise ValueError(f"{record}: expected kind 'bytes' or 'tokenizers', received {kind!r}")
    if (directory / "tokenizer.json").exists():
        return FileTokenizer(directory / "tokenizer.json")
    if (directory / RANK_FILE).exists():
        return load_tiktoken(directory)
    raise FileNotFoundError(
        f"{directory}: expected {RECORD}, tokenizer.json or {RANK_FILE} in it, found none; a run on text gives it one: "
        f"openkda train --init-from {directory} --tokenizer bytes (or a file)"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected UTF-8 text, received other bytes") from None


def _write_record(directory: Path, fields: dict[str, Any]) -> None:
    Path(directory).mkdir(parents=True, exist_ok=True)
    (Path(directory) / RECORD).write_text(json.dumps(fields) + "\n", encoding="utf-8")

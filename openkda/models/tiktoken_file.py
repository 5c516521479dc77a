"""Tokenizers in the tiktoken file format, with the split pattern and special ids that the Kimi models publish.

A file holds one base64 token and its rank a line; 256 special ids follow the last rank (163,584 ranks + 256 = 163,840
in the released models). Text never becomes a special token by its spelling: special ids come from `special_id`, or
from a segment that says so (`openkda.models.chat`).

Sources: the released `tiktoken.model` and `tokenizer_config.json` of Kimi K3 and Kimi Linear (names and ids).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

RANK_FILE, NAME_FILE = "tiktoken.model", "tokenizer_config.json"
NUM_SPECIAL = 256

SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",  # Chinese runs stand alone
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The published pre-tokenisation pattern, one alternative a line (a value that must be byte-exact to get their ids)."""

KIMI_K3_SPECIAL: Mapping[int, str] = {
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
    6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]",
    18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>",
    254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
"""Kimi K3: offset above the last rank -> name; 2, `<|end_of_msg|>`, ends a turn."""

KIMI_LINEAR_SPECIAL: Mapping[int, str] = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
    6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]", 10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>", 17: "<|im_middle|>",
    254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
"""Kimi Linear: the same ids under other names."""

_CHUNK = 400_000  # characters a call: the published code cuts here, so ids of longer texts agree only if we do too
_RUN = 25_000  # and here, within one run of (non-)whitespace: a run of a million blanks overflows tiktoken's stack


class TiktokenTokenizer:
    """Byte-pair encoding by rank, with special ids above the ranks.

    ranks: token bytes -> rank, the ranks 0..len-1 each once. special: offset above the ranks -> name; the other offsets
    below 256 are called `<|reserved_token_ID|>`. eos: name of the special token that ends a generation.
    Raises ValueError for holes in the ranks, a byte without a token or an unknown eos; ModuleNotFoundError without the
    tiktoken package.
    """

    def __init__(
        self, ranks: dict[bytes, int], special: Mapping[int, str] = KIMI_K3_SPECIAL, *, eos: str = "<|end_of_msg|>"
    ) -> None:
        base = len(ranks)
        if sorted(ranks.values()) != list(range(base)):
            raise ValueError(f"ranks: expected 0..{base - 1} each once, received holes or repeats")
        lacking = [i for i in range(256) if bytes([i]) not in ranks]
        if lacking:  # tiktoken would end the process's thread at the first text with such a byte
            raise ValueError(f"ranks: expected a token for each of the 256 bytes, missing {lacking[:5]}")
        bad = sorted(i for i in special if not 0 <= i < NUM_SPECIAL)
        if bad:
            raise ValueError(f"special: expected offsets in 0..{NUM_SPECIAL - 1}, received {bad}")
        names = {i: special.get(i, f"<|reserved_token_{base + i}|>") for i in range(NUM_SPECIAL)}
        self._special = {name: base + i for i, name in names.items()}
        if len(self._special) != NUM_SPECIAL:
            raise ValueError(f"special: expected {NUM_SPECIAL} different names, received {len(self._special)}")
        self._ranks = ranks
        self._texts: dict[str, int] | None = None
        self.vocab_size = base + NUM_SPECIAL
        self.eos_id = self.special_id(eos)
        self._encoding = _tiktoken().Encoding(
            "openkda", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=self._special
        )

    def special_id(self, name: str) -> int:
        """Id of a special token by its name; ValueError for an unknown one."""
        if name not in self._special:
            named = [n for n in self._special if not n.startswith("<|reserved_token_")]
            raise ValueError(f"special token: expected one of {', '.join(named)}, received {name!r}")
        return self._special[name]

    def special_names(self) -> dict[int, str]:
        """Id -> name of the 256 special tokens."""
        return {i: name for name, i in self._special.items()}

    def token_text(self, token: int) -> str:
        """One id as text of its own: bytes read as Latin-1, a special token's name. ValueError out of range.

        An ordinary token that is spelled like a special one gets U+FEFF in front.
        """
        self._check([token])
        text = self._encoding.decode_single_token_bytes(token).decode("latin-1")
        return "\ufeff" + text if token < len(self._ranks) and text in self._special else text

    def token_texts(self) -> dict[str, int]:
        """`token_text` of every ordinary token -> its id."""
        if self._texts is None:
            self._texts = {self.token_text(rank): rank for rank in self._ranks.values()}
        return self._texts

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text. A special token spelled in it is ordinary text too: its characters, never its id."""
        return [i for piece in _pieces(text) for i in self._encoding.encode_ordinary(piece)]

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of (text, is_special) segments, each encoded on its own: no merge ever crosses a segment's edge."""
        ids: list[int] = []
        for text, is_special in segments:
            ids += [self.special_id(text)] if is_special else self.encode(text)
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of the ids; special ids are left out, or with `special` written by name. ValueError out of range.

        Bytes that are not UTF-8 (a character cut in half) become U+FFFD.
        """
        ids = list(ids)
        self._check(ids)
        return self._encoding.decode([i for i in ids if special or i < len(self._ranks)])

    def _check(self, ids: list[int]) -> None:
        outside = [i for i in ids if not 0 <= i < self.vocab_size]
        if outside:
            raise ValueError(f"ids: expected 0..{self.vocab_size - 1}, received {outside[:5]}")

    def save(self, directory: str | Path) -> None:
        """Write `tiktoken.model` and the names of the special ids into `directory`, for `load_tiktoken`."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        ordered = sorted(self._ranks.items(), key=lambda item: item[1])
        lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ordered)
        (Path(directory) / RANK_FILE).write_text(lines, encoding="ascii")
        names = {str(i): {"content": name} for name, i in self._special.items()}
        config = json.dumps({"added_tokens_decoder": names}, indent=1)
        (Path(directory) / NAME_FILE).write_text(config + "\n", encoding="utf-8")


def load_tiktoken(path: str | Path, special: Mapping[int, str] | None = None) -> TiktokenTokenizer:
    """The tokenizer of a `tiktoken.model` file, or of a folder that holds one.

    special: offset -> name; default: the names in a `tokenizer_config.json` beside the file, else Kimi K3's. The end of
    a turn is the name at offset 2, as in both published tables. Raises FileNotFoundError, or ValueError naming the line.
    """
    path = Path(path)
    if path.is_dir():
        path = path / RANK_FILE
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer: expected a tiktoken rank file, found nothing at {path}")
    ranks = _read_ranks(path)
    if special is None:
        special = _published_names(path.with_name(NAME_FILE), len(ranks)) or KIMI_K3_SPECIAL
    return TiktokenTokenizer(ranks, special, eos=special.get(2, f"<|reserved_token_{len(ranks) + 2}|>"))


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{path}, line {number}: expected 'base64 rank', received {line[:60]!r}") from error
    if not ranks:
        raise ValueError(f"{path}: expected 'base64 rank' lines, the file has none")
    return ranks


def _published_names(path: Path, base: int) -> dict[int, str]:
    """Offset -> name from `added_tokens_decoder`; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        return {int(i) - base: token["content"] for i, token in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: expected added_tokens_decoder {{id: {{content: name}}}}: {error}") from error


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _CHUNK):
        chunk = text[start : start + _CHUNK]
        begin = 0
        for run in re.finditer(r"\s+|\S+", chunk):
            for cut in range(run.start() + _RUN, run.end(), _RUN):
                yield chunk[begin:cut]
                begin = cut
        yield chunk[begin:]


def _tiktoken() -> Any:
    try:
        import tiktoken
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tiktoken rank files need the tiktoken package: pip install 'openkda[hf]' or pip install tiktoken"
        ) from error
    return tiktoken

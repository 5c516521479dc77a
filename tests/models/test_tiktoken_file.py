"""The tiktoken file format on a small rank file, and the published split pattern."""

from __future__ import annotations

import base64
import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from openkda.models.tiktoken_file import KIMI_K3_SPECIAL, KIMI_LINEAR_SPECIAL, TiktokenTokenizer, load_tiktoken
from openkda.models.tokenizer import load_tokenizer

MERGES = [b"th", b"the", b" t", b"12", b"\xe4\xbd", b"\xe4\xbd\xa0"]
RANKS = {t: i for i, t in enumerate([*(bytes([i]) for i in range(256)), *MERGES])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [f"{base64.b64encode(t).decode()} {r}" for t, r in RANKS.items()]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_ids_are_ranks(folder: Path) -> None:
    tok = load_tiktoken(folder)
    assert tok.vocab_size == 262 + 256
    assert tok.encode("the") == [257] and tok.encode("你") == [261]
    assert tok.encode("") == [] and tok.decode([]) == ""
    assert tok.decode(tok.encode("thé 你好 123 \r\n\t")) == "thé 你好 123 \r\n\t"
    assert tok.decode([0xE4]) == "�"


def test_split_pattern() -> None:
    """The published pattern decides where merges may happen; each byte pair below is one token, if it may be."""
    pairs = ["你a", "a1", "34", "  ", "' ", "\n\n", "x'", "'s", "1a", ".\n", " a"]
    tok = TiktokenTokenizer(_with_merges([p.encode() for p in pairs]))

    def joined(text: str) -> bool:
        return len(tok.encode(text)) == 1

    assert not joined("你a"), "Han runs are split from letters"
    assert not joined("a1") and not joined("1a"), "letters from digits"
    assert joined("34") and len(tok.encode("1234")) == 4, "digits in groups of three: 123|4"
    assert joined(" a"), "a letter run takes one character before it"
    assert joined(".\n") and joined("\n\n"), "punctuation and blanks take the line end"
    assert not joined("x'") and len(tok.encode("x's")) == 2, (
        "a contraction stays with its word: only there x' may merge"
    )
    assert len(tok.encode("   a")) == 2, "a run of blanks leaves the last one to the word: '  '|' a'"


def _with_merges(tokens: list[bytes]) -> dict[bytes, int]:
    """Bytes, then every prefix of the tokens in order: the intermediate merges that reach them."""
    ranks = {bytes([i]): i for i in range(256)}
    for token in tokens:
        for end in range(2, len(token) + 1):
            ranks.setdefault(token[:end], len(ranks))
    return ranks


def test_special_ids_are_those_published() -> None:
    """Offsets of the tables against the ids that the released models use above 163,584 ranks."""
    k3 = {"[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588,
          "<|sep|>": 163589, "[EOT]": 163593, "<|media_begin|>": 163602, "<|media_content|>": 163603,
          "<|media_end|>": 163604, "<|media_pad|>": 163605, "[UNK]": 163838, "[PAD]": 163839}  # fmt: skip
    linear = {"<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_assistant|>": 163588, "<|im_system|>": 163594,
              "<|im_middle|>": 163601}  # fmt: skip
    for want, table in ((k3, KIMI_K3_SPECIAL), (linear, KIMI_LINEAR_SPECIAL)):
        ids = {name: 163584 + offset for offset, name in table.items()}
        assert {n: ids[n] for n in want} == want


def test_text_never_becomes_a_special_token(folder: Path) -> None:
    tok = load_tiktoken(folder)
    for name in KIMI_K3_SPECIAL.values():
        assert max(tok.encode(f"a{name}b")) < tok.vocab_size - 256
        assert tok.encode_segments([(name, True)]) == [tok.special_id(name)]
        assert tok.decode([tok.special_id(name)], special=True) == name and tok.decode([tok.special_id(name)]) == ""
    assert tok.eos_id == tok.special_id("<|end_of_msg|>")


def test_very_long_runs(folder: Path) -> None:
    """A run of a million blanks overflows the stack of tiktoken itself; cut at 25,000 like the published code."""
    tok = load_tiktoken(folder)
    for text in (" " * 1_000_000, "x" * 60_000 + " \n" * 60_000):
        assert tok.decode(tok.encode(text)) == text
    plain = "ab " * 200_000  # no long run, but longer than one chunk of 400,000 characters
    assert tok.decode(tok.encode(plain)) == plain


def test_load_tokenizer_finds_rank_files(folder: Path) -> None:
    for path in (folder, folder / "tiktoken.model"):
        assert load_tokenizer(path).encode("the") == [257]


def test_names_come_from_the_config_beside_the_file(folder: Path) -> None:
    names = {str(262 + 2): {"content": "<|stop|>"}, str(262 + 7): {"content": "<|seven|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names}))
    tok = load_tiktoken(folder / "tiktoken.model")
    assert tok.special_id("<|seven|>") == 269 and tok.eos_id == tok.special_id("<|stop|>") == 264
    assert tok.special_id("<|reserved_token_263|>") == 263
    assert load_tiktoken(folder, KIMI_LINEAR_SPECIAL).eos_id == 264


def test_save_and_load(folder: Path, tmp_path: Path) -> None:
    tok = load_tiktoken(folder, KIMI_LINEAR_SPECIAL)
    tok.save(tmp_path / "copy")
    again = load_tiktoken(tmp_path / "copy")
    assert (tmp_path / "copy" / "tiktoken.model").read_text() == (folder / "tiktoken.model").read_text()
    assert again.encode("the 你") == tok.encode("the 你") and again.eos_id == tok.eos_id
    assert again.special_id("<|im_user|>") == tok.special_id("<|im_user|>")


@pytest.mark.parametrize(
    ("content", "want"),
    [
        ("YQ== 0\nYg==\n", "line 2: expected 'base64 rank'"),
        ("YQ== 0\n!! 1\n", "line 2: expected 'base64 rank'"),
        ("YQ== zero\n", "line 1: expected 'base64 rank'"),
        ("\n", "the file has none"),
        ("YQ== 0\nYg== 2\n", "ranks: expected 0..1 each once"),
    ],
)
def test_damaged_files(tmp_path: Path, content: str, want: str) -> None:
    (tmp_path / "tiktoken.model").write_text(content)
    with pytest.raises(ValueError, match=want):
        load_tiktoken(tmp_path)


def test_bad_input(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="expected a tiktoken rank file"):
        load_tiktoken(tmp_path / "nowhere")
    tok = load_tiktoken(folder)
    with pytest.raises(ValueError, match="special token: expected one of"):
        tok.encode_segments([("<|none|>", True)])
    with pytest.raises(ValueError, match=r"ids: expected 0\.\.517, received"):
        tok.decode([518, -1])
    with pytest.raises(ValueError, match=r"offsets in 0..255, received \[256\]"):
        TiktokenTokenizer(RANKS, {2: "<|end_of_msg|>", 256: "x"})
    with pytest.raises(ValueError, match="256 different names"):
        TiktokenTokenizer(RANKS, {1: "a", 2: "a"})
    with pytest.raises(ValueError, match=r"a token for each of the 256 bytes, missing \[97, 98"):
        TiktokenTokenizer({bytes([i]): i for i in range(97)})
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": 1}}')
    with pytest.raises(ValueError, match="expected added_tokens_decoder"):
        load_tiktoken(folder)

    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tiktoken":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'openkda\[hf\]'"):
        TiktokenTokenizer(RANKS)

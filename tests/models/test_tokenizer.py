"""Tokenizers: every text comes back, and no text becomes a special id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from openkda.models.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer

TEXTS = ["", "plain", "añ漢🙂\r\n\t\0 end", "<|endoftext|> </s> [EOS]", "  two  spaces "]


def make_file(path: Path, *special: str) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    backend.train_from_iterator(["def add(a, b): return a + b"] * 9, trainer)
    backend.save(str(path))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_bytes(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids == list(text.encode()) and tokenizer.decode([tokenizer.eos_id, *ids, tokenizer.eos_id]) == text
    assert tokenizer.eos_id == 256 and tokenizer.vocab_size == 257


def test_half_a_character_is_shown_as_one_sign() -> None:
    assert ByteTokenizer().decode("漢".encode()[:2]) == "\ufffd"


@pytest.mark.parametrize("special", [("<|endoftext|>",), ("</s>", "<pad>"), ()])
@pytest.mark.parametrize("text", TEXTS)
def test_files(tmp_path: Path, special: tuple[str, ...], text: str) -> None:
    tokenizer = FileTokenizer(make_file(tmp_path / "t.json", *special))
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids and max([*ids, tokenizer.eos_id]) < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.eos_id, *ids, tokenizer.eos_id]) == text
    assert (tokenizer.eos_id == tokenizer.vocab_size - 1) == (not special)


def test_a_checkpoint_remembers_its_tokenizer(tmp_path: Path) -> None:
    source = make_file(tmp_path / "t.json", "</s>")
    FileTokenizer(source).save(tmp_path / "c")
    ids = FileTokenizer(source).encode("def add")
    source.unlink()
    assert load_tokenizer(tmp_path / "c").encode("def add") == ids != list(b"def add")
    ByteTokenizer().save(tmp_path / "b")
    assert isinstance(load_tokenizer(tmp_path / "b"), ByteTokenizer)


def test_bad_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "openkda_tokenizer.json").write_text('{"kind": "morse"}')
    for path, error in (
        ("nowhere.json", "expected 'bytes', a tokenizers JSON file"),
        ("broken.json", "expected a tokenizers file"),
        ("empty", "tiktoken.model in it, found none"),
        ("odd", "received 'morse'"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=error):
            load_tokenizer(tmp_path / path)


@pytest.mark.parametrize("name", ["../tokenizer.json", "/etc/hostname", "a/b.json", ".."])
def test_a_record_names_no_file_outside_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "openkda_tokenizer.json").write_text(json.dumps({"kind": "tokenizers", "file": name}))
    with pytest.raises((ValueError, OSError), match=r"expected a plain file name|directory"):
        load_tokenizer(tmp_path)

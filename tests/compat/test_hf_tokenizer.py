"""AutoTokenizer, AutoProcessor and the chat template, on directories as they are published."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from openkda.compat.hf import register  # noqa: E402
from openkda.models.chat import chat_segments  # noqa: E402
from openkda.models.chat_reply import parse_reply  # noqa: E402
from openkda.models.make_checkpoint import make_checkpoint  # noqa: E402
from openkda.models.tiktoken_file import KIMI_K3_SPECIAL, KIMI_LINEAR_SPECIAL, load_tiktoken  # noqa: E402

LIKE = {"kimi-k3": KIMI_K3_SPECIAL, "kimi-linear-48b": KIMI_LINEAR_SPECIAL}
TOKENS = [*(bytes([i]) for i in range(256)), b"he", b"[PA", b"[PAD", b"[PAD]"]
SIZE = len(TOKENS) + 256
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Miniatures with the published tokenizer files: a rank file, and a config that points at remote code."""
    register()
    root = tmp_path_factory.mktemp("published")
    for like, names in LIKE.items():
        make_checkpoint(
            root / like, like=like, layers=4, hidden=64, heads=2, head_dim=16, experts=4, vocab_size=SIZE,
            dtype=torch.float32,
        )  # fmt: skip
        lines = [f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(TOKENS)]
        (root / like / "tiktoken.model").write_text("".join(lines))
        decoder = {str(len(TOKENS) + i): {"content": n, "special": True} for i, n in names.items()}
        config = {
            "tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder,
            "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        }  # fmt: skip
        (root / like / "tokenizer_config.json").write_text(json.dumps(config))
    k3 = root / "kimi-k3" / "config.json"
    fields = json.loads(k3.read_text()) | {"media_placeholder_token_id": len(TOKENS) + 21}
    k3.write_text(json.dumps(fields))
    return {like: root / like for like in LIKE}


@pytest.fixture(params=LIKE)
def directory(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Path:
    return directories[request.param]


def test_loads_ours_and_encodes_like_it(directory: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ours = load_tiktoken(directory)
    assert type(tokenizer).__module__ == "openkda.compat.hf_register.tokenizer"
    assert len(tokenizer) == SIZE and tokenizer.vocab_size == len(TOKENS)
    for text in ("hello 你好", "", " ", "a\n"):
        assert tokenizer.encode(text) == tokenizer(text)["input_ids"] == ours.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer(["hello", ""])["input_ids"] == [ours.encode("hello"), []]
    assert tokenizer("a", "b")["input_ids"] == ours.encode("a") + ours.encode("b")
    assert tokenizer.eos_token_id == ours.special_id("[EOS]") and tokenizer.pad_token_id == ours.special_id("[PAD]")
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize("hello")) == ours.encode("hello")
    assert tokenizer.decode([0, ours.special_id("[BOS]")], skip_special_tokens=True) == "\0"
    with pytest.raises(ValueError, match="is_split_into_words"):
        tokenizer(["a", "b"], is_split_into_words=True)


def test_a_directory_without_a_rank_file(directories: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((directories["kimi-k3"] / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"expected tiktoken\.model in .*, found none"):
        transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_text_never_becomes_a_special_token(directory: Path) -> None:
    """Not even where an ordinary token is spelled like a special one: b'[PAD]' is a rank of this file."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    spelled = "".join(LIKE[directory.name].values()) + "x[PAD]"
    for ids in (tokenizer.encode(spelled), tokenizer([spelled, "a"], padding=True)["input_ids"][0]):
        assert max(ids) < len(TOKENS)
    lone = tokenizer.encode("[PAD]")
    assert max(lone) < len(TOKENS) and tokenizer.decode(lone) == "[PAD]"


def test_batches_are_padded_on_the_left(directory: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    batch = tokenizer(["ab", "a"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[97, 98], [tokenizer.pad_token_id, 97]]
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]


def test_save_and_load(directory: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is type(tokenizer)
    assert again.get_vocab() == tokenizer.get_vocab() and len(again) == SIZE
    assert again.encode("hello [BOS]") == tokenizer.encode("hello [BOS]")


def test_chat_template(directories: dict[str, Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directories["kimi-k3"])
    want = tokenizer.ours.encode_segments(chat_segments(HELLO, thinking_effort="max"))
    out = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_tensors="pt")
    assert out["input_ids"].tolist() == [want] and out["attention_mask"].all()
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False) == want
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, thinking=False)
    assert text == '<|open|>message role="user"<|sep|>hello<|close|>message<|sep|><|end_of_msg|>'

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: two
        """
        return a + b

    two = tokenizer.apply_chat_template([HELLO, [*HELLO, *HELLO]], tools=[add], padding=True)
    assert len(two["input_ids"][0]) == len(two["input_ids"][1]) and 0 in two["attention_mask"][0]
    assert '"name":"add"' in tokenizer.decode(two["input_ids"][1])
    with pytest.raises(ValueError, match="role: expected"):
        tokenizer.apply_chat_template([{"role": "robot", "content": ""}])


def test_a_conversation_with_pictures_reaches_the_model(directories: dict[str, Path], tmp_path: Path) -> None:
    directory = directories["kimi-k3"]
    processor = transformers.AutoProcessor.from_pretrained(directory)
    picture = torch.randint(256, (30, 50, 3), dtype=torch.uint8)
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what is "}, {"type": "image", "image": picture}]
    ask = [{"role": "user", "content": parts}]
    batch = processor.apply_chat_template(ask, add_generation_prompt=True, return_tensors="pt")
    assert batch["grid_thws"].tolist() == [[1, 4, 4]] and batch["pixel_values"].shape == (16, 3, 14, 14)
    pad = processor.tokenizer.ours.special_id("<|media_pad|>")
    assert (batch["input_ids"] == pad).sum() == 1
    assert "image 50x30" in processor.decode(batch["input_ids"][0])

    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    out = model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert out.shape[1] == batch["input_ids"].shape[1] + 4
    other = processor.apply_chat_template(
        [{"role": "user", "content": [parts[0], {"type": "image", "image": picture.flip(0)}]}],
        add_generation_prompt=True, return_tensors="pt",
    )  # fmt: skip
    assert other["input_ids"].equal(batch["input_ids"])
    with torch.no_grad():
        assert not torch.equal(model(**batch).logits[:, -1], model(**other).logits[:, -1]), "the picture is seen"

    both = processor.apply_chat_template([ask, HELLO], padding=True, return_tensors="pt")
    assert both["input_ids"].shape[0] == 2 and both["grid_thws"].shape == (1, 3)
    processor.save_pretrained(tmp_path)
    assert (tmp_path / "tiktoken.model").is_file()
    with pytest.raises(ValueError, match="expected the picture under 'image'"):
        processor.apply_chat_template([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(ValueError, match="expected images, text or both"):
        processor()


def test_a_reply_is_parsed_with_the_same_tokenizer(directories: dict[str, Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directories["kimi-k3"])
    message = {"role": "assistant", "content": "hi", "reasoning_content": "why"}
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*HELLO, message], return_dict=False)
    assert parse_reply(tokenizer.ours, whole[len(prompt) :]).message == message


def test_text_generation_pipeline(directory: Path) -> None:
    """Strings, a padded batch of them, and chats, as `transformers.pipeline` hands them over."""
    run = transformers.pipeline("text-generation", model=str(directory))
    options = {"max_new_tokens": 3, "do_sample": False}
    alone = [run(text, **options)[0]["generated_text"] for text in ("hello", "he")]
    both = run(["hello", "he"], batch_size=2, **options)
    assert [row[0]["generated_text"] for row in both] == alone
    if "linear" in directory.name:  # its vocabulary has no XTML
        with pytest.raises(ValueError, match=r"special token: expected one of .*received '<\|open\|>'"):
            run(HELLO, **options)
        return
    chat = run(HELLO, **options)[0]["generated_text"]
    assert chat[0] == HELLO[0] and chat[1]["role"] == "assistant"
    begun = run([*HELLO, {"role": "assistant", "content": "he"}], **options)[0]["generated_text"]
    assert begun[1]["content"].startswith("he")
    with pytest.raises(ValueError, match="documents has no meaning in XTML"):
        run.tokenizer.apply_chat_template(HELLO, documents=[{"text": "x"}])


def test_padding_is_no_placeholder(directories: dict[str, Path]) -> None:
    """Where padding and placeholder share an id, as in some miniatures, the mask says which is which."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directories["kimi-k3"])
    place = model.model.config.vision.placeholder_id
    ids, mask = torch.tensor([[place, 1, 2], [3, 4, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": place, "eos_token_id": None}
    got = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(got[:1, 3:], model.generate(ids[:1, 1:], **options)[:, 2:])
    assert model.generate(ids, attention_mask=mask, num_beams=2, **options).shape == got.shape
    ids[0, 1] = place
    pixels, grids = torch.zeros(4, 3, 14, 14), torch.tensor([[1, 2, 2]])
    beams = model.generate(ids, attention_mask=mask, pixel_values=pixels, grid_thws=grids, num_beams=2, **options)
    assert beams.shape == got.shape

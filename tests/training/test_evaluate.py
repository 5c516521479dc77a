"""Scores against a direct calculation; every token once; bits per byte whatever the windows."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from openkda.models.checkpoint import save_checkpoint
from openkda.models.hybrid import HybridLM
from openkda.models.presets import PRESETS
from openkda.models.tokenizer import ByteTokenizer
from openkda.training.corpus import find_files
from openkda.training.evaluate import Evaluation, evaluate, evaluate_paths
from openkda.training.token_file import TokenFile, write_token_file

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> HybridLM:
    model = HybridLM(PRESETS["tiny"].replace(vocab_size=257, initializer_range=0.2))
    model.init_weights(0)
    return model


@pytest.fixture(scope="module")
def tokens(text: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return write_token_file(tmp_path_factory.mktemp("t") / "t", find_files([text])[:4], ByteTokenizer())


@torch.no_grad()
def directly(model: HybridLM, tokens: TokenFile, seq_len: int) -> float:
    """Nats of all tokens: each stretch of one document in one window through the model on its own."""
    targets = len(tokens) - 1
    cuts = sorted({*range(0, targets, seq_len), *tokens.starts.tolist(), targets})
    nats = 0.0
    for begin, end in pairwise(cuts):
        ids = torch.tensor(tokens.tokens[begin : end + 1].astype("int64"))
        logits = model(ids[None, :-1]).logits[0]
        nats += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
    return nats


@pytest.mark.parametrize(("seq_len", "pack_tokens"), [(64, 8192), (50, 120), (100_000, 1)])
def test_every_token_counts_once(model: HybridLM, tokens: TokenFile, seq_len: int, pack_tokens: int) -> None:
    model.train()
    done: list[int] = []
    got = evaluate(model, tokens, seq_len=seq_len, device=CPU, pack_tokens=pack_tokens, advance=done.append)
    assert got.tokens == len(tokens) - 1 == done[-1]
    assert got.nats == pytest.approx(directly(model, tokens, seq_len), rel=1e-5)
    assert got.text_bytes == tokens.text_bytes
    assert got.bits_per_byte == pytest.approx(got.nats / math.log(2) / tokens.text_bytes)
    assert got.perplexity == pytest.approx(math.exp(got.loss))
    assert model.training and all(p.grad is None for p in model.parameters())


def test_a_sample_is_spread_over_the_text(model: HybridLM, tokens: TokenFile) -> None:
    whole = evaluate(model, tokens, seq_len=16, device=CPU)
    part = evaluate(model, tokens, seq_len=16, device=CPU, max_tokens=len(tokens) // 2)
    assert len(tokens) // 2 - 16 <= part.tokens <= len(tokens) // 2
    assert part.loss == pytest.approx(whole.loss, rel=0.1)
    assert part.text_bytes / part.tokens == pytest.approx(whole.text_bytes / whole.tokens)


def test_a_uniform_model_needs_log_vocabulary(tokens: TokenFile) -> None:
    model = HybridLM(PRESETS["tiny"].replace(vocab_size=257))
    torch.nn.init.zeros_(model.lm_head.weight)
    got = evaluate(model, tokens, seq_len=64, device=CPU)
    assert got.loss == pytest.approx(math.log(257), rel=1e-5) and got.perplexity == pytest.approx(257, rel=1e-4)


def test_a_loss_beyond_float64_has_infinite_perplexity() -> None:
    assert Evaluation(nats=1e6, tokens=1, text_bytes=1).perplexity == math.inf


def test_paths(model: HybridLM, tokens: TokenFile, text: Path, tmp_path: Path) -> None:
    """Through a checkpoint directory and its own tokenizer: the same number."""
    save_checkpoint(model, tmp_path / "c")
    ByteTokenizer().save(tmp_path / "c")
    files = [f.path for f in find_files([text])[:4]]
    got = evaluate_paths(tmp_path / "c", files, seq_len=64)
    assert got.loss == pytest.approx(evaluate(model, tokens, seq_len=64, device=CPU).loss, rel=1e-6)
    for changes, error in (({"seq_len": 0}, "seq_len: expected"), ({"dtype": "int8"}, "dtype: expected")):
        with pytest.raises(ValueError, match=error):
            evaluate_paths(tmp_path / "c", files, **changes)

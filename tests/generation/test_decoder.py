"""Laws of prefill and step: chunks, batches and packs change nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.generation.decoder import Decoder
from openkda.models.hybrid import HybridLM


def full_logits(model: HybridLM, ids: list[int]) -> Tensor:
    """Logits after the last token, from one forward over everything."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 65, 10**9])
def test_chunk_size_changes_nothing(model: HybridLM, prompts: list[list[int]], chunk: int) -> None:
    decoder = Decoder(model, prefill_chunk=chunk)
    logits = decoder.prefill(prompts)
    follow = decoder.step(torch.arange(len(prompts)))
    for n, prompt in enumerate(prompts):
        close(logits[n], full_logits(model, prompt))
        close(follow[n], full_logits(model, [*prompt, n]))


def test_batch_equals_each_alone(model: HybridLM, prompts: list[list[int]]) -> None:
    together = Decoder(model)
    logits = [together.prefill(prompts)] + [together.step(torch.full((len(prompts),), t)) for t in (5, 6, 7)]
    for n, prompt in enumerate(prompts):
        alone = Decoder(model)
        single = [alone.prefill([prompt])] + [alone.step(torch.tensor([t])) for t in (5, 6, 7)]
        for batch, one in zip(logits, single, strict=True):
            close(batch[n], one[0])


def test_second_prefill_continues(model: HybridLM, prompts: list[list[int]]) -> None:
    decoder = Decoder(model, prefill_chunk=50)
    decoder.prefill(prompts)
    logits = decoder.prefill([list(range(n + 1)) for n in range(len(prompts))])
    for n, prompt in enumerate(prompts):
        close(logits[n], full_logits(model, prompt + list(range(n + 1))))


def test_keep_drops_and_forks_rows(model: HybridLM, prompts: list[list[int]]) -> None:
    decoder = Decoder(model)
    decoder.prefill(prompts)
    decoder.keep([3, 0, 3])
    logits = decoder.step(torch.tensor([9, 8, 7]))
    for row, (n, token) in enumerate([(3, 9), (0, 8), (3, 7)]):
        close(logits[row], full_logits(model, [*prompts[n], token]))


def test_kda_state_is_constant_and_latents_grow(model: HybridLM) -> None:
    decoder = Decoder(model)
    decoder.prefill([[1, 2, 3]])
    config = model.config
    per_token = len(config.full_attn_layers) * (config.kv_lora_rank + config.qk_rope_head_dim) * 8
    sizes = [decoder.state_bytes]
    for token in range(5):
        decoder.step(torch.tensor([token]))
        sizes.append(decoder.state_bytes)
    assert [b - a for a, b in pairwise(sizes)] == [per_token] * 5


def test_training_mode_is_left_as_it_was(model: HybridLM) -> None:
    model.train()
    try:
        logits = Decoder(model).prefill([[1, 2]])
        assert model.training and not logits.requires_grad
    finally:
        model.eval()
    close(logits[0], full_logits(model, [1, 2]))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([], "at least one"), ([[1], []], "prompt 1"), ([[1, 300]], r"\[0, 300\)"), ([[-1]], r"\[0, 300\)"),
     ("hello", "prompt 0: expected token ids, received 'h'"), (["hi"], "prompt 0: expected token ids, received 'hi'")],
)  # fmt: skip
def test_bad_prompts(model: HybridLM, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(model).prefill(prompts)


def test_a_batch_that_has_lost_every_row(model: HybridLM, prompts: list[list[int]]) -> None:
    decoder = Decoder(model)
    decoder.prefill(prompts)
    decoder.keep([])
    for _ in range(2):
        assert decoder.step(torch.empty(0, dtype=torch.int64)).shape == (0, model.config.vocab_size)


def test_bad_use(model: HybridLM) -> None:
    decoder = Decoder(model)
    decoder.prefill([[1], [2]])
    for rows in ([2], [0, -1]):
        with pytest.raises(ValueError, match=r"rows: expected 0\.\.1, received"):
            decoder.keep(rows)
    for tokens in ([1, 2], torch.tensor([[1], [2]])):
        with pytest.raises(ValueError, match=r"step: expected a tensor of token ids \[N\]"):
            decoder.step(tokens)
    with pytest.raises(ValueError, match=r"one for each of 2 rows, received \[1\]"):
        decoder.step(torch.tensor([1]))
    with pytest.raises(ValueError, match="prefill"):
        Decoder(model).step(torch.tensor([1]))
    with pytest.raises(ValueError, match="prefill_chunk"):
        Decoder(model, prefill_chunk=0)

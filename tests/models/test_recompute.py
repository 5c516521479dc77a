"""Gradient checkpointing: the same loss and gradients, and balancing that does not count recomputed tokens twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openkda.layers.balance import QuantileBalancer
from openkda.models.hybrid import HybridLM
from openkda.models.make_checkpoint import miniature


def run(like: str, recompute: bool) -> tuple[HybridLM, dict[str, Tensor], list[int]]:
    config = miniature(like, layers=4, hidden=64, heads=2, head_dim=16, experts=4, vocab_size=64)
    model = HybridLM(config.replace(packed_experts=False, vision=None))
    model.init_weights(0)
    model.model.gradient_checkpointing = recompute
    QuantileBalancer(model)
    calls: list[int] = []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    model(ids).logits.square().mean().backward()
    return model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, calls


@pytest.mark.parametrize("like", ["kimi-k3", "kimi-linear-48b"])
def test_same_gradients_and_counts(like: str) -> None:
    plain, want, once = run(like, False)
    model, got, twice = run(like, True)
    assert len(once) == 4 and len(twice) == 8, "every layer ran again in the backward pass"
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
    counts = [m.counts for m in model.modules() if hasattr(m, "counts")]
    assert len(counts) == 3
    for a, b in zip(counts, [m.counts for m in plain.modules() if hasattr(m, "counts")], strict=True):
        assert torch.equal(a, b)


def test_evaluation_recomputes_nothing() -> None:
    model, _, calls = run("kimi-k3", True)
    calls.clear()
    model.eval()(torch.zeros(1, 3, dtype=torch.long)).logits.sum().backward()
    assert calls == [0, 1, 2, 3]

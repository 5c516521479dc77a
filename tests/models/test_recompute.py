"""Gradient checkpointing: the same loss and gradients, and balancing that does not count recomputed tokens twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openkda.layers.balance import QuantileBalancer
from openkda.layers.moe import Router
from openkda.models.hybrid import HybridLM
from openkda.models.make_checkpoint import miniature


def run(like: str, recompute: bool, ties: bool = False) -> tuple[HybridLM, dict[str, Tensor], list[int]]:
    """ties: every expert gets the same score."""
    config = miniature(like, layers=4, hidden=64, heads=2, head_dim=16, experts=128 if ties else 4, vocab_size=64)
    model = HybridLM(config.replace(packed_experts=False, vision=None))
    model.init_weights(0)
    model.model.gradient_checkpointing = recompute
    for router in [m for m in model.modules() if isinstance(m, Router) and ties]:
        torch.nn.init.zeros_(router.weight)
    QuantileBalancer(model)
    calls: list[int] = []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    model(ids).logits.square().mean().backward()
    return model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, calls


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("like", ["kimi-k3", "kimi-linear-48b"])
def test_same_gradients_and_counts(like: str, ties: bool) -> None:
    plain, want, once = run(like, False, ties)
    model, got, twice = run(like, True, ties)
    assert len(once) == 4 and len(twice) == 8, "every layer ran again in the backward pass"
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
    counts = [m.counts for m in model.modules() if hasattr(m, "counts")]
    assert len(counts) == 3
    for a, b in zip(counts, [m.counts for m in plain.modules() if hasattr(m, "counts")], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("like", ["kimi-k3", "kimi-linear-48b"])
def test_padding_is_not_counted(like: str) -> None:
    model, _, _ = run(like, False)
    counts = []
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) >= torch.tensor([[0], [5]])
    for batch in ([(ids, mask)], [(ids[:1], None), (ids[1:, 5:], None)], [(ids, None)]):
        QuantileBalancer(model)
        for x, m in batch:
            model(x, attention_mask=m)
        counts.append(torch.stack([m.counts for m in model.modules() if isinstance(m, Router)]))
    assert torch.equal(counts[0], counts[1]) and not torch.equal(counts[0], counts[2])
    assert int(counts[0][..., -1].sum()) == 3 * (9 + 4) * 2, "layers, tokens, experts a token"


def test_evaluation_recomputes_nothing() -> None:
    model, _, calls = run("kimi-k3", True)
    calls.clear()
    model.eval()(torch.zeros(1, 3, dtype=torch.long)).logits.sum().backward()
    assert calls == [0, 1, 2, 3]

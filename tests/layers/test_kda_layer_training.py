"""The KDA layer inside torch.compile, autocast and activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openkda.layers.kda import KimiDeltaAttention
from openkda.models.config import ModelConfig
from openkda.models.presets import PRESETS
from openkda.testing.compare import rel

CONFIG: ModelConfig = PRESETS["tiny"]


def layer(seed: int = 0) -> KimiDeltaAttention:
    torch.manual_seed(seed)
    return KimiDeltaAttention(CONFIG, 0)


def tokens(B: int = 2, T: int = 20) -> Tensor:
    return torch.randn(B, T, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))


def run(m: Any, x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Output and the gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    y = m(x, **options)[0]
    return y, *torch.autograd.grad(y.float().square().sum(), [x, *m.parameters()])


@pytest.mark.parametrize("packed", [False, True])
def test_one_graph(packed: bool) -> None:
    """fullgraph=True, forward and backward; only the additions that the compiler may reorder differ."""
    m = layer()
    x = tokens(1 if packed else 2)
    options = {"cu_seqlens": torch.tensor([0, 7, 7, 20])} if packed else {}
    want = run(m, x, **options)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    for got, w in zip(run(compiled, x, **options), want, strict=True):
        assert rel(got, w) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    m = layer()
    x = tokens().requires_grad_()
    m(x)[0].square().sum().backward()
    want = [x.grad, *(p.grad for p in m.parameters())]
    m.zero_grad()
    x.grad = None
    checkpoint(lambda t: m(t)[0], x, use_reentrant=reentrant).square().sum().backward()
    for got, w in zip([x.grad, *(p.grad for p in m.parameters())], want, strict=True):
        assert got is not None and w is not None and torch.equal(got, w)


def test_autocast() -> None:
    """Matrices in bfloat16; gate, write strength and state in float32, parameters and their gradients untouched in dtype."""
    m = layer()
    x = tokens()
    want = run(m, x)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(m, x)
        _, state = m(x, return_state=True)
    assert state.recurrent.dtype == torch.float32
    assert got[0].dtype == torch.bfloat16
    for p, g, w in zip([x, *m.parameters()], got[1:], want[1:], strict=True):
        assert g.dtype == p.dtype == torch.float32
        assert rel(g, w) < 0.05  # bfloat16 projections, 2^-9 each, and cancelling sums over tokens

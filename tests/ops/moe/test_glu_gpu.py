"""The activation kernels: numbers and gradients of all, of views and of nothing, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.ops.moe.activation import GLU, SigmoidGLU, SiTUGLU, SwiGLU
from openkda.testing.compare import rel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ACTIVATIONS = [SwiGLU(), SiTUGLU(), SiTUGLU(2.0, None), SigmoidGLU()]


def pair(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [(s * torch.randn(*shape, generator=gen)).to("cuda", dtype).requires_grad_() for s in (3.0, 20.0)]


def gradients(act: Any, g: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    y = act(g, u)
    d = torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape).to(y.dtype)
    return y, *torch.autograd.grad(y, (g, u), d)


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(
    "dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 2.5e-3), (torch.float16, 4e-4)], ids=str
)
def test_numbers(act: GLU, dtype: torch.dtype, limit: float) -> None:
    """Against float64 on the same rounded inputs: one rounding, 2^-9 of bfloat16."""
    g, u = pair(37, 301, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in (g, u)]
    for got, want in zip(gradients(act, g, u), gradients(act, *wide), strict=True):
        assert got.dtype == dtype and rel(got, want) < limit


def test_the_bound_is_exact_in_16_bits() -> None:
    big = torch.full((4,), 3e4, dtype=torch.bfloat16, device="cuda")
    assert bool((SiTUGLU()(big, big) == 100).all()) and bool((SiTUGLU()(big, -big) == -100).all())


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_views_empty_and_compiled(act: GLU) -> None:
    both = torch.cat(pair(5, 64), 1).detach()
    g, u = both[:, :64], both[:, 64:]
    assert torch.equal(act(g, u), act(g.contiguous(), u.contiguous()))
    assert act(g[:0], u[:0]).shape == (0, 64)
    compiled = torch.compile(lambda g, u: act(g * 2, u), fullgraph=True)
    for got, want in zip(
        gradients(compiled, *pair(5, 64)), gradients(lambda g, u: act(g * 2, u), *pair(5, 64)), strict=True
    ):
        assert rel(got, want) < 1e-2


def test_second_derivatives_are_refused() -> None:
    g, u = pair(3, 8)
    (dg,) = torch.autograd.grad(SwiGLU()(g, u).float().square().sum(), g, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dg.sum().backward()

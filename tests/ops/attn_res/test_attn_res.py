"""The Attention Residuals mix against its definition, its hand-written gradient, and its two-phase form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openkda.ops.attn_res.api import attn_res_bank, attn_res_merge, attn_res_mix
from openkda.testing.compare import check_close, rel_grad

EPS = 1e-5


def literal(sources: list[Tensor], query: Tensor) -> Tensor:
    """The definition, with torch's autograd."""
    scores = [(v / (v.square().mean(-1, keepdim=True) + EPS).sqrt() * query).sum(-1) for v in sources]
    weights = torch.stack(scores).softmax(0)
    return sum(a[..., None] * v for a, v in zip(weights, sources, strict=True))  # type: ignore[return-value]


def make(
    n: int, shape: tuple[int, ...] = (2, 5, 16), dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(n)
    sources = [(torch.randn(shape, generator=g, dtype=torch.float64) * 3.0**i).to(dtype) for i in range(n)]
    query = torch.randn(shape[-1], generator=g, dtype=torch.float64)
    return sources, query.to(torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("n", [1, 2, 9])
def test_value_and_gradients(n: int) -> None:
    sources, query = make(n)
    leaves = [*sources, query]
    for t in leaves:
        t.requires_grad_()
    up = torch.randn_like(sources[0])
    got, want = attn_res_mix(sources, query, EPS), literal(sources, query)
    check_close("h", got, want, 1e-14)
    grads, wanted = (torch.autograd.grad(h, leaves, up) for h in (got, want))
    for a, b in zip(grads, wanted, strict=True):
        assert rel_grad(a, b, up) < 1e-12  # one source alone: the query's gradient is truly zero


def test_strided_upstream_gradient() -> None:
    sources, query = make(3)
    for t in sources:
        t.requires_grad_()
    got = torch.autograd.grad(attn_res_mix(sources, query, EPS).sum(), sources)
    want = torch.autograd.grad(literal(sources, query).sum(), sources)
    for a, b in zip(got, want, strict=True):
        check_close("dv", a, b, 1e-12)


def test_second_derivative_is_refused() -> None:
    sources, query = make(2)
    sources[0].requires_grad_()
    (g,) = torch.autograd.grad(attn_res_mix(sources, query, EPS).square().sum(), sources[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 8])
def test_two_phases_equal_one(n: int, dtype: torch.dtype) -> None:
    sources, _ = make(n + 1, dtype=dtype)
    queries = torch.randn(5, 16, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * 4
    queries = queries.to(torch.promote_types(dtype, torch.float32))
    partials = attn_res_bank(sources[:-1], queries, EPS)
    # A score's own rounding, two in either form, is the relative error of its weight; bfloat16: one rounding either way.
    wide = torch.stack(sources).double()
    scores = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)) @ queries.double().T
    unit = torch.finfo(queries.dtype).eps / 2 * float(scores.abs().max())
    limit = 2**-8 if dtype == torch.bfloat16 else 4 * unit
    for i, query in enumerate(queries):
        got = attn_res_merge(partials, i, sources[-1], query, EPS)
        assert got.dtype == dtype
        check_close(f"query {i}", got, attn_res_mix(sources, query, EPS), limit)


def test_two_phases_with_extreme_scores() -> None:
    """A source that wins by e^1000 in either phase neither overflows nor loses."""
    sources, query = make(3, dtype=torch.float32)
    for factor in (1000.0, -1000.0):
        q = query * factor
        got = attn_res_merge(attn_res_bank(sources[:2], q[None], EPS), 0, sources[2], q, EPS)
        check_close("h", got, attn_res_mix(sources, q, EPS), 1e-6)


def test_zero_query_is_the_mean_and_learns() -> None:
    sources, query = make(4)
    zero = torch.zeros_like(query, requires_grad=True)
    h = attn_res_mix(sources, zero, EPS)
    check_close("mean", h, torch.stack(sources).mean(0), 1e-15)
    h.square().sum().backward()
    assert zero.grad is not None and bool((zero.grad != 0).all())


def test_nothing_of_the_size_of_the_stack_is_saved() -> None:
    """Saved for backward: the sources themselves (no copy) and per-token numbers."""
    sources, query = make(9, (1, 64, 128), torch.float32)
    for t in sources:
        t.requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attn_res_mix(sources, query, EPS)
    own = {t.data_ptr() for t in sources}
    extra = sum(t.numel() for t in saved if t.data_ptr() not in own)
    assert extra <= 3 * 9 * 64 + 128


def test_refusals() -> None:
    sources, query = make(2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="at least one tensor"):
        attn_res_mix([], query, EPS)
    with pytest.raises(TypeError, match="never computed in 16 bits"):
        attn_res_mix(sources, query.bfloat16(), EPS)
    with pytest.raises(ValueError, match=r"sources\[1\]"):
        attn_res_mix([sources[0], sources[1][:1]], query, EPS)
    with pytest.raises(ValueError, match=r"query.shape: expected \[16\]"):
        attn_res_mix(sources, query[:3], EPS)
    partials = attn_res_bank(sources, query[None], EPS)
    with pytest.raises(ValueError, match=r"index: expected 0..0, received 1"):
        attn_res_merge(partials, 1, sources[0], query, EPS)
    with pytest.raises(ValueError, match=r"queries.shape"):
        attn_res_bank(sources, query, EPS)

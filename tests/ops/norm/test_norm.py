"""The norms: their numbers, where they cast, their gradients, their refusals."""

from __future__ import annotations

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor

from openkda.ops.norm import api
from openkda.testing.compare import check_close, rel

rms_norm, gated_rms_norm, l2norm = (
    jaxtyped(typechecker=beartype)(f) for f in (api.rms_norm, api.gated_rms_norm, api.l2norm)
)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_numbers() -> None:
    x = torch.tensor([3.0, 4.0])
    assert torch.allclose(rms_norm(x, torch.tensor([1.0, 2.0]), 0.0), torch.tensor([3.0, 8.0]) / 12.5**0.5)
    assert torch.allclose(l2norm(x), torch.tensor([0.6, 0.8]))
    half = gated_rms_norm(x, torch.zeros(2), torch.ones(2), 0.0)
    assert torch.allclose(half, 0.5 * x / 12.5**0.5)


def test_eps_of_l2norm_is_added_to_the_sum() -> None:
    """For a row far below eps the result is x / 1e-3; a mean-based norm would be off by sqrt(K)."""
    x = torch.full((128,), 1e-9)
    assert torch.allclose(l2norm(x), x / 1e-3, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts(dtype: torch.dtype) -> None:
    """rms_norm rounds before the weight, the gated norm once at the end; both are float32 inside and return x's dtype."""
    x, gate, w = rand(7, 64, dtype=dtype), rand(7, 64, seed=1, dtype=dtype), rand(64, seed=2, dtype=torch.float32)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(rms_norm(x, w, 1e-5), (wide.to(dtype) * w).to(dtype))
    assert torch.equal(gated_rms_norm(x, gate, w, 1e-5), (wide * w * torch.sigmoid(gate.float())).to(dtype))
    assert l2norm(x).dtype == dtype
    big = torch.full((1, 64), 300.0, dtype=dtype)  # its square leaves float16
    assert torch.allclose(rms_norm(big, torch.ones(64), 1e-5).float(), torch.ones(64), rtol=1e-2)


def test_gradients() -> None:
    x, gate, w = (
        rand(3, 5, 8).requires_grad_(),
        rand(3, 5, 8, seed=1).requires_grad_(),
        rand(8, seed=2).requires_grad_(),
    )
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, w))
    assert torch.autograd.gradcheck(lambda x, g, w: gated_rms_norm(x, g, w, 1e-5), (x, gate, w))
    assert torch.autograd.gradcheck(l2norm, (x,))


def test_gradient_of_l2norm_at_zero_and_tiny_rows_is_bounded() -> None:
    for size in (0.0, 1e-4, 1e-8, 1e-20):
        x = (size * rand(4, 16)).float().requires_grad_()
        l2norm(x).sum().backward()
        assert x.grad is not None
        assert bool(torch.isfinite(x.grad).all())
        assert (
            x.grad.norm(dim=-1).max() <= 4.0 * (1 + 1e-6) / api.L2NORM_EPS**0.5
        )  # norm of the upstream gradient / sqrt(eps)


@pytest.mark.parametrize("size", [1e9, 1e17, 1e20, 1e38])
def test_l2norm_of_huge_rows(size: float) -> None:
    """Their squares are no float32: once such rows came out as zeros. The rows beside them keep their bits."""
    base, up = rand(4, 16).float(), rand(4, 16, seed=1).float()
    x = base.clone()
    x[1] *= size / x[1].abs().max()
    narrow, wide = x.requires_grad_(), x.detach().double().requires_grad_()
    got, want = l2norm(narrow), l2norm(wide)
    check_close("rows", got, want, 1e-6)
    assert torch.equal(got[[0, 2, 3]], l2norm(base)[[0, 2, 3]])
    a, b = (torch.autograd.grad(y, t, up.to(y.dtype))[0] for y, t in ((got, narrow), (want, wide)))
    check_close("gradient", a[1] * size, b[1] * size, 1e-5)
    check_close("gradients", a[[0, 2, 3]], b[[0, 2, 3]], 1e-5)


def test_gate_gradient_sees_the_gate() -> None:
    """Downstream weights get the gated value: at gate -> -inf nothing passes, forwards or backwards."""
    x, w = rand(2, 8).requires_grad_(), torch.ones(8, dtype=torch.float64, requires_grad=True)
    y = gated_rms_norm(x, torch.full((2, 8), -1e4, dtype=torch.float64), w, 1e-5)
    assert not bool(y.any())
    y.sum().backward()
    assert w.grad is not None
    assert not bool(w.grad.any())


@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (2, 3, 4, 8)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x, w = rand(*shape), rand(8, seed=1)
    assert rms_norm(x, w, 1e-6).shape == gated_rms_norm(x, x, w, 1e-6).shape == l2norm(x).shape == shape
    strided = rand(*shape[:-1], 16)[..., ::2]
    assert rel(rms_norm(strided, w, 1e-6), rms_norm(strided.contiguous(), w, 1e-6)) < 1e-15


def test_refusals() -> None:
    x, w = rand(2, 8), rand(8)
    with pytest.raises(ValueError, match=r"weight.shape: expected \[8\] .*received \[7\]"):
        api.rms_norm(x, w[:7], 1e-5)
    with pytest.raises(ValueError, match=r"gate.shape: expected \[2, 8\] .*received \[1, 8\]"):
        api.gated_rms_norm(x, x[:1], w, 1e-5)
    with pytest.raises(TypeError, match=r"x.dtype: expected float.*received torch.int64"):
        api.l2norm(x.long())
    with pytest.raises(ValueError, match=r"eps: expected a finite number >= 0, received -1"):
        api.rms_norm(x, w, -1.0)
    with pytest.raises(ValueError, match=r"impl: expected one of .*received 'fast'"):
        api.rms_norm(x, w, 1e-5, impl="fast")


def check_result_dtype(device: str) -> None:
    """Cast at the end, the bits of casting afterwards; and the gradients of that (on a GPU to float32's rounding: the
    layout, and with it the order of the sums, follows the dtype of the upstream gradient)."""
    near = {"rtol": 0.0, "atol": 0.0} if device == "cpu" else {"rtol": 1e-5, "atol": 1e-5}
    gen = torch.Generator().manual_seed(0)
    x, w, d = (torch.randn(s, generator=gen).to(device) for s in ((7, 5, 48), (48,), (7, 5, 48)))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        leaves = [[t.clone().requires_grad_() for t in (x, w)] for _ in "ab"]
        got, want = rms_norm(*leaves[0], 1e-5, dtype=dtype), rms_norm(*leaves[1], 1e-5).to(dtype)
        assert got.dtype == dtype and torch.equal(got, want)
        pairs = zip(
            *(torch.autograd.grad(y, l, d.to(dtype)) for y, l in ((got, leaves[0]), (want, leaves[1]))), strict=True
        )
        for a, b in pairs:
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, **near)
        with torch.no_grad():
            assert all(torch.equal(rms_norm(x, w, 1e-5, dtype=dtype), want) for _ in range(3))


def test_result_dtype() -> None:
    check_result_dtype("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_result_dtype_on_a_gpu() -> None:
    check_result_dtype("cuda")

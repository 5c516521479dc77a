"""The norm of x + a in one pass: the numbers and gradients of the two steps, on a CPU, in the interpreter, on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.ops.norm.api import add_rms_norm, rms_norm
from openkda.testing.compare import check_close

sys.path.append(str(Path(__file__).parents[1] / "kda"))
from interpreter import INTERPRETED, patch_interpreter, run_interpreted

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GPU = torch.cuda.is_available()


def make(wide: torch.dtype, narrow: torch.dtype, device: str, D: int = 100) -> tuple[list[Tensor], list[Tensor]]:
    """x, a, weight, and upstream gradients of the sum and of the norm (in a's dtype)."""
    gen = torch.Generator().manual_seed(0)
    shapes = ((3, 7, D), (3, 7, D), (D,), (3, 7, D), (3, 7, D))
    dtypes = (wide, narrow, F32, wide, narrow)
    made = [torch.randn(s, generator=gen).to(device, d) for s, d in zip(shapes, dtypes, strict=True)]
    return [t.requires_grad_() for t in made[:3]], made[3:]


def two_steps(x: Tensor, a: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x + a, rms_norm(x + a, weight, 1e-5, dtype=dtype, impl="reference")


def check(wide: torch.dtype, narrow: torch.dtype, device: str, impl: str | None = None) -> None:
    leaves, up = make(wide, narrow, device)
    got = add_rms_norm(*leaves, 1e-5, dtype=narrow, impl=impl)
    want = two_steps(*leaves, narrow)
    assert torch.equal(got[0], want[0]) and [t.dtype for t in got] == [wide, narrow]
    limit = {F32: 2e-6, F16: 1e-3, BF16: 8e-3}[narrow]  # two roundings
    check_close("norm", got[1], want[1], limit)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    right = torch.autograd.grad(two_steps(*exact, torch.float64), exact, [t.double() for t in up])
    grads = torch.autograd.grad(got, leaves, up)
    for name, a, b, leaf in zip(("dx", "da", "dw"), grads, right, leaves, strict=True):
        assert a.dtype == leaf.dtype, name
        check_close(name, a, b, {F32: 2e-6, F16: 1e-3, BF16: 8e-3}[leaf.dtype if name == "da" else narrow])
    for which in (0, 1):  # a sum that nobody else reads, as behind the last layer; a norm that nobody reads
        got = add_rms_norm(*leaves, 1e-5, dtype=narrow, impl=impl)
        one = torch.autograd.grad(got[which], leaves, up[which], allow_unused=True)
        right = torch.autograd.grad(
            two_steps(*exact, torch.float64)[which], exact, up[which].double(), allow_unused=True
        )
        for name, a, b in zip(("dx", "da", "dw"), one, right, strict=True):
            assert (a is None) == (b is None), name
            if a is not None and b is not None:
                check_close(f"{name} of {which} alone", a, b, limit)


def test_on_a_cpu() -> None:
    for wide, narrow in ((F32, F32), (F32, BF16), (BF16, BF16)):
        check(wide, narrow, "cpu")
    leaves = [t.detach().double().requires_grad_() for t in make(F32, F32, "cpu", 8)[0]]
    assert torch.autograd.gradcheck(lambda *t: add_rms_norm(*t, 1e-5), leaves)
    narrow, wide = torch.ones(2, 8, dtype=BF16), torch.ones(2, 8)
    assert add_rms_norm(narrow, wide, torch.ones(8), 1e-5)[0].dtype == F32, "as torch adds"


def test_refusals() -> None:
    (x, a, w), _ = make(F32, F32, "cpu")
    for impl in (None, "reference"):
        with pytest.raises(ValueError, match=r"a: expected \[3, 7, 100\] on cpu, as x, received \[7, 100\]"):
            add_rms_norm(x, a[0], w, 1e-5, impl=impl)
        with pytest.raises(ValueError, match=r"a: expected .* received \[3, 7, 100\] on meta"):
            add_rms_norm(x, a.to("meta"), w, 1e-5, impl=impl)
        with pytest.raises(TypeError, match=r"x: expected a torch.Tensor"):
            add_rms_norm(None, a, w, 1e-5, impl=impl)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a.dtype: expected float"):
        add_rms_norm(x, a.long(), w, 1e-5)
    with pytest.raises(ValueError, match=r"weight.shape"):
        add_rms_norm(x, a, w[:5], 1e-5, impl="reference")


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(__file__)


if INTERPRETED:
    patch_interpreter()

    @pytest.mark.parametrize("dtypes", [(F32, F32), (F32, F16), (F16, F16)])
    def test_kernels(dtypes: Any) -> None:
        check(*dtypes, "cpu", "triton")

    def test_second_derivatives_are_refused() -> None:
        (x, a, w), _ = make(F32, F32, "cpu")
        y = add_rms_norm(x, a, w, 1e-5, impl="triton")[1]
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives need impl='reference'"):
            dx.sum().backward()

    @pytest.mark.parametrize("shape", [(3, 0), (0, 8), (0, 0), (2, 0, 8)])
    def test_nothing_to_do(shape: tuple[int, ...]) -> None:
        leaves = [torch.zeros(n, requires_grad=True) for n in (shape, shape, shape[-1:])]
        for total, y in (
            add_rms_norm(*leaves, 1e-5, impl="triton"),
            (leaves[0], rms_norm(*leaves[1:], 1e-5, impl="triton")),
        ):
            assert total.shape == y.shape == shape
            found = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
            assert all(g is None or (g.shape == t.shape and not g.any()) for g, t in zip(found, leaves, strict=True))

    def test_one_graph() -> None:
        leaves, up = make(F32, F32, "cpu")
        run = torch.compile(lambda *t: add_rms_norm(*t, 1e-5, impl="triton"), backend="aot_eager", fullgraph=True)
        want = add_rms_norm(*leaves, 1e-5, impl="triton")
        got = run(*leaves)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        pairs = zip(torch.autograd.grad(got, leaves, up), torch.autograd.grad(want, leaves, up), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (BF16, BF16), (F32, F16)])
def test_kernels_on_a_gpu(dtypes: Any) -> None:
    check(*dtypes, "cuda")
    check(*dtypes, "cuda", "triton")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_the_sum_is_that_of_torch() -> None:
    """To the bit, at the size of a model's stream; two runs are one."""
    x, a = torch.randn(4096, 768, device="cuda", requires_grad=True), torch.randn(4096, 768, device="cuda", dtype=BF16)
    w = torch.randn(768, device="cuda", requires_grad=True)
    runs = [add_rms_norm(x, a.requires_grad_(), w, 1e-5, dtype=BF16) for _ in "ab"]
    assert torch.equal(runs[0][0], x + a)
    assert torch.equal(runs[0][1], rms_norm(x + a, w, 1e-5, dtype=BF16))
    up = (torch.randn_like(x), torch.randn_like(a))
    for g, h in zip(*(torch.autograd.grad(r, (x, a, w), up) for r in runs), strict=True):
        assert torch.equal(g, h)

"""The kernels of the Attention Residuals mix beside the torch forms: in the interpreter (float32), and on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from openkda.ops.attn_res import reference
from openkda.ops.attn_res.api import attn_res_bank, attn_res_merge, attn_res_mix
from openkda.testing.compare import check_close, rel_grad

sys.path.append(str(Path(__file__).parents[1] / "kda"))
from interpreter import INTERPRETED, patch_interpreter, run_interpreted

EPS = 1e-5
GPU = torch.cuda.is_available()


def make(n: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(n)
    sources = [(torch.randn(shape, generator=g) * 2.0**i).to(device, dtype) for i in range(n)]
    return sources, torch.randn(shape[-1], generator=g).to(device)


def check_kernels(n: int, D: int, dtype: torch.dtype, device: str) -> None:
    from openkda.ops.attn_res.triton import launch

    sources, query = make(n, (2, 3, D), dtype, device)
    exact = [v.double() for v in sources]
    want = reference.mix(exact, query.double(), EPS)
    limit = {torch.float32: 2e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]  # one rounding of the result
    for name, a, b in zip("hrc", launch.mix(sources, query, EPS), want, strict=True):
        check_close(name, a.double(), b, limit if name == "h" else 2e-5)
    if n > 1:
        queries = torch.stack([query, -2 * query])
        parts = launch.bank(sources[:-1], queries, EPS)
        p = reference.bank(exact[:-1], queries.double(), EPS)
        for name, a, b in zip("mlo", parts, (p.m, p.l, p.o), strict=True):
            check_close(name, a.double(), b, 2e-5)
        h = launch.merge(*(t[0] for t in parts), sources[-1], query, EPS)
        check_close("merged", h.double(), want[0], limit)
    # Scores of size 1: where one source has all the weight, the query's gradient is a difference of equal numbers.
    query = query / query.norm()
    _, r, c = reference.mix(exact, query.double(), EPS)
    up = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    dw, dsources = launch.mix_gradient(up, sources, query, r.float(), c.float())
    wanted, exact_d = reference.mix_gradient(up.double(), exact, query.double(), r, c)
    check_close("dw", dw.double(), wanted, 2e-5)
    for i, (a, b) in enumerate(zip(dsources, exact_d, strict=True)):
        check_close(f"d{i}", a.double(), b, limit)
    other = [t.float().transpose(-1, -2).contiguous().transpose(-1, -2) for t in (r, c)]  # as a hook may hand them back
    assert torch.equal(launch.mix_gradient(up, sources, query, *other)[0], dw)


if INTERPRETED:
    patch_interpreter()

    @pytest.mark.parametrize(("n", "D"), [(1, 16), (2, 100), (5, 256), (9, 33)])
    def test_interpreted(n: int, D: int) -> None:
        check_kernels(n, D, torch.float32, "cpu")

    def test_extreme_scores_interpreted() -> None:
        from openkda.ops.attn_res.triton import launch

        sources, query = make(3, (4, 16), torch.float32, "cpu")
        for factor in (1000.0, -1000.0):
            got = launch.mix(sources, query * factor, EPS)[0]
            check_close("h", got, reference.mix(sources, query * factor, EPS)[0], 1e-6)

else:

    def test_in_the_interpreter() -> None:
        run_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "D"), [(1, 64), (2, 2048), (9, 7168), (4, 100), (3, 16384)])
def test_on_a_gpu(n: int, D: int, dtype: torch.dtype) -> None:
    check_kernels(n, D, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_gradients_and_both_phases_on_a_gpu() -> None:
    sources, query = make(4, (2, 5, 256), torch.float32, "cuda")
    up = torch.randn_like(sources[0])
    grads = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        leaves = [t.to(device, dtype).requires_grad_() for t in (*sources, query)]
        h = attn_res_mix(leaves[:-1], leaves[-1], EPS)
        grads.append([g.cpu().double() for g in torch.autograd.grad(h, leaves, up.to(device, dtype))])
    for a, b in zip(*grads, strict=True):
        assert rel_grad(a, b, up.cpu().double()) < 2e-5
    with torch.no_grad():
        merged = attn_res_merge(attn_res_bank(sources[:-1], query[None], EPS), 0, sources[-1], query, EPS)
        check_close("h", merged, attn_res_mix(sources, query, EPS), 1e-5)

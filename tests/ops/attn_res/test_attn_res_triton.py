"""The kernels of the Attention Residuals mix beside the torch forms: in the interpreter (float32), and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from openkda.ops.attn_res import reference
from openkda.ops.attn_res.api import attn_res_bank, attn_res_merge, attn_res_mix
from openkda.testing.compare import check_close, rel_grad

EPS = 1e-5
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # must be chosen before triton is first imported
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
        p = attn_res_bank(sources[:-1], query[None], EPS)
        h = launch.merge(p.m[0], p.l[0], p.o[0], sources[-1], query, EPS)
        check_close("merged", h.double(), want[0], limit)


if INTERPRETED:

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
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:]


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

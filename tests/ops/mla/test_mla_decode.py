"""The kernel of a decoding step beside the formula in float64: lengths, heads, parts, and what lies behind a row's end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from openkda.ops.mla import triton as kernels
from openkda.ops.mla.api import mla
from openkda.testing.compare import rel

sys.path.append(str(Path(__file__).parents[1] / "kda"))
from interpreter import INTERPRETED, patch_interpreter, run_interpreted

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LIMITS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SIZES = [(1, 1, 40, 16, 8), (3, 5, 70, 24, 16), (2, 20, 100, 32, 0)]  # rows, heads, room, rank, shared
LARGE = [(1, 16, 8704, 512, 64), (32, 16, 1536, 512, 64), (2, 96, 3000, 512, 64), (300, 16, 40, 256, 64)]


def check(N: int, H: int, S: int, rank: int, shared: int, dtype: torch.dtype, device: str) -> None:
    """Rows of every length from 1 to S, NaN behind their ends; scores of size 4, so that few keys matter."""
    gen = torch.Generator().manual_seed(S)
    q = (4 * torch.randn(N, H, rank + shared, generator=gen)).to(device, dtype)
    latent = torch.randn(N, S + 3, rank + shared, generator=gen).to(device, dtype)[:, :S]
    lengths = torch.linspace(1, S, N).round().long().to(device) if N > 1 else torch.tensor([S - 1], device=device)
    behind = torch.arange(S, device=device) >= lengths.view(N, 1)
    clean = latent.double().masked_fill(behind.unsqueeze(-1), 0.0)
    latent[behind] = float("nan")
    scale = (rank + shared) ** -0.5
    scores = torch.einsum("nhr,nsr->nhs", q.double(), clean) * scale
    weights = scores.masked_fill(behind.unsqueeze(1), float("-inf")).softmax(-1)
    want = torch.einsum("nhs,nsr->nhr", weights, clean[..., :rank])
    assert kernels.takes(q, latent)
    got = kernels.attend(q, latent, lengths, scale, rank)
    assert got.dtype == dtype and rel(got.double(), want) < LIMITS[dtype]
    assert torch.equal(got, kernels.attend(q, latent, lengths.int(), scale, rank))
    if N == 1:
        assert rel(kernels.attend(q, latent[:, : S - 1], None, scale, rank).double(), want) < LIMITS[dtype]


def check_the_op_takes_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the contract, beside the expanded form; with gradients the other way is taken."""
    calls: list[int] = []
    original = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *a: (calls.append(1), original(*a))[1])
    gen = torch.Generator().manual_seed(0)
    N, S, H, nope, shared, V, rank = 3, 50, 2, 8, 4, 12, 16
    q, latent, kv_b = (
        torch.randn(s, generator=gen).to(device)
        for s in ((N, 1, H, nope + shared), (N, S, rank + shared), (H * (nope + V), rank))
    )
    lengths = torch.tensor([S, 7, 1], device=device)
    want = mla(q, latent, kv_b, lengths=lengths, impl="expanded")
    assert rel(mla(q, latent, kv_b, lengths=lengths, impl="absorbed"), want) < 1e-5 and calls == [1]
    y = mla(q.requires_grad_(), latent, kv_b, lengths=lengths, impl="absorbed")
    assert calls == [1] and y.requires_grad and rel(y, want) < 1e-5


if INTERPRETED:
    patch_interpreter()

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_interpreted(sizes: tuple[int, ...]) -> None:
        check(*sizes, torch.float32, "cpu")

else:

    def test_in_the_interpreter() -> None:
        run_interpreted(__file__)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES + LARGE, ids=str)
def test_on_a_gpu(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    check(*sizes, dtype, "cuda")


@pytest.mark.gpu
@NEEDS_GPU
def test_the_op_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    check_the_op_takes_it("cuda", monkeypatch)

"""Rows times packed expert matrices in one kernel: the numbers of unpacking first, wherever the tokens go."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from openkda.ops.moe import triton as kernels
from openkda.ops.moe.activation import SiTUGLU
from openkda.ops.moe.api import PackedExperts, expert_mlp, packed_expert_mlp
from openkda.ops.mx.api import pack_mxfp4, unpack_mxfp4
from openkda.testing.compare import rel

sys.path.append(str(Path(__file__).parents[1] / "kda"))
from interpreter import INTERPRETED, patch_interpreter, run_interpreted

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = [  # rows, experts, output columns, inputs
    (1, 4, 64, 32), (5, 3, 48, 64), (40, 4, 100, 96), (7, 40, 64, 128), (300, 3, 130, 160),
]  # fmt: skip
LARGE = [(128, 32, 1024, 1024), (4096, 32, 512, 1024), (1000, 5, 200, 416)]


def check_sizes(M: int, E: int, O: int, D: int, dtype: torch.dtype, device: str) -> None:
    """Against float64; the second expert has no rows, and rows lie where NaN would show a stray read."""
    gen = torch.Generator().manual_seed(M)
    w = torch.randn(E, O, D, generator=gen) * torch.exp2(torch.randint(-8, 0, (E, O, 1), generator=gen).float())
    codes, scale = (t.to(device) for t in pack_mxfp4(w))
    expert = torch.randint(0, E, (M,), generator=gen)
    expert = torch.where(expert == 1, 2, expert).sort().values.to(device)
    ends = torch.searchsorted(expert, torch.arange(E, device=device), right=True).int()
    x = torch.full((M + 2, D), float("nan"), device=device, dtype=dtype)
    x[1:-1] = torch.randn(M, D, generator=gen).to(device, dtype)
    x = x[1:-1]
    matrices = unpack_mxfp4(codes, scale, dtype=torch.float64)[expert]
    want = torch.einsum("mod,md->mo", matrices, x.double())
    got = kernels.packed_linear(x, codes, scale, ends)
    limit = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]  # 2^-9 of bfloat16, once
    for o in range(0, O, 50):  # columns have scales of their own
        assert rel(got[:, o].double(), want[:, o]) < limit, o
    assert torch.equal(got, kernels.packed_linear(x, codes, scale, ends))


def check_codes(device: str, dtype: torch.dtype) -> None:
    """Every code with scales at both ends: the identity times a matrix gives its values, exactly."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 16, 16).to(device)
    ends = torch.tensor([32], dtype=torch.int32, device=device)
    for byte in (0, 1, 2, 100, 127, 200, 250, 255):
        scale = torch.full((1, 16, 1), byte, dtype=torch.uint8, device=device)
        want = unpack_mxfp4(codes, scale, dtype=dtype)[0]
        got = kernels.packed_linear(torch.eye(32, device=device, dtype=dtype), codes, scale, ends).T
        if byte == 255:
            assert bool(got.isnan().all())
        else:
            assert torch.equal(got, want), byte


if INTERPRETED:
    patch_interpreter()

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_interpreted(sizes: tuple[int, int, int, int]) -> None:
        check_sizes(*sizes, torch.float32, "cpu")

    def test_codes_interpreted() -> None:
        check_codes("cpu", torch.float32)

    def test_the_op_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
        """The whole mixture beside plain matrices of the same values; with gradients the other path."""
        check_op("cpu", torch.float32, 1e-6, monkeypatch)

else:

    def test_in_the_interpreter() -> None:
        run_interpreted(__file__)


def check_op(device: str, dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gen = torch.Generator().manual_seed(0)
    T, E, k, D, inner = 30, 5, 2, 64, 96
    w1, w3, w2 = (torch.randn(s, generator=gen) / 8 for s in ((E, inner, D), (E, inner, D), (E, D, inner)))
    parts = [pack_mxfp4(w.to(device)) for w in (w1, w2, w3)]
    plain = [unpack_mxfp4(*p, dtype=dtype) for p in parts]
    x = torch.randn(T, D, generator=gen).to(device, dtype)
    experts = torch.stack([torch.randperm(E, generator=gen)[:k] for _ in range(T)]).to(device)
    weights = torch.rand(T, k, generator=gen).to(device)
    calls: list[int] = []
    original = kernels.packed_linear

    def counted(*tensors: Tensor) -> Tensor:
        calls.append(1)
        return original(*tensors)

    def packed(x: Tensor) -> Tensor:
        T = x.shape[0]
        return packed_expert_mlp(x, experts[:T], weights[:T], PackedExperts(*parts), activation=SiTUGLU())

    monkeypatch.setattr(kernels, "packed_linear", counted)
    want = expert_mlp(x, experts, weights, plain[0], plain[2], plain[1], activation=SiTUGLU())
    assert rel(packed(x), want) < limit and len(calls) == 3
    assert packed(x[:0]).shape == (0, D)
    calls.clear()
    trained = x.clone().requires_grad_()
    y = packed(trained)
    assert not calls and rel(y, want) < limit
    assert torch.autograd.grad(y.sum(), trained)[0].abs().sum() > 0


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES + LARGE, ids=str)
def test_sizes_on_a_gpu(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_sizes(*sizes, dtype, "cuda")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_and_op_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check_codes("cuda", dtype)
    check_op("cuda", dtype, 1e-5 if dtype == torch.float32 else 1e-2, monkeypatch)

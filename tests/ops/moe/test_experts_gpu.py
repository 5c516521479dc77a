"""The kernels of experts where nothing is differentiated: the numbers of plain torch, wherever the tokens go."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.ops.moe import triton as kernels
from openkda.ops.moe.activation import GLU, SiTUGLU, SwiGLU
from openkda.ops.moe.api import PackedExperts, expert_mlp, packed_expert_mlp, route, select_experts
from openkda.ops.mx.api import pack_mxfp4, unpack_mxfp4
from openkda.testing.compare import rel

sys.path.append(str(Path(__file__).parents[1] / "kda"))
from interpreter import INTERPRETED, patch_interpreter, run_interpreted

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = [(1, 4, 2, 64, 32), (5, 3, 1, 32, 96), (20, 4, 3, 96, 64), (3, 20, 8, 64, 64), (40, 3, 2, 160, 32)]
LARGE = [(1, 32, 4, 1024, 1024), (32, 32, 4, 1024, 1024), (1500, 8, 4, 512, 416), (4, 896, 16, 256, 128)]
LIMITS = {
    torch.float32: 5e-6,
    torch.float16: 1.5e-3,
    torch.bfloat16: 1e-2,
}  # sums of 1,024 terms; three roundings of 2^-9


def make(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """x between rows of NaN, so that a stray read shows; expert 1 gets no token where that is possible."""
    T, E, k, D, inner = sizes
    gen = torch.Generator().manual_seed(T)
    shapes = (E, inner, D), (E, inner, D), (E, D, inner)
    matrices = [torch.randn(s, generator=gen).div_(s[2] ** 0.5).to(device, dtype) for s in shapes]
    x = torch.full((T + 2, D), float("nan"), dtype=dtype, device=device)
    x[1:-1] = torch.randn(T, D, generator=gen).to(device, dtype)
    allowed = torch.tensor([e for e in range(E) if e != 1 or k == E])
    experts = torch.stack([allowed[torch.randperm(len(allowed), generator=gen)[:k]] for _ in range(T)]).to(device)
    return x[1:-1], experts, torch.rand(T, k, generator=gen).to(device), matrices


def exact(x: Tensor, experts: Tensor, weights: Tensor, matrices: list[Tensor], activation: GLU) -> Tensor:
    w1, w3, w2 = (w.double() for w in matrices)
    z, rows = x.double(), []
    for t in range(len(x)):
        y = [w2[e] @ activation(w1[e] @ z[t], w3[e] @ z[t]) for e in experts[t].tolist()]
        rows.append(weights[t].double() @ torch.stack(y))
    return torch.stack(rows)


def check_plain(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch, *activations: GLU
) -> None:
    x, experts, weights, matrices = make(sizes, dtype, device)
    calls = counted(monkeypatch)
    for activation in activations:
        got = expert_mlp(x, experts, weights, *matrices, activation=activation)
        assert rel(got.double(), exact(x, experts, weights, matrices, activation)) < LIMITS[dtype]
        assert torch.equal(got, expert_mlp(x, experts, weights, *matrices, activation=activation))
    assert len(calls) == (2 * len(activations) if experts.numel() <= kernels.FEW_PAIRS else 0)


def check_packed(sizes: tuple[int, ...], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales differ from row to row; with gradients the other way is taken, to the same numbers."""
    x, experts, weights, matrices = make(sizes, dtype, device)
    gen = torch.Generator().manual_seed(1)
    spread = [torch.exp2(torch.randint(-3, 3, (*w.shape[:2], 1), generator=gen).float()).to(device) for w in matrices]
    parts = [pack_mxfp4(w.float() * s) for w, s in zip(matrices, spread, strict=True)]
    plain = [unpack_mxfp4(*p, dtype=torch.float64) for p in parts]
    packed = PackedExperts(parts[0], parts[2], parts[1])
    calls = counted(monkeypatch)
    want = exact(x, experts, weights, plain, SiTUGLU())
    got = packed_expert_mlp(x, experts, weights, packed, activation=SiTUGLU())
    assert rel(got.double(), want) < LIMITS[dtype] and len(calls) == 1
    assert torch.equal(got, packed_expert_mlp(x, experts, weights, packed, activation=SiTUGLU()))
    assert packed_expert_mlp(x[:0], experts[:0], weights[:0], packed, activation=SiTUGLU()).shape == (0, x.shape[1])
    calls.clear()
    trained = x.clone().requires_grad_()
    y = packed_expert_mlp(trained, experts, weights, packed, activation=SiTUGLU())
    assert not calls and rel(y.double(), want) < LIMITS[dtype]
    assert torch.autograd.grad(y.sum(), trained)[0].abs().sum() > 0


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = kernels.experts

    def experts(*args: Any) -> Tensor:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(kernels, "experts", experts)
    return calls


def check_codes(device: str, dtype: torch.dtype) -> None:
    """Every code with scales at both ends, through a down projection of unit rows: its values, exactly."""
    from openkda.ops.moe.triton import expert_launch as host
    from openkda.ops.triton.api import launch

    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 16, 16).to(device)
    pair = torch.arange(32, dtype=torch.int32, device=device)
    ends = torch.tensor([32], dtype=torch.int32, device=device)
    for byte in (0, 1, 2, 100, 127, 200, 250, 255):
        scale = torch.full((1, 16, 1), byte, dtype=torch.uint8, device=device)
        want = unpack_mxfp4(codes, scale, dtype=dtype)[0]
        x, y = torch.eye(32, device=device, dtype=dtype), torch.empty(32, 16, device=device, dtype=dtype)
        tensors = (x, codes, scale, pair, ends, y)
        launch(host.down_kernel, 3, tensors, (32, 16), (1, 1), (16, 64, host.STEP, 16, True), 4, x.device)
        assert bool(y.isnan().all()) if byte == 255 else torch.equal(y.T, want), byte


def check_route(T: int, E: int, k: int, D: int, dtype: torch.dtype, device: str) -> None:
    """Choice, weights and scores beside plain torch on the kernel's own scores; those beside float64."""
    gen = torch.Generator().manual_seed(T)
    x, w = (torch.randn(n, D, generator=gen).div_(D**0.25).to(device, dtype) for n in (T, E))
    bias = torch.randn(E, generator=gen).to(device)
    for b, normalize in ((bias, True), (None, False)):
        assert kernels.takes_routing(x, w, b, k)
        got = route(x, w, b, k, renormalize=normalize, scale=2.5)
        torch.testing.assert_close(got.scores.double(), torch.sigmoid(x.double() @ w.double().T), rtol=1e-4, atol=2e-5)
        want = select_experts(got.scores, b, k, renormalize=normalize, scale=2.5)
        assert got.experts.dtype == torch.int64 and torch.equal(got.experts, want.experts)
        torch.testing.assert_close(got.weights, want.weights, rtol=1e-6, atol=1e-7)


def check_hostile_scores(device: str) -> None:
    """Equal scores, infinite biases and NaN: always k different experts that exist."""
    x, w = torch.ones(3, 16, device=device), torch.zeros(5, 16, device=device)
    x[1] = float("nan")
    for value in (0.0, float("-inf"), float("inf"), float("nan")):
        found = route(x, w, torch.full((5,), value, device=device), 4)
        assert all(sorted(row) == [0, 1, 2, 3] for row in found.experts.tolist())
        assert bool(found.weights[1].isnan().all()) and bool(found.weights[[0, 2]].eq(0.25).all())


ROUTES = [(1, 4, 2, 64), (7, 5, 5, 33), (17, 40, 3, 100)]

if INTERPRETED:
    patch_interpreter()

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_interpreted(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        check_plain(sizes, torch.float32, "cpu", monkeypatch, SwiGLU() if sizes[0] % 2 else SiTUGLU(2.0, None))
        check_packed(sizes, torch.float32, "cpu", monkeypatch)

    def test_large_tiles_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("openkda.ops.moe.triton.expert_launch.COUNTED", 8)
        check_packed((150, 2, 1, 64, 32), torch.float32, "cpu", monkeypatch)

    def test_codes_interpreted() -> None:
        check_codes("cpu", torch.float32)

    @pytest.mark.parametrize("sizes", ROUTES, ids=str)
    def test_routes_interpreted(sizes: tuple[int, ...]) -> None:
        check_route(*sizes, torch.float32, "cpu")

    def test_hostile_scores_interpreted() -> None:
        check_hostile_scores("cpu")

else:

    def test_in_the_interpreter() -> None:
        run_interpreted(__file__)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES + LARGE, ids=str)
def test_on_a_gpu(sizes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plain(sizes, dtype, "cuda", monkeypatch, SwiGLU(), SiTUGLU(), SiTUGLU(2.0, None))
    check_packed(sizes, dtype, "cuda", monkeypatch)


@pytest.mark.gpu
@NEEDS_GPU
def test_codes_and_routes_on_a_gpu() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_codes("cuda", dtype)
        for sizes in [*ROUTES, (32, 896, 16, 7168)]:
            check_route(*sizes, dtype, "cuda")
    check_hostile_scores("cuda")


@pytest.mark.gpu
@NEEDS_GPU
def test_the_sum_in_training_on_a_gpu() -> None:
    """Forward by the kernel, backward in torch: the gradients of float64."""
    x, experts, weights, matrices = make((60, 5, 3, 64, 96), torch.float32, "cuda")
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, *matrices)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    y = expert_mlp(leaves[0], experts, leaves[1], *leaves[2:], activation=SwiGLU(), impl="loop")
    want = expert_mlp(wide[0], experts, wide[1], *wide[2:], activation=SwiGLU(), impl="loop")
    d = torch.randn_like(want)
    assert rel(y, want) < 5e-6
    for got, g in zip(torch.autograd.grad(y, leaves, d.float()), torch.autograd.grad(want, wide, d), strict=True):
        assert rel(got, g) < 1e-5


@pytest.mark.gpu
@NEEDS_GPU
def test_one_graph_without_gradients() -> None:
    x, _, _, matrices = make((9, 5, 3, 64, 96), torch.bfloat16, "cuda")
    router = torch.randn(5, 64, device="cuda", dtype=torch.bfloat16)

    def both(x: Tensor) -> Tensor:
        chosen = route(x, router, None, 3)
        return expert_mlp(x, chosen.experts, chosen.weights, *matrices, activation=SwiGLU())

    with torch.no_grad():
        assert rel(torch.compile(both, fullgraph=True)(x), both(x)) < 1e-2

"""Router and expert MLPs against plain loops, their gradients, and their laws."""

from __future__ import annotations

import importlib
import inspect
import math

import pytest
import torch
from torch import Tensor

from openkda.ops.moe.activation import SiTUGLU, SwiGLU
from openkda.ops.moe.api import PackedExperts, expert_mlp, packed_expert_mlp, route, select_experts
from openkda.ops.mx.api import fake_quantize, pack_mxfp4, unpack_mxfp4
from openkda.testing.compare import check_close

SITU_VECTORS = [
    (1, 1, 0.715818), (-1, 1, -0.263335), (4, 25, 56.95932), (2, -3, -4.861067), (10, 10, 37.484606), (-3, 5, -0.594544),
    (100, 100, 99.93293),
]  # fmt: skip


@pytest.mark.parametrize(("g", "u", "want"), SITU_VECTORS)
def test_situ_vectors(g: float, u: float, want: float) -> None:
    got = SiTUGLU(4.0, 25.0)(torch.tensor([g], dtype=torch.float64), torch.tensor([u], dtype=torch.float64))
    assert got.item() == pytest.approx(want, rel=1e-6, abs=1e-6)


def test_situ_is_bounded_in_16_bits_and_linear_without_its_second_bound() -> None:
    big = torch.full((4,), 3e4, dtype=torch.bfloat16)
    assert (SiTUGLU()(big, big) == 100).all() and (SiTUGLU()(big, -big) == -100).all()
    g, u = torch.tensor([0.7], dtype=torch.float64), torch.tensor([50.0], dtype=torch.float64)
    want = 2 * math.tanh(0.35) / (1 + math.exp(-0.7)) * 50
    assert SiTUGLU(2.0, None)(g, u).item() == pytest.approx(want, rel=1e-12)
    with pytest.raises(ValueError, match=r"SiTUGLU\.beta: expected a positive number, received 0"):
        SiTUGLU(0.0)


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ_gradient(linear_beta: float | None) -> None:
    g, u = (torch.randn(40, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(SiTUGLU(4.0, linear_beta), (g * 3, u * 20))


def loop_moe(x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act) -> Tensor:
    rows = []
    for t in range(x.shape[0]):
        pairs = zip(weights[t], experts[t].tolist(), strict=True)
        rows.append(sum(p * (w2[e] @ act(w1[e] @ x[t], w3[e] @ x[t])) for p, e in pairs))
    return torch.stack(rows)


def make(T: int = 33, D: int = 32, I: int = 64, E: int = 7, k: int = 3, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(T + E)
    x = torch.randn(T, D, generator=g, dtype=torch.float64)
    w1, w3 = (torch.randn(E, I, D, generator=g, dtype=torch.float64) * D**-0.5 for _ in range(2))
    w2 = torch.randn(E, D, I, generator=g, dtype=torch.float64) * I**-0.5
    scores = torch.rand(T, E, generator=g, dtype=torch.float64)
    scores[:, E - 1] = 0  # never chosen: an expert without tokens
    r = select_experts(scores, None, k)
    return [t.to(dtype) for t in (x, w1, w3, w2)], r.experts, r.weights.to(torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("act", [SwiGLU(), SiTUGLU()])
def test_expert_mlp_value_and_gradients(act) -> None:
    leaves, experts, weights = make()
    leaves.append(weights)
    for t in leaves:
        t.requires_grad_()
    x, w1, w3, w2, p = leaves
    got, want = expert_mlp(x, experts, p, w1, w3, w2, activation=act), loop_moe(x, experts, p, w1, w3, w2, act)
    check_close("y", got, want, 1e-13)
    grads = torch.autograd.grad(got.sum(), leaves)  # sum: an expanded upstream gradient
    for name, a, b in zip(("x", "w1", "w3", "w2", "p"), grads, torch.autograd.grad(want.sum(), leaves), strict=True):
        check_close(f"d{name}", a, b, 1e-12)
    assert (grads[1][-1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_implementations_agree_and_repeat_bit_equally(dtype: torch.dtype) -> None:
    leaves, experts, weights = make(dtype=dtype)
    results = []
    for impl in ("grouped_mm", "loop", "grouped_mm", "loop"):
        x, w1, w3, w2 = (t.clone().requires_grad_() for t in leaves)
        y = expert_mlp(x, experts, weights, w1, w3, w2, activation=SwiGLU(), impl=impl)
        y.sum().backward()
        results.append([y, x.grad, w1.grad, w3.grad, w2.grad])
    for first, second in ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(results[first], results[second], strict=True))
    limit = 1e-6 if dtype == torch.float32 else 2**-7
    for a, b in zip(results[0], results[1], strict=True):
        check_close("grouped_mm against loop", a, b, limit)


def test_grouped_mm_refuses_what_it_cannot_run() -> None:
    leaves, experts, weights = make(D=33, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="D = 33 rows of 132 bytes"):
        expert_mlp(leaves[0], experts, weights, *leaves[1:], activation=SwiGLU(), impl="grouped_mm")
    got = expert_mlp(leaves[0], experts, weights, *leaves[1:], activation=SwiGLU())
    check_close("loop", got, loop_moe(leaves[0], experts, weights, *leaves[1:], SwiGLU()), 1e-6)


def test_no_tokens_and_all_tokens_on_one_expert() -> None:
    leaves, _, _ = make(dtype=torch.float32)
    x, *mats = leaves
    none = torch.empty(0, 2, dtype=torch.int64)
    assert expert_mlp(x[:0], none, torch.empty(0, 2), *mats, activation=SwiGLU()).shape == (0, 32)
    experts = torch.full((x.shape[0], 1), 4)
    got = expert_mlp(x, experts, torch.ones(x.shape[0], 1), *mats, activation=SwiGLU())
    check_close("one expert", got, SwiGLU()(x @ mats[0][4].T, x @ mats[1][4].T) @ mats[2][4].T, 1e-6)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    leaves, experts, weights = make(dtype=torch.float64)
    x, *mats = leaves
    whole = expert_mlp(x, experts, weights, *mats, activation=SwiGLU())
    alone = torch.cat(
        [expert_mlp(x[i : i + 1], experts[i : i + 1], weights[i : i + 1], *mats, activation=SwiGLU()) for i in range(5)]
    )
    check_close("alone", alone, whole[:5], 1e-14)


def test_packed_experts_equal_their_dequantised_selves() -> None:
    leaves, experts, weights = make(D=64, I=32, dtype=torch.float32)
    x, w1, w3, w2 = leaves
    packed = PackedExperts(pack_mxfp4(w1), pack_mxfp4(w2), pack_mxfp4(w3))
    plain = [unpack_mxfp4(*p, dtype=torch.float32) for p in (packed.w1, packed.w3, packed.w2)]
    got = packed_expert_mlp(x, experts, weights, packed, activation=SiTUGLU())
    check_close("packed", got, expert_mlp(x, experts, weights, *plain, activation=SiTUGLU(), impl="loop"), 1e-7)
    empty = packed_expert_mlp(x[:0], experts[:0], weights[:0], packed, activation=SiTUGLU())
    assert empty.shape == (0, 64)


def test_quantisation_aware_training() -> None:
    """Forward: MXFP4 weights, MXFP8 inputs of every matmul. Backward: as if the rounded values were the values."""
    leaves, experts, weights = make(D=64, I=32, dtype=torch.float32)
    x, w1, w3, w2 = (t.requires_grad_() for t in leaves)
    y = expert_mlp(x, experts, weights, w1, w3, w2, activation=SiTUGLU(), quantize="ceil", impl="loop")
    q1, q3, q2 = (fake_quantize(w, "mxfp4").detach().requires_grad_() for w in (w1, w3, w2))
    qx = fake_quantize(x, "mxfp8").detach().requires_grad_()

    def act(g: Tensor, u: Tensor) -> Tensor:
        return fake_quantize(SiTUGLU()(g, u), "mxfp8")

    want = loop_moe(qx, experts, weights, q1, q3, q2, act)
    check_close("y", y, want, 1e-6)
    grads = torch.autograd.grad(y.square().sum(), (x, w1, w3, w2))
    wanted = torch.autograd.grad(want.square().sum(), (qx, q1, q3, q2))
    for a, b in zip(grads, wanted, strict=True):
        check_close("gradient", a, b, 1e-5)


def test_router_against_a_scalar_loop() -> None:
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(20, 16, generator=g), torch.randn(12, 16, generator=g)
    bias = torch.randn(12, generator=g) * 0.3
    r = route(x.double(), weight.double(), bias.double(), 4, scale=2.446)
    for t in range(20):
        s = [1 / (1 + math.exp(-float(x[t].double() @ w.double()))) for w in weight]
        order = sorted(range(12), key=lambda e: -(s[e] + float(bias[e])))
        assert r.experts[t].tolist() == order[:4]
        total = sum(s[e] for e in order[:4])
        for e, p in zip(order, r.weights[t].tolist(), strict=False):
            assert p == pytest.approx(s[e] / (total + 1e-20) * 2.446, rel=1e-12)


def test_bias_selects_and_does_nothing_else() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.1]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, 5.0], requires_grad=True)
    r = select_experts(scores, bias, 2, renormalize=False, with_cutoff=True)
    assert r.experts.tolist() == [[2, 0]]
    assert r.weights[0].tolist() == pytest.approx([0.1, 0.9])
    assert r.cutoff is not None and r.cutoff.tolist() == pytest.approx([0.8])
    r.weights.sum().backward()
    assert bias.grad is None and scores.grad is not None and scores.grad[0].tolist() == [1, 0, 1]


def test_close_scores_are_ordered_in_float32() -> None:
    """896 experts, scores closer than 2^-9, bias near 0.1: bf16 could not tell them apart."""
    g = torch.Generator().manual_seed(5)
    scores = 0.5 + torch.rand(64, 896, generator=g) * 2.0**-9
    bias = 0.1 + torch.rand(896, generator=g) * 2.0**-9
    r = select_experts(scores, bias, 16)
    want = (scores.double() + bias.double()).topk(16).indices
    assert (r.experts.sort().values == want.sort().values).float().mean() > 0.999
    with pytest.raises(ValueError, match=r"float32 \[896\]"):
        select_experts(scores, bias.bfloat16(), 16)


def test_router_is_float32_under_autocast() -> None:
    x, w = torch.randn(8, 32), torch.randn(5, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        r = route(x, w, None, 2)
    assert r.scores.dtype == torch.float32 and torch.equal(r.scores, torch.sigmoid(x @ w.T))


def test_autocast_computes_experts_in_its_dtype() -> None:
    leaves, experts, weights = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = expert_mlp(leaves[0], experts, weights, *leaves[1:], activation=SiTUGLU())
    assert y.dtype == torch.bfloat16
    check_close("y", y, expert_mlp(leaves[0], experts, weights, *leaves[1:], activation=SiTUGLU()), 0.02)


def test_autocast_leaves_float64_as_torch_does() -> None:
    leaves, experts, weights = make()
    packed = PackedExperts(*(pack_mxfp4(w.detach()) for w in (leaves[1], leaves[3], leaves[2])))
    for call in (
        lambda: expert_mlp(leaves[0], experts, weights, *leaves[1:], activation=SwiGLU()),
        lambda: packed_expert_mlp(leaves[0], experts, weights, packed, activation=SwiGLU()),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call()
        assert y.dtype == torch.float64 and torch.equal(y, call())


def test_refusals() -> None:
    leaves, experts, weights = make(dtype=torch.float32)
    x, w1, w3, w2 = leaves
    with pytest.raises(ValueError, match=r"k: expected 1\.\.7 .*received 8"):
        select_experts(torch.rand(2, 7), None, 8)
    with pytest.raises(ValueError, match=r"k: expected 1\.\.6 .*cutoff.*received 7"):
        select_experts(torch.rand(2, 7), None, 7, with_cutoff=True)
    with pytest.raises(ValueError, match=r"\[T, D\] and \[E, D\], received"):
        route(x, w1[0].T, None, 1)
    with pytest.raises(ValueError, match=r"w2\.shape: expected \[E, D, I\] = \[7, 32, 64\]"):
        expert_mlp(x, experts, weights, w1, w3, w1, activation=SwiGLU())
    with pytest.raises(ValueError, match="experts: expected int64"):
        expert_mlp(x, experts.int(), weights, w1, w3, w2, activation=SwiGLU())
    with pytest.raises(ValueError, match="weights: expected float32"):
        expert_mlp(x, experts, weights.half(), w1, w3, w2, activation=SwiGLU())
    with pytest.raises(ValueError, match="impl"):
        expert_mlp(x, experts, weights, w1, w3, w2, activation=SwiGLU(), impl="cutlass")
    good = PackedExperts(pack_mxfp4(w1), pack_mxfp4(w2), pack_mxfp4(w3))
    with pytest.raises(ValueError, match=r"packed\.w2: expected uint8 \[7, 32, 32\]"):
        packed_expert_mlp(x, experts, weights, PackedExperts(good.w1, good.w1, good.w3), activation=SwiGLU())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_training(dtype: torch.dtype) -> None:
    """The grouped matmul's shape rule refuses float32, which the kernel takes: torch.compile used to fail here."""
    leaves, experts, weights = make(D=64, dtype=dtype)
    leaves = [t.requires_grad_() for t in leaves]

    def loss(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        return expert_mlp(x, experts, weights, w1, w3, w2, activation=SwiGLU()).float().square().sum()

    want = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(loss, backend="eager")(*leaves), leaves)
    for a, b in zip(got, want, strict=True):
        check_close("gradient", a, b, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("tokens", [2, 33])
@pytest.mark.parametrize("wrong", [-1, 7])
def test_experts_that_are_not_there(tokens: int, wrong: int) -> None:
    """-1 used to be the last expert, and ids beyond the last lost their rows."""
    leaves, experts, weights = make(T=tokens)
    experts = experts.clone()
    experts[1, 2] = wrong
    packed = PackedExperts(*(pack_mxfp4(w.detach()) for w in (leaves[1], leaves[3], leaves[2])))
    message = r"experts: expected ids in \[0, 7\), received " + ("-1" if wrong < 0 else r".*\.\.7")
    with pytest.raises(ValueError, match=message), torch.no_grad():
        expert_mlp(leaves[0], experts, weights, *leaves[1:], activation=SwiGLU())
    with pytest.raises(ValueError, match=message):
        packed_expert_mlp(leaves[0], experts, weights, packed, activation=SwiGLU())


def test_the_activation_kernels_are_a_function_after_their_module_is_loaded() -> None:
    """A submodule of the function's name would take its place in the package when it is first imported."""
    pytest.importorskip("triton")
    from openkda.ops.moe import triton as kernels

    importlib.import_module("openkda.ops.moe.triton.launch")
    assert inspect.isfunction(kernels.glu)

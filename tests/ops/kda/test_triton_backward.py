"""The kernels' gradients on a GPU: the shared cases in every dtype, the laws by the bit, the sizes at the edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import backward_checks as checks
from backward_checks import BF16, F16, F32

from openkda.ops.kda.api import kda
from openkda.testing.cases import kda_cases
from openkda.testing.inputs import make_inputs
from openkda.testing.runs import gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = [BF16, F16, F32]
CASES = kda_cases()


def some_cases() -> list[Any]:
    """In bfloat16 a sixteenth of the list and its last packs. Half as many others in float16, which has the kernels of bfloat16
    but for their loads and stores, and in float32, which the interpreter runs, too. Every case is seven kernels to compile."""
    every = {BF16: range(5, len(CASES) - 8, 16), F16: range(13, len(CASES) - 8, 32), F32: range(29, len(CASES) - 8, 32)}
    packs = {BF16: range(-8, 0), F16: range(-15, -8, 2), F32: range(-16, -8, 2)}
    at = [(i % len(CASES), dtype) for dtype in DTYPES for i in (*every[dtype], *packs[dtype])]
    return [pytest.param(i, dtype, id=f"{CASES[i].id}-{dtype}") for i, dtype in at]


@pytest.mark.parametrize("i, dtype", some_cases())
def test_case(i: int, dtype: torch.dtype) -> None:
    checks.check_case(CASES[i], "cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "check",
    [
        checks.check_packs, checks.check_strided_offsets, checks.check_upstream, checks.check_one_end,
        checks.check_extreme_gates, checks.check_future, checks.check_positions, checks.check_key_lengths,
        checks.check_write_strengths, checks.check_refusals,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_law(check: checks.Any, dtype: torch.dtype) -> None:
    check("cuda", dtype)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_goal_accuracy(gate: str, dtype: torch.dtype) -> None:
    """The promise, at K = V = 128 with everything inside."""
    x = make_inputs(0, T=1024, H=4, K=128, gate=gate, use_qk_l2norm=True, use_beta_sigmoid=True, unit_keys=False)
    x = x.to(dtype=dtype, device="cuda")
    checks.check_gradients(gate, gradients(x, impl="triton"), checks.reference(x), checks.limits(dtype))


@pytest.mark.parametrize(
    "K, V, dtype",
    [(256, 256, BF16), (256, 64, BF16), (64, 256, BF16), (100, 200, BF16), (8, 8, BF16), (256, 256, F32), (100, 200, F32),
     (8, 8, F32)],
    ids=str,
)  # fmt: skip
def test_sizes(K: int, V: int, dtype: torch.dtype) -> None:
    """float32 tiles have 16 value channels whatever V is, and settings that follow K alone: its largest sizes are one case."""
    x = make_inputs(0, T=150, K=K, V=V, gate="softplus", use_qk_l2norm=True).to(dtype=dtype, device="cuda")
    checks.hold(f"{dtype}", x, gradients(x, impl="triton"), checks.reference(x))


def test_exact_operands_on_bfloat16() -> None:
    """Nearly parallel keys, which the default's operands are hard on."""
    x = make_inputs(0, T=200, K=128, gate="softplus", decay="slow", near_equal_keys=True).to(dtype=BF16, device="cuda")
    checks.check_gradients("exact", gradients(x, impl="triton_exact"), checks.reference(x), checks.limits(BF16))


def test_repeats_are_bit_equal_under_load() -> None:
    side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        with torch.cuda.stream(side):
            for _ in range(5):
                busy @ busy
        checks.check_repeats("cuda", BF16, lengths=(700, 0, 1, 333), H=4, HV=8, K=128, use_qk_l2norm=True)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_torch_compile(dtype: torch.dtype) -> None:
    """Forward and backward in one graph each, as plain."""
    x = make_inputs(0, T=200, H=2, K=64, use_qk_l2norm=True).to(dtype=dtype, device="cuda").requires_grad_()

    def f(q: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        out = kda(q * 2, x.k, v, g, x.beta, gate=x.gate, use_qk_l2norm=True, output_final_state=True)
        assert out.final_state is not None
        return out.output.float().square().mean() + out.final_state.square().mean()

    leaves = (x.q, x.v, x.g)
    want = torch.autograd.grad(f(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(f, fullgraph=True)(*leaves), leaves)
    for a, b in zip(got, want, strict=True):
        assert checks.rel_grad(a, b, b) < 5e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_layer_with_activation_checkpointing_and_autocast(reentrant: bool) -> None:
    """The layer computed again in the backward gives the same bits; inside autocast its state stays float32."""
    from torch.utils.checkpoint import checkpoint

    from openkda.layers.kda import KimiDeltaAttention
    from openkda.models.presets import PRESETS

    torch.manual_seed(0)
    layer = KimiDeltaAttention(PRESETS["tiny"], 0).cuda()
    x = torch.randn(2, 150, PRESETS["tiny"].hidden_size, device="cuda", requires_grad=True)
    leaves = [x, *layer.parameters()]
    grads = []
    with torch.autocast("cuda", BF16):
        for again in (False, True):
            for t in leaves:
                t.grad = None
            y = checkpoint(lambda t: layer(t)[0], x, use_reentrant=reentrant) if again else layer(x)[0]
            y.float().square().sum().backward()
            grads.append([t.grad for t in leaves])
        assert layer(x, return_state=True)[1].recurrent.dtype == F32
    for t, a, b in zip(leaves, *grads, strict=True):
        assert a is not None and b is not None and a.dtype == t.dtype and torch.equal(a, b)


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_transforms_are_refused(transform: str) -> None:
    """Also without gradients, where the Hopper kernels would run; forward mode would have lost its tangent silently."""
    x = make_inputs(0, T=64, K=128, unit_keys=False).to(dtype=BF16, device="cuda")
    flags = {"use_qk_l2norm": True, "use_beta_sigmoid": True}
    f = lambda q: kda(q, x.k, x.v, x.g.bfloat16(), x.beta, gate=x.gate, **flags).output  # noqa: E731
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"inside.*impl='reference'"):
        torch.vmap(f)(x.q.expand(2, *x.q.shape)) if transform == "vmap" else torch.func.jvp(f, (x.q,), (x.q,))

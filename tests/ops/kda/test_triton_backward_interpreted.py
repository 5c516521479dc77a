"""The kernels' gradients on a CPU, in Triton's interpreter: float32, and float16 where 16 bits have kernels of their own."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from interpreter import INTERPRETED, patch_interpreter, run_interpreted

if INTERPRETED:
    patch_interpreter()
    import backward_checks as checks
    from backward_checks import F16, F32

    from openkda.ops.kda.api import kda
    from openkda.testing.cases import kda_cases
    from openkda.testing.inputs import make_inputs

    SMALL = [c for c in kda_cases() if c.group == 1 and max(c.K, c.V) <= 32 and c.T <= 64 and c.lengths is None]
    PACKS = [c for c in kda_cases() if c.lengths in ((0, 0, 5), (1, 1, 1, 1), (1,)) and max(c.K, c.V) <= 24]
    HARD = [5, 21, 37, 69, 117, -6, -5, -3, -2]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_gradients_in_the_interpreter() -> None:
    run_interpreted(__file__)


if INTERPRETED:

    @pytest.mark.parametrize("case", SMALL[::5] + PACKS, ids=lambda c: c.id)
    def test_case(case: checks.KDACase) -> None:
        checks.check_case(case, "cpu", F32)

    @pytest.mark.parametrize("i", HARD, ids=lambda i: kda_cases()[i].id)
    def test_hard_cases_in_16_bits(i: int) -> None:
        """Keys of one direction, decays that are nothing or everything: what a gate's gradient is a small difference of."""
        checks.check_case(kda_cases()[i], "cpu", F16)

    @pytest.mark.parametrize(
        "check",
        [
            checks.check_packs, checks.check_strided_offsets, checks.check_upstream, partial(checks.check_one_end, T=9),
            partial(checks.check_extreme_gates, T=9), partial(checks.check_positions, T=9),
            partial(checks.check_write_strengths, T=20),
            checks.check_refusals,
        ],
        ids=lambda f: getattr(f, "func", f).__name__,
    )  # fmt: skip
    def test_law(check: checks.Any) -> None:
        check("cpu", F32)

    @pytest.mark.parametrize("dtype", [F32, F16], ids=str)
    def test_key_lengths(dtype: torch.dtype) -> None:
        checks.check_key_lengths("cpu", dtype)

    def test_future() -> None:
        checks.check_future("cpu", F32, T=18, prefixes=(7,), futures=checks.FUTURES[::3])

    def test_one_graph_forward_and_backward() -> None:
        """torch.compile(fullgraph=True) through both operators: the same bits."""
        x = make_inputs(8, T=9, K=16).requires_grad_()
        leaves = (x.q, x.k, x.v, x.g, x.beta)

        def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
            out = kda(2 * q, k, v, g, beta, **x.kwargs(), impl="triton")
            assert out.final_state is not None
            return (out.output * x.do).sum() + (out.final_state * x.dS).sum()

        want = torch.autograd.grad(f(*leaves), leaves)
        got = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(*leaves), leaves)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)

    def test_operator_registration() -> None:
        """torch's own check of `openkda::kda` and `openkda::kda_backward`, with and without what is optional."""
        import openkda.ops.kda.triton.autograd  # noqa: F401  (registers the backward)

        x = make_inputs(9, T=3, K=16).requires_grad_()
        assert x.gate is not None and x.gate.dt_bias is not None
        dt_bias = x.gate.dt_bias.detach().flatten().requires_grad_()
        tail = (0.5, True, False, True, False, F32, True)
        inputs = (x.q, x.k, x.v, x.g, x.beta, x.gate.A_log, dt_bias, None, x.initial_state)
        torch.library.opcheck(torch.ops.openkda.kda.default, (*inputs, None, 2, -5.0, *tail))
        plain = [None if t is None else t.detach() for t in inputs]
        few = [*plain[:5], None, None, None, None]
        o = torch.zeros_like(x.do)
        for tensors, do, ds, kind in ((plain, x.do, None, 2), (few, None, x.dS, 0)):
            torch.library.opcheck(
                torch.ops.openkda.kda_backward.default, (*tensors, None, o, None, do, ds, None, kind, -5.0, *tail)
            )

    @pytest.mark.parametrize("transform", ["vmap", "jvp"])
    def test_transforms_are_refused(transform: str) -> None:
        """Forward mode would have lost its tangent without a word."""
        x = make_inputs(10, T=3, K=16)
        f = lambda q: kda(q, x.k, x.v, x.g, x.beta, gate=x.gate, impl="triton").output  # noqa: E731
        with pytest.raises(NotImplementedError, match=r"impl='triton' cannot run this call: inside.*impl='reference'"):
            torch.vmap(f)(x.q.expand(2, *x.q.shape)) if transform == "vmap" else torch.func.jvp(f, (x.q,), (x.q,))

    def test_repeats() -> None:
        checks.check_repeats("cpu", F32, T=18, K=16)

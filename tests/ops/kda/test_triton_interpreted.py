"""The Triton kernels on a CPU, in Triton's interpreter and float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from interpreter import INTERPRETED, patch_interpreter, run_interpreted

F32 = torch.float32

if INTERPRETED:
    patch_interpreter()
    import hostile_checks as hostile
    import triton
    import triton.language as tl
    import triton_checks as checks

    from openkda.ops.kda.api import kda
    from openkda.ops.norm.api import gated_rms_norm, rms_norm
    from openkda.ops.short_conv.api import short_conv_step, short_convs
    from openkda.ops.triton.api import forget, round_mantissa
    from openkda.testing.cases import kda_cases
    from openkda.testing.inputs import make_inputs

    CASES = [c for c in kda_cases() if max(c.K, c.V) <= 64 and c.T <= 130][::7]
    PACKS = [c for c in kda_cases() if c.lengths is not None and max(c.K, c.V) <= 32]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


if INTERPRETED:

    @triton.jit
    def round_all(x_p, o_p):
        i = tl.arange(0, 8)
        tl.store(o_p + i, round_mantissa(tl.load(x_p + i), "tf32"))

    def test_rounding_keeps_what_is_no_number() -> None:
        """0x7fffffff is the NaN that a GPU makes; adding half a unit to it once gave -0, and a lost model a finite loss."""
        bits = [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, 0x7F800000, -0x800000, 0x3F800FFF, 0x3F801000]
        x = torch.tensor(bits, dtype=torch.int32).view(F32)
        out = torch.empty_like(x)
        round_all[(1,)](x, out)
        assert out.isnan().tolist() == x.isnan().tolist() == 4 * [True] + 4 * [False]
        assert out[4:].tolist() == [float("inf"), -float("inf"), 1.0, 1.0 + 2**-10]

    @triton.jit
    def forget_often(s_p, g_p, times):
        i = tl.arange(0, 16)
        S = tl.load(s_p + i)[:, None]
        for _ in range(times):
            S = forget(S, tl.load(g_p + i))
        tl.store(s_p + i, tl.sum(S, axis=1))

    def test_slow_decays_do_not_drift() -> None:
        """2^g rounded to float32 is up to 3e-8 off, the same way each time: as a factor 6e-5 after 2048 steps."""
        g = torch.tensor([*(-8e-5 * (1 + i / 7) for i in range(12)), -0.3, -0.49, -0.51, -20.0])
        for times, part, limit in ((2048, slice(0, 12), 5e-6), (3, slice(0, 16), 5e-7)):
            s = torch.linspace(1, 2, 16)
            want = s.double() * torch.exp2(g.double() * times)
            forget_often[(1,)](s, g, times)
            assert bool(((s - want).abs() / want)[part].max() <= limit)
        as_factor = torch.exp2(g).double() / torch.exp2(g.double())
        assert bool((as_factor[:12] ** 2048 - 1).abs().max() > 3e-5)

    @pytest.mark.parametrize("case", CASES + PACKS, ids=lambda c: c.id)
    def test_case(case: Any) -> None:
        checks.check_case(case, "cpu", F32)

    @pytest.mark.parametrize(
        "check",
        [
            checks.check_positions, checks.check_step, checks.check_bf16_states, checks.check_strides,
            checks.check_absurd_future, checks.check_splits, checks.check_block, checks.check_commit,
            checks.check_conv_and_norms, checks.check_conv_and_norm_gradients, checks.check_nans, checks.check_block_nans,
            hostile.check_nothing_to_do, hostile.check_pools, hostile.check_absurd_counts,
        ],
        ids=lambda f: f.__name__,
    )  # fmt: skip
    def test_law(check: Any) -> None:
        check("cpu", F32)

    @pytest.mark.parametrize("T", [3, 40])
    def test_pool(T: int) -> None:
        checks.check_pool("cpu", F32, T)

    def test_bitwise_laws() -> None:
        checks.check_laws("cpu", F32, cuts=(1, 16))

    def test_under_torch_compile() -> None:
        """One opaque call, no graph break."""
        x = make_inputs(0, T=20, K=16)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
            return kda(2 * q, k, v, g, beta, gate=x.gate, scale=0.5, impl="triton").output * 3

        with torch.no_grad():
            want = kda(2 * x.q, x.k, x.v, x.g, x.beta, gate=x.gate, scale=0.5, impl="triton").output * 3
            assert torch.equal(f(x.q, x.k, x.v, x.g, x.beta), want)

    def test_convolutions_and_norms_under_torch_compile() -> None:
        """One graph, forward and backward; what the kernels cannot derive is refused by name."""
        gen = torch.Generator().manual_seed(0)
        shapes = ((1, 9, 6), (1, 9, 5), (6, 4), (5, 4), (2, 6, 3), (2, 5, 3), (1, 9, 6), (6,))
        leaves = [torch.randn(s, generator=gen).requires_grad_() for s in shapes]
        cu = torch.tensor([0, 4, 9])

        def f(*t: torch.Tensor) -> list[torch.Tensor]:
            ys, finals = short_convs(
                (2 * t[0], t[1]), t[2:4], initial_states=t[4:6], output_final_state=True, cu_seqlens=cu, impl="triton"
            )
            assert finals is not None
            y = gated_rms_norm(ys[0], t[6], t[7], 1e-5, impl="triton")
            return [y, rms_norm(ys[1], t[7][:5], 1e-5, impl="triton"), *finals]

        def derived(g: Any) -> list[torch.Tensor]:
            found = g(*leaves)
            return [*found, *torch.autograd.grad(sum(y.square().sum() for y in found), leaves)]

        for got, want in zip(derived(torch.compile(f, fullgraph=True, backend="aot_eager")), derived(f), strict=True):
            assert torch.equal(got, want)
        (once,) = torch.autograd.grad(f(*leaves)[0].sum(), leaves[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            once.sum().backward()
        x, state = torch.randn(2, 6, requires_grad=True), torch.zeros(2, 6, 3)
        short_conv_step(x, leaves[2], state)[0].sum().backward()
        assert x.grad is not None
        with pytest.raises(NotImplementedError, match="reference"):
            short_conv_step(x, leaves[2], state, impl="triton")[0].sum().backward()

    def spread(x: torch.Tensor, file: Path) -> torch.Tensor:
        """x [1, T, ..] with its tokens 2^27 + 16 elements apart, in a file that has no pages for what lies between."""
        step, inner = 2**27 + 16, x[0, 0].numel()
        memory = torch.from_file(str(file), shared=True, size=(x.shape[1] - 1) * step + inner, dtype=x.dtype)
        return memory.as_strided(x.shape, (0, step, *x.stride()[2:])).copy_(x)

    def test_tokens_far_apart(tmp_path: Path) -> None:
        """Sixteen of them are more than 32 bits can count."""
        x = make_inputs(0, T=20, K=16, H=1)
        do, w, names = torch.ones_like(x.v), torch.ones(16, 4), ("q", "k", "v", "g")

        def derived(do: torch.Tensor) -> list[torch.Tensor]:
            leaves = [getattr(x, n).detach().requires_grad_() for n in names]
            out = kda(*leaves, x.beta, impl="triton", **x.kwargs()).output
            return [out.detach(), *torch.autograd.grad(out, leaves, do)]

        want, (y,) = derived(do), short_convs((x.v.flatten(2),), (w,), impl="triton")[0]
        for i, name in enumerate(names):
            setattr(x, name, spread(getattr(x, name), tmp_path / str(i)))
        assert x.v.stride(1) > 2**27
        for got, right in zip(derived(spread(do, tmp_path / "do")), want, strict=True):
            assert torch.equal(got, right)
        assert torch.equal(short_convs((x.v.flatten(2),), (w,), impl="triton")[0][0], y)

    def test_refusals() -> None:
        x = make_inputs(0, T=4, K=16)
        wide = make_inputs(0, T=4, K=264)
        with pytest.raises(NotImplementedError, match="head sizes up to 256, received K=264"):
            kda(wide.q.requires_grad_(), wide.k, wide.v, wide.g, wide.beta, gate=wide.gate, impl="triton")
        with torch.no_grad(), pytest.raises(NotImplementedError, match="float64"):
            kda(x.q.double(), x.k.double(), x.v.double(), x.g, x.beta, gate=x.gate, impl="triton")
        with torch.no_grad(), pytest.raises(NotImplementedError, match="bfloat16"):
            kda(x.q.bfloat16(), x.k.bfloat16(), x.v.bfloat16(), x.g, x.beta, gate=x.gate, impl="triton")

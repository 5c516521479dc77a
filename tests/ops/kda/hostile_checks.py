"""More of what went wrong in public KDA and delta-rule kernels, as checks on any device: lengths, gates at their ends, nothing
to do, memory around the inputs, rollbacks. On a GPU `test_hostile_gpu.py` runs them; the portable kernels' interpreter can too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import backward_checks
import torch
from torch import Tensor
from triton_checks import BF16, F16, F32, LIMITS, block_inputs, reference, run

from openkda.ops.kda.api import BoundedGate, SoftplusGate, kda, kda_step
from openkda.ops.kda_block.api import BlockState, kda_block, kda_block_commit
from openkda.ops.norm.api import gated_rms_norm
from openkda.ops.short_conv.api import short_conv
from openkda.testing.compare import check_close
from openkda.testing.inputs import KDAInputs, make_inputs
from openkda.testing.runs import gradients

TOKENS = ("q", "k", "v", "g", "beta")
LENGTHS = (*range(1, 258), *range(511, 515), *range(1023, 1026))


def published(seed: int, device: str, dtype: torch.dtype = BF16, gate: str = "bounded", **sizes: Any) -> KDAInputs:
    """What the fast forward of a Hopper card takes, too. Four heads, as in test_public_failures_gpu.py: the same kernels."""
    x = make_inputs(seed, H=4, K=128, gate=gate, use_qk_l2norm=True, use_beta_sigmoid=True, unit_keys=False, **sizes)
    return x.to(dtype=dtype, device=device)


def part(x: KDAInputs, rows: slice, **changed: Any) -> KDAInputs:
    return replace(x, **{n: getattr(x, n)[:, rows] for n in (*TOKENS, "do")}, **changed)


def check_lengths(device: str, dtype: torch.dtype, impl: str | None, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Every length is a beginning of the longest, from a state and from none: lengths at which everything was NaN, and
    lengths below a chunk, have been found in other kernels."""
    x = published(20, device, dtype, T=max(lengths))
    at = torch.tensor([t - 1 for t in lengths], device=device)
    for state in (x.initial_state, None):
        want = reference(replace(x, initial_state=state), state_positions=at)
        assert want.states_at is not None
        for i, T in enumerate(lengths):
            got = run(part(x, slice(0, T), initial_state=state), impl)  # type: ignore[arg-type]
            check_close(f"output, T = {T}", got.output, want.output[:, :T], LIMITS[dtype][0])
            check_close(f"state, T = {T}", got.final_state, want.states_at[i : i + 1], LIMITS[dtype][1])  # type: ignore[arg-type]


def check_no_decay(device: str, lengths: tuple[int, ...] = (7, 50, 333, 2048)) -> None:
    """A decay of exactly one, of either sign of zero, and of nearly one: the plain delta rule, and no growth with T."""
    for T in lengths:
        for decay in (0.0, -0.0, -1e-9):
            x = make_inputs(21, T=T, K=32, gate=None).to(dtype=F32, device=device)
            x.g.fill_(decay)
            got = run(x)
            wide = x.to(dtype=torch.float64)
            wide.g.zero_()
            with torch.no_grad():
                want = kda(*(getattr(wide, n) for n in TOKENS), **wide.kwargs(), impl="chunkwise")
            limit = 2e-5 + 1e-9 * T
            check_close(f"output, T = {T}", got.output, want.output, limit)
            check_close(f"state, T = {T}", got.final_state, want.final_state, limit)  # type: ignore[arg-type]


def check_forgetting(device: str, dtype: torch.dtype, T: int = 200) -> None:
    """Tokens that forget everything, where chunks and tiles begin and end and at random: finite, as in float64, and from such a
    token on the run is that of a state of zeros, gradients included."""
    x = make_inputs(22, T=T, **backward_checks.SIZES, gate=None).to(dtype=dtype, device=device)
    hard = torch.rand(T, generator=torch.Generator().manual_seed(0)) < 0.05
    hard[torch.tensor([0, 15, 16, 63, T - 1])] = True
    x.g = torch.where(hard.view(1, T, 1, 1).to(device), -1000.0, -0.01).to(dtype).expand(x.g.shape).contiguous()
    got, want = gradients(x, impl="triton"), backward_checks.reference(x)
    assert all(bool(t.isfinite().all()) for t in got.values())
    check_close("output", got["o"], want["o"], LIMITS[dtype][0])
    check_close("state", got["S"], want["S"], 5e-5 if dtype == F32 else LIMITS[dtype][1])
    limits = backward_checks.limits(dtype)
    backward_checks.check_gradients("forgetting", got, want, {n: v for n, v in limits.items() if n != "dg"})
    assert got["dinitial_state"].abs().max() < 1e-15  # the first token forgets it: e^-40 of a bounded number is left
    assert x.initial_state is not None
    anew = run(part(x, slice(63, T), initial_state=torch.zeros_like(x.initial_state)))
    check_close("from a token on", got["o"][:, 63:], anew.output, 2 * LIMITS[dtype][0])


def check_strong_decay(device: str, dtype: torch.dtype, T: int = 129, K: int = 128) -> None:
    """Softplus gates of 1 to 30 a token: a factor exp(-sum) over 16 of them is infinite from 5.545 on."""
    rates = (1.0, 5.6, 8.0, 30.0)
    H = len(rates)
    x = make_inputs(23, T=T, H=H, K=K, gate="softplus", use_qk_l2norm=True, use_beta_sigmoid=True, unit_keys=False)
    x.gate = SoftplusGate(torch.zeros(H), torch.zeros(H, K))
    x.g = torch.tensor([c + math.log(-math.expm1(-c)) for c in rates]).view(1, 1, H, 1).expand(x.g.shape).contiguous()
    x = x.to(dtype=dtype, device=device)
    got, want = gradients(x, impl="triton"), backward_checks.reference(x)
    for i, c in enumerate(rates):
        check_close(f"output, {c}", got["o"][:, :, i], want["o"][:, :, i], LIMITS[dtype][0])
        check_close(f"state, {c}", got["S"][:, i], want["S"][:, i], LIMITS[dtype][1])
    backward_checks.hold("strong decay", x, got, want)


def check_options(device: str, dtype: torch.dtype, impl: str | None) -> None:
    """Numbers that most calls leave as they are: scale, bound, rates of their own for every head; forward and backward."""
    x = published(33, device, dtype, T=150)
    A_log = torch.tensor([-1.0, 0.0, 0.5, 1.5], device=device)
    assert x.gate is not None and x.gate.dt_bias is not None
    for bound, scale in ((-2.5, 0.3), (-0.5, 2.0)):
        x.gate = BoundedGate(bound, A_log, x.gate.dt_bias)
        x.options["scale"] = scale
        got, want = gradients(x, impl=impl), backward_checks.reference(x)
        check_close(f"output, {bound}", got["o"], want["o"], LIMITS[dtype][0])
        check_close(f"state, {bound}", got["S"], want["S"], LIMITS[dtype][1])
        backward_checks.hold(f"bound {bound}, scale {scale}", x, got, want)


def check_saturated_bound(device: str, dtype: torch.dtype, impl: str | None, lengths: Any = (16, 17, 64, 200)) -> None:
    """The bound itself on every token, and on every other one between tokens that forget nothing."""
    for T in lengths:
        for every in (1, 2):
            x = published(24, device, dtype, T=T)
            x.gate = BoundedGate(-5.0, torch.zeros(4, device=device), torch.zeros(4, 128, device=device))
            x.g = torch.full_like(x.g, -60.0)
            x.g[:, ::every] = 60.0
            got, want = run(x, impl), reference(x)  # type: ignore[arg-type]
            check_close(f"output, T = {T}", got.output, want.output, LIMITS[dtype][0])
            check_close(f"state, T = {T}", got.final_state, want.final_state, LIMITS[dtype][1])  # type: ignore[arg-type]


def check_nothing_to_do(device: str, dtype: torch.dtype) -> None:
    """No sequences, no tokens, no members, rows of padding alone: shapes, zeros, states handed through, gradients of zero."""
    x = make_inputs(25, B=2, T=20, **backward_checks.SIZES).to(dtype=dtype, device=device)
    assert x.initial_state is not None
    for B, T in ((0, 20), (0, 0), (2, 0)):
        tokens = [getattr(x, n)[:B, :T].detach().requires_grad_() for n in TOKENS]
        out = kda(*tokens, gate=x.gate, initial_state=x.initial_state[:B], output_final_state=True, impl="triton")
        assert out.output.shape == (B, T, 2, 24) and torch.equal(out.final_state, x.initial_state[:B])  # type: ignore[arg-type]
        if out.output.requires_grad:
            out.output.sum().backward()
            assert all(t.grad is None or not t.grad.any() for t in tokens)
    cu = torch.zeros(3, dtype=torch.int64, device=device)
    with torch.no_grad():
        empty = [getattr(x, n)[:1, :0] for n in TOKENS]
        states = x.initial_state
        out = kda(*empty, gate=x.gate, initial_state=states, output_final_state=True, cu_seqlens=cu, impl="triton")
        assert torch.equal(out.final_state, states)  # type: ignore[arg-type]
        rows = [getattr(x, n)[:, 0] for n in TOKENS]
        pool = x.initial_state.clone()
        for N in (2, 0):
            slots = torch.full((N,), -1, device=device)
            o, _ = kda_step(*(t[:N] for t in rows), pool, gate=x.gate, state_indices=slots, impl="triton")
            assert o.shape == (N, 2, 24) and not o.any() and torch.equal(pool, x.initial_state)
            tokens, weights, state = block_inputs(2, 1, (1, 1, 16, 24), 4, 2, device, dtype)
            before = [t.clone() for t in state.tensors()]
            y = kda_block(
                *(t[:N] for t in tokens), weights=weights, state=state, gate=BoundedGate(), slots=slots, impl="triton"
            )
            assert not y.output.any() and all(torch.equal(a, b) for a, b in zip(state.tensors(), before, strict=True))
        y, S = short_conv(
            torch.zeros(2, 0, 8, device=device),
            torch.zeros(8, 4, device=device),
            output_final_state=True,
            impl="triton",
        )
        assert y.shape == (2, 0, 8) and S is not None and not S.any()
        flat = torch.zeros(0, 16, device=device)
        assert gated_rms_norm(flat, flat, torch.ones(16, device=device), 1e-5, impl="triton").shape == (0, 16)


def check_surroundings(device: str, dtype: torch.dtype, impl: str | None, K: int = 128) -> None:
    """Inputs cut out of larger buffers full of NaN, rows before and behind, heads beside: the same bits."""
    x = make_inputs(26, T=77, H=4, K=K, gate="bounded", use_qk_l2norm=True, use_beta_sigmoid=True, unit_keys=False)
    x = x.to(dtype=dtype, device=device)
    y = replace(x)
    for n in TOKENS:
        t = getattr(x, n)
        big = torch.full((1, 77 + 64, 8, *t.shape[3:]), float("nan"), device=device, dtype=dtype)
        view = big[:, 32 : 32 + 77, 2:6]
        view.copy_(t)
        setattr(y, n, view)
    a, b = run(x, impl), run(y, impl)  # type: ignore[arg-type]
    assert torch.equal(a.output, b.output) and torch.equal(a.final_state, b.final_state)  # type: ignore[arg-type]


def any_layout(t: Tensor) -> Tensor:
    """The same values, without a row or a column that is dense."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else torch.stack([t, t], 1)[:, 0]


def check_layouts(device: str, dtype: torch.dtype, gate: str) -> None:
    """States that lie transposed or are one row expanded over a batch, and saved tensors that hooks hand back laid out anew:
    the same bits, what the forward keeps included."""
    x = published(41, device, dtype, gate, B=2, T=150)
    assert x.initial_state is not None
    x.initial_state[1] = x.initial_state[0]
    for recompute in (True, False):
        x.options["recompute"] = recompute
        want = gradients(x)
        for state in (any_layout(x.initial_state), x.initial_state[:1].expand_as(x.initial_state)):
            y = replace(x, initial_state=state, dS=any_layout(x.dS)).requires_grad_()
            out = kda(*(getattr(y, n) for n in TOKENS), **y.kwargs())
            ends = torch.autograd.grad((out.output, out.final_state), (y.q, y.v), (y.do, y.dS))
            assert torch.equal(out.output, want["o"]) and torch.equal(out.final_state, want["S"])  # type: ignore[arg-type]
            assert torch.equal(ends[0], want["dq"]) and torch.equal(ends[1], want["dv"])
        with torch.autograd.graph.saved_tensors_hooks(any_layout, lambda t: t):
            got = gradients(x)
        for n in want:
            assert torch.equal(got[n], want[n]), n


def check_tiny_gradients(device: str, dtype: torch.dtype) -> None:
    """2^-25 into the final state, nothing into the output: less than float16 has, and not lost."""
    x = make_inputs(27, T=64, **backward_checks.SIZES).to(dtype=dtype, device=device)
    x.do.zero_()
    x.dS.fill_(2.0**-25)
    big = replace(x, dS=torch.ones_like(x.dS))
    got, want = gradients(x, impl="triton"), gradients(big, impl="triton")
    for n in ("dinitial_state", "dA_log", "ddt_bias"):
        check_close(n, got[n] * 2.0**25, want[n], 1e-6)
    for n in ("dk", "dv", "dg", "dbeta"):
        if dtype == F16:  # the result itself has no such number
            assert bool(got[n].isfinite().all())
        else:
            check_close(n, got[n].double() * 2.0**25, want[n], 2e-3 if dtype == BF16 else 1e-6)


def check_rows_of_zeros(device: str, dtype: torch.dtype) -> None:
    """Padding: rows of q and k that are zero, or that l2norm's epsilon is larger than, have bounded gradients."""
    x = make_inputs(28, T=70, **backward_checks.SIZES, use_qk_l2norm=True).to(dtype=dtype, device=device)
    for t in (x.q, x.k):
        t[:, :5] = 0
        t[:, 5:8] *= 1e-4
    got, want = gradients(x, impl="triton"), backward_checks.reference(x)
    assert all(bool(t.isfinite().all()) for t in got.values())
    backward_checks.hold("rows of zeros", x, got, want)


def spoil(device: str, value: float) -> None:
    """What the allocator hands out next is full of `value`."""
    if device == "cuda":
        sizes = (1 << 27, *[1 << 19] * 32, *[1 << 17] * 64, *[1 << 8] * 256)
        dirty = [torch.full((size,), value, device=device) for size in sizes]
        del dirty


def check_dirty_memory(
    device: str, dtype: torch.dtype, x: KDAInputs | None = None, impl: str | None = "triton"
) -> None:
    """Forward and backward on memory that held NaN, or large numbers: the same bits, and the inputs are left alone."""
    if x is None:
        x = make_inputs(29, lengths=(5, 0, 70, 1), **backward_checks.SIZES).to(dtype=dtype, device=device)
    before = {n: t.clone() for n, t in x.tensors().items()}
    want = gradients(x, impl=impl)
    assert all(bool(t.isfinite().all()) for t in want.values())
    for value in (float("nan"), 1e30, float("nan"), 0.0):  # looked at, recorded, repeated
        spoil(device, value)
        got = gradients(x, impl=impl)
        for n in want:
            assert torch.equal(got[n], want[n]), f"{n} read memory that nobody had written ({value})"
    assert all(torch.equal(t, before[n]) for n, t in x.tensors().items())


def check_dirty_memory_of_training(device: str, dtype: torch.dtype, gate: str) -> None:
    """The same of what a model of published heads trains with, whose Hopper kernels have other workspaces: a batch and packs,
    with and without states."""
    for sizes in ({"B": 2, "T": 200}, {"lengths": (5, 0, 333, 64, 1)}, {"T": 64, "initial_state": False}):
        check_dirty_memory(device, dtype, published(32, device, dtype, gate, **sizes), None)  # type: ignore[arg-type]


def check_pools(device: str, dtype: torch.dtype) -> None:
    """Pools in bfloat16 and V-first, in place, in prefill (of a batch and of a pack) and step: the values of float32 states,
    rounded where they lie."""
    slots = torch.tensor([4, -1, 1], device=device)
    rest = [0, 2, 3, 5]
    start = torch.randn(6, 2, 24, 16, generator=torch.Generator().manual_seed(0)).to(device, BF16)
    options: dict[str, Any] = {"state_indices": slots, "state_v_first": True}
    for sizes in ({"B": 3, "T": 40}, {"lengths": (21, 0, 5)}):
        x = make_inputs(30, H=2, K=16, V=24, **sizes).to(dtype=dtype, device=device)  # type: ignore[arg-type]
        narrow, wide = start.clone(), start.double()
        got = run(x, initial_state=narrow, state_dtype=BF16, **options)
        want = reference(x, initial_state=wide, **options)
        check_close("output", got.output, want.output, LIMITS[dtype][0])
        check_close("pool", narrow[[4, 1]], wide[[4, 1]], 4e-3)
        assert torch.equal(narrow[rest], start[rest])
    x = make_inputs(30, B=3, T=1, H=2, K=16, V=24).to(dtype=dtype, device=device)
    y = x.to(dtype=torch.float64)
    narrow, wide = start.clone(), start.double()
    with torch.no_grad():
        o, _ = kda_step(*(getattr(x, n)[:, 0] for n in TOKENS), narrow, gate=x.gate, impl="triton", **options)
        w, _ = kda_step(*(getattr(y, n)[:, 0] for n in TOKENS), wide, gate=y.gate, impl="reference", **options)
    check_close("step", o, w, LIMITS[dtype][0])
    check_close("pool after a step", narrow[[4, 1]], wide[[4, 1]], 4e-3)
    assert not o[1].any() and torch.equal(narrow[rest], start[rest])


def check_many_tokens(device: str, dtype: torch.dtype, lengths: tuple[int, ...] = (2, 17, 64)) -> None:
    """A step of up to 64 tokens, keeping the last state or every one, is the composition of its ops."""
    limit = {F32: 2e-5, BF16: 4e-3, F16: 1e-3}[dtype]
    gate = make_inputs(0, T=1, H=2, HV=4, K=16, gate="bounded").to(dtype=F32, device=device).gate
    assert gate is not None
    for T in lengths:
        tokens, weights, state = block_inputs(3, T, (2, 4, 16, 32), 4, 5, device, dtype)
        slots = torch.tensor([4, -1, 2], device=device)
        pools = [BlockState(*(t.clone() for t in state.tensors())) for _ in range(2)]
        options: dict[str, Any] = {"weights": weights, "gate": gate, "slots": slots}
        with torch.no_grad():
            y, z = (
                kda_block(*tokens, state=p, impl=i, **options)
                for p, i in zip(pools, ("triton", "reference"), strict=True)
            )
            every = kda_block(*tokens, state=state, keep="all", impl="triton", **options)
        check_close(f"output, T = {T}", y.output, z.output, limit)
        for a, b in zip(*(p.tensors() for p in pools), strict=True):
            check_close(f"pool, T = {T}", a, b, limit)
        assert every.states is not None and torch.equal(every.output, y.output)
        for n, slot in ((0, 4), (2, 2)):
            assert torch.equal(every.states[n, T - 1], pools[0].recurrent[slot]), (
                "the last of all states is the last one"
            )


def check_absurd_counts(device: str, dtype: torch.dtype) -> None:
    """Accepted tokens below none and beyond all, as a padded row of a table may hold them, are none and all."""
    T = 3
    tokens, weights, state = block_inputs(6, T, (1, 2, 16, 16), 4, 8, device, dtype)
    slots = torch.tensor([5, 0, 2, 7, 1, -1], device=device)
    gate = BoundedGate()
    with torch.no_grad():
        every = kda_block(*tokens, weights=weights, state=state, gate=gate, slots=slots, keep="all", impl="triton")
        pools = []
        for counts in ([0, T, T + 1, -1, 2**31 - 1, T], [0, T, T, 0, T, 0]):
            pool = BlockState(*(t.clone() for t in state.tensors()))
            accepted = torch.tensor(counts, dtype=torch.int32, device=device)
            pools.append(kda_block_commit(every.states, *tokens[:3], accepted, state=pool, slots=slots))  # type: ignore[arg-type]
    for a, b, old in zip(*(p.tensors() for p in pools), state.tensors(), strict=True):
        assert torch.equal(a, b) and torch.equal(a[[3, 4, 5, 6, 7]], old[[3, 4, 5, 6, 7]])


def check_many_heads(device: str, dtype: torch.dtype, members: int = 700, H: int = 96) -> None:
    """Sequences times heads beyond what one axis of a grid can hold, forward and backward; some members alone."""
    gen = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 4, (members,), generator=gen)
    x = make_inputs(31, lengths=tuple(lengths.tolist()), H=H, K=32, use_qk_l2norm=True).to(dtype=dtype, device=device)
    got = gradients(x, impl="triton")
    ends = lengths.cumsum(0).tolist()
    for n in torch.randint(0, members, (4,), generator=gen).tolist():
        options = {k: v for k, v in x.options.items() if k != "cu_seqlens"}
        rows = slice(ends[n] - int(lengths[n]), ends[n])
        one = part(x, rows, initial_state=x.initial_state[n : n + 1], dS=x.dS[n : n + 1], options=options)  # type: ignore[index]
        want = backward_checks.reference(one)
        check_close(f"output {n}", got["o"][:, rows], want["o"], LIMITS[dtype][0])
        check_close(f"state {n}", got["S"][n : n + 1], want["S"], LIMITS[dtype][1])
        for m in ("dq", "dk", "dv"):
            check_close(f"{m} {n}", got[m][:, rows], want[m], 6e-3)

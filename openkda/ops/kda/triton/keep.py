"""The forward that keeps what its backward needs: prepared chunks, states every 64 tokens, and U (`recompute=False`).

`walks.py` walks the forward's way once more beside its own; here that walk writes the output on its way and leaves the same
states, so that the backward starts with the walk backwards. Of T tokens of HV heads with K = V = 128 it keeps 7.7 n, n = the
bytes of one of their 16-bit tensors, where a call otherwise keeps nothing but its inputs and its output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openkda.ops.kda.triton.backward import SAVE, TL, Kept, Walk, prepare, walk_of
from openkda.ops.kda.triton.launch import CHUNK, Args, aligned, new_states, state_strides
from openkda.ops.kda.triton.replay import replay
from openkda.ops.triton.api import dense, launch, steps_of


@triton.jit(do_not_specialize=["T", "N", "slots", "saves"])
def keep_kernel(
    v_p, o_p, u_p, cu_p, s0_p, s1_p, s_p, u_unit_p, s_unit_p,
    kd_p, qd_p, ke_p, w_p, tm_p, decay_p, unit_p, token_p,
    svb, svt, svh, s0n, s0h, s0k, s0v, s1n, s1h, s1k, s1v,
    T, N, slots, saves, scale,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SAVE: tl.constexpr, PACKED: tl.constexpr, HAS_S0: tl.constexpr, HAS_S1: tl.constexpr, SCALED: tl.constexpr,
    OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, block of BV value channels)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    j = pid % NV
    x = j * BV + tl.arange(0, BV)
    h = (pid // NV % HV).to(tl.int64)
    n = (pid // NV // HV).to(tl.int64)
    S, rows = replay(
        v_p, u_p, cu_p, s0_p, s_p, u_unit_p, s_unit_p, w_p, ke_p, tm_p, decay_p, unit_p, token_p,
        svb, svt, svh, s0n, s0h, s0k, s0v, n, h, j, x, T, slots, saves,
        HV, K, BK, V, BV, C, SAVE, PACKED, HAS_S0, SCALED, OP, PREC, STAGES, o_p, kd_p, qd_p, scale, True,
    )  # fmt: skip
    if HAS_S1:
        c = tl.arange(0, BK)
        p_s1 = s1_p + n * s1n + h * s1h + x[:, None] * s1v + c[None, :] * s1k
        tl.store(p_s1, (S * rows[:, None]).to(s1_p.dtype.element_ty), (x < V)[:, None] & (c < K)[None, :])


def _lengths(a: Args, w: Walk) -> tuple[tuple[int, ...], tuple[int, ...]]:
    B, T, _, HV, _, V = a.sizes
    blocks, chunks = HV * w.tiles, HV * w.slots
    factor, states = blocks * CHUNK * w.BK, chunks * V * w.BK
    small = blocks * 2 * CHUNK * CHUNK, blocks * w.BK, blocks * 3 * CHUNK, blocks * 2 * CHUNK, blocks * w.NU * CHUNK
    return (factor, factor, factor, factor, states, B * T * HV * V), (*small, chunks * w.NU)


def parts(a: Args, wide: Tensor, small: Tensor) -> Kept:
    """Of what `forward` kept of this call."""
    lengths = [[aligned(n) for n in some] for some in _lengths(a, walk_of(a))]
    return Kept(*dense(wide).split_with_sizes(lengths[0]), *dense(small).split_with_sizes(lengths[1]))


def forward(a: Args, workspaces: list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(output, final states or None, and the two tensors of `parts`). workspaces: as in `launch.forward`."""
    B, T, _, HV, K, V = a.sizes
    N, w, device = a.num_sequences, walk_of(a), a.v.device
    op = torch.float32 if a.exact else torch.float16
    wide, small = (
        torch.empty(sum(map(aligned, lengths)), dtype=dtype, device=device)
        for lengths, dtype in zip(_lengths(a, w), (op, torch.float32), strict=True)
    )
    k = parts(a, wide, small)
    through = torch.empty(HV * w.tiles * CHUNK * w.BK, dtype=op, device=device)
    workspaces.append(through)
    o = torch.empty((B, T, HV, V), dtype=a.v.dtype, device=device)
    final = new_states(a, N) if a.want_state else None
    prepare(a, w, k.kd, k.qd, k.ke, k.tm, k.decay, k.token, through, k.y, k.unit)
    launch(
        keep_kernel, w.NU * HV * N,
        (a.v, o, k.u, a.cu, a.state, final, k.s, k.u_unit, k.s_unit,
         k.kd, k.qd, k.ke, through, k.tm, k.decay, k.unit, k.token),
        (*steps_of(a.v), *state_strides(a.state, a.v_first), *state_strides(final, a.v_first)),
        (T, N, w.tiles, w.slots, a.scale),
        (HV, K, w.BK, V, w.BU, CHUNK, SAVE, a.cu is not None, a.state is not None, final is not None, w.scaled,
         TL[op], w.prec, w.stages), w.warps, device,
    )  # fmt: skip
    return o, final, wide, small

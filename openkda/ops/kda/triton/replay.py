"""Backward, third kernel: the forward's walk over chunks once more, for what the gradients need of it.

    D = v^T - S^T kd^T        U = D T^T        S^T <- S^T Diag(decay) + U ke

as in `scan.py`, without outputs; it leaves U, and S at the start of every chunk. In 16 bits both are float16 with a
power of two a chunk and block of value channels: bfloat16, which needs none, showed as up to 2.7e-2 of dv and dq for keys of
nearly one direction, where sums over tokens cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.gate_math import power_of_two, round_mantissa


@triton.jit
def scaled(x, KEEP: tl.constexpr):
    """An operand for float32 x [BV, n], and what multiplies each row of it back: float16 carries a power of two a row."""
    if tl.float16 == KEEP:
        up, down = power_of_two(tl.max(tl.abs(x), axis=1), 14)
        return (x * up[:, None]).to(KEEP), down
    else:
        return x, tl.full([x.shape[0]], 1.0, tl.float32)


@triton.jit
def keep(p, p_unit, x, down, m, TRANSPOSED: tl.constexpr, KEEP: tl.constexpr):
    """Stores x [BV, n], whose rows have the power of two `down`, for products over value channels: in float16 with one power
    of two for all, so that they need no work there."""
    if tl.float16 == KEEP:
        unit = tl.max(down, axis=0)
        tl.store(p_unit, unit)
        x *= 1.0 / unit
    if TRANSPOSED:
        x = tl.trans(x)
    tl.store(p, x.to(KEEP), m)


@triton.jit
def scaled_dot(x, kept, down, w, OP: tl.constexpr, PREC: tl.constexpr):
    """x w for an operand w, where (kept, down) = scaled(x)."""
    if tl.float16 == OP:
        return tl.dot(kept, w) * down[:, None]
    else:
        return tl.dot(x.to(OP), w, input_precision=PREC)


@triton.jit
def small_dot(x, kept, down, w, PREC: tl.constexpr):
    """x w for T or M of a chunk."""
    if tl.float16 == w.dtype:
        return tl.dot(kept, w) * down[:, None]
    else:
        return tl.dot(round_mantissa(x, PREC), round_mantissa(w, PREC), input_precision=PREC)


@triton.jit(do_not_specialize=["T", "N", "slots"])
def replay_kernel(
    v_p, u_p, cu_p, s0_p, s_p, u_unit_p, s_unit_p,
    kd_p, ke_p, tm_p, decay_p,
    svb, svt, svh, s0n, s0h, s0k, s0v,
    T, N, slots,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, HAS_S0: tl.constexpr, KEEP: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, block of BV value channels).

    s [HV, slots, V, BK] and u [B, T, HV, V], each with a power of two [HV, slots, NV] in 16 bits.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    x = (pid % NV) * BV + tl.arange(0, BV)
    h = (pid // NV % HV).to(tl.int64)
    n = (pid // NV // HV).to(tl.int64)
    if PACKED:
        start = tl.load(cu_p + n).to(tl.int64)
        length = (tl.load(cu_p + n + 1).to(tl.int64) - start).to(tl.int32)
        slot = start // C + n
        batch = n * 0
    else:
        start = n * 0
        length = T
        batch = n
        slot = n * tl.cdiv(T, C)
    t = tl.arange(0, C)
    c = tl.arange(0, BK)
    S = tl.zeros([BV, BK], tl.float32)
    if HAS_S0:
        p_s0 = s0_p + n * s0n + h * s0h + x[:, None] * s0v + c[None, :] * s0k
        S = tl.load(p_s0, (x < V)[:, None] & (c < K)[None, :], other=0.0).to(tl.float32)

    block = h * slots + slot
    p_wide = block * (C * BK) + t[:, None] * BK + c[None, :]
    p_square = tm_p + block * (2 * C * C) + t[:, None] * C + t[None, :]
    p_decay = decay_p + block * BK + c
    p_s = s_p + block * (V * BK) + x[:, None] * BK + c[None, :]
    p_s_unit = s_unit_p + block * NV + pid % NV
    p_u_unit = u_unit_p + block * NV + pid % NV
    p_v = v_p + batch * svb + h * svh + (start + t)[:, None] * svt + x[None, :]
    p_u = u_p + ((batch * T + start + t)[:, None] * HV + h) * V + x[None, :]
    for i in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        m_v = (t < length - i * C)[:, None] & (x < V)[None, :]
        kd = tl.load(kd_p + p_wide)
        T1 = tl.load(p_square)
        ke = tl.load(ke_p + p_wide)
        decay = tl.load(p_decay)
        vt = tl.trans(tl.load(p_v, m_v, other=0.0)).to(tl.float32)
        kept, down = scaled(S, KEEP)
        keep(p_s, p_s_unit, S, down, (x < V)[:, None], False, KEEP)
        D = vt - scaled_dot(S, kept, down, tl.trans(kd), OP, PREC)
        kept, down = scaled(D, KEEP)
        U = small_dot(D, kept, down, tl.trans(T1), PREC)
        kept, down = scaled(U, KEEP)
        keep(p_u, p_u_unit, U, down, m_v, True, KEEP)
        S = S * decay[None, :] + scaled_dot(U, kept, down, ke, OP, PREC)
        p_wide += C * BK
        p_square += 2 * C * C
        p_decay += BK
        p_s += V * BK
        p_s_unit += NV
        p_u_unit += NV
        p_v += C * svt
        p_u += C * (HV * V)

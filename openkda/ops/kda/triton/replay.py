"""Backward, second kernel: the forward's walk over chunks once more, for what the gradients need of it.

    D = v^T - S^T kd^T        U = D T^T        S^T <- S^T Diag(decay) + U ke

as in `scan.py`, without outputs; it leaves U, and S at the start of every SAVE-th chunk. Recomputing costs one scan without its
query half; keeping both from the forward would cost three tensors of the size of q per layer until the backward runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.gate_math import power_of_two, round_mantissa


@triton.jit
def scaled_dot(x, w, OP: tl.constexpr, PREC: tl.constexpr):
    """x w for float32 x [BV, n] and an operand w: a float16 x carries a power of two per row."""
    if tl.float16 == OP:
        up, down = power_of_two(tl.max(tl.abs(x), axis=1), 8)
        return tl.dot((x * up[:, None]).to(OP), w) * down[:, None]
    else:
        return tl.dot(x.to(OP), w, input_precision=PREC)


@triton.jit(do_not_specialize=["T", "N", "slots", "saves"])
def replay_kernel(
    v_p, u_p, cu_p, s0_p, s_p,
    kd_p, ke_p, tm_p, decay_p,
    svb, svt, svh, s0n, s0h, s0k, s0v,
    T, N, slots, saves,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SAVE: tl.constexpr, PACKED: tl.constexpr, HAS_S0: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, block of BV value channels). s [HV, saves, V, BK], u [B, T, HV, V]."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    x = (pid % NV) * BV + tl.arange(0, BV)
    h = (pid // NV % HV).to(tl.int64)
    n = (pid // NV // HV).to(tl.int64)
    if PACKED:
        start = tl.load(cu_p + n).to(tl.int64)
        length = (tl.load(cu_p + n + 1).to(tl.int64) - start).to(tl.int32)
        slot = start // C + n
        save = start // (C * SAVE) + n
        batch = n * 0
    else:
        start = n * 0
        length = T
        batch = n
        slot = n * tl.cdiv(T, C)
        save = n * tl.cdiv(T, C * SAVE)
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
    p_s = s_p + (h * saves + save) * (V * BK) + x[:, None] * BK + c[None, :]
    p_v = v_p + batch * svb + h * svh + (start + t)[:, None] * svt + x[None, :]
    p_u = u_p + ((batch * T + start + t)[:, None] * HV + h) * V + x[None, :]
    for i in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        m_v = (t < length - i * C)[:, None] & (x < V)[None, :]
        kd = tl.load(kd_p + p_wide)
        T1 = tl.load(p_square)
        ke = tl.load(ke_p + p_wide)
        decay = tl.load(p_decay)
        vt = tl.trans(tl.load(p_v, m_v, other=0.0)).to(tl.float32)
        if i % SAVE == 0:
            tl.store(p_s + (i // SAVE) * (V * BK), S.to(s_p.dtype.element_ty), (x < V)[:, None])
        D = vt - scaled_dot(S, tl.trans(kd), OP, PREC)
        U = tl.dot(round_mantissa(D, PREC), tl.trans(T1), input_precision=PREC)
        tl.store(p_u, tl.trans(U).to(u_p.dtype.element_ty), m_v)
        S = S * decay[None, :] + scaled_dot(U, ke, OP, PREC)
        p_wide += C * BK
        p_square += 2 * C * C
        p_decay += BK
        p_v += C * svt
        p_u += C * (HV * V)

"""Second kernel of the chunkwise forward: the serial walk over chunks that carries the state.

A program owns BV value channels of one head of one sequence and holds their state S^T [BV, BK] in float32 registers, so that
every product has the state side on its left, straight from registers:

    D = v^T - S^T kd^T        U = D T^T        o^T = S^T qd^T + U M^T        S^T <- S^T Diag(decay) + U ke

float16 operands carry a power of two per value channel: for S from the state itself, for U from the chunk (the state after
the chunk may know it; an output may not, so D and U meet T and M in tf32, which has float32's range).
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import power_of_two, round_mantissa

D_LIMIT = tl.constexpr(1e36)


@triton.jit(do_not_specialize=["svr", "sor", "T", "N", "slots"])
def scan_kernel(
    v_p, o_p, cu_p, s0_p, s1_p, index0_p, index1_p, kept_p, leader_p,
    kd_p, qd_p, ke_p, tm_p, decay_p, token_p,
    svr, svt, svh, sor, sot, soh, s0n, s0h, s0k, s0v, s1n, s1h, s1k, s1v,
    T, N, slots, scale,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, HAS_S0: tl.constexpr, HAS_S1: tl.constexpr, INDEXED_0: tl.constexpr, INDEXED_1: tl.constexpr,
    KEEP: tl.constexpr,
    SCALED: tl.constexpr, OP: tl.constexpr, SMALL: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, block of BV value channels)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    v0 = (pid % NV) * BV
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
    x = v0 + tl.arange(0, BV)
    m_s = (x < V)[:, None] & (c < K)[None, :]
    source = n
    target = n
    if INDEXED_0:
        source = tl.load(index0_p + n).to(tl.int64)
    if INDEXED_1:
        target = tl.load(index1_p + n).to(tl.int64)
    S = tl.zeros([BV, BK], tl.float32)
    if HAS_S0:
        p_s0 = s0_p + source * s0n + h * s0h + x[:, None] * s0v + c[None, :] * s0k
        S = tl.load(p_s0, m_s & (source >= 0), other=0.0).to(tl.float32)

    block = h * slots + slot
    p_wide = block * (C * BK) + t[:, None] * BK + c[None, :]
    p_square = tm_p + block * (2 * C * C) + t[:, None] * C + t[None, :]
    p_decay = decay_p + block * BK + c
    p_token = token_p + block * (3 * C) + t
    p_v = v_p + h * svh + (batch * svr + start + t)[:, None] * svt + x[None, :]
    p_o = o_p + h * soh + (batch * sor + start + t)[:, None] * sot + x[None, :]
    for i in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        if KEEP:
            leader = tl.load(leader_p + slot + i)
            if leader >= 0:
                p_kept = kept_p + (leader.to(tl.int64) * HV + h) * (K * V) + c[None, :] * V + x[:, None]
                tl.store(p_kept, S, m_s)
        kd = tl.load(kd_p + p_wide)
        qd = tl.load(qd_p + p_wide)
        T1 = tl.load(p_square)
        M1 = tl.load(p_square + C * C)
        ke = tl.load(ke_p + p_wide)
        decay = tl.load(p_decay)
        m_v = (t < length - i * C)[:, None] & (x < V)[None, :]
        vt = tl.trans(tl.load(p_v, m_v, other=0.0)).to(tl.float32)
        if tl.float16 == OP:
            s_max = tl.max(tl.abs(S), axis=1)
            s_up, s_down = power_of_two(s_max, 8)
            a = (S * s_up[:, None]).to(OP)
            D = tl.dot(a, tl.trans(kd)) * s_down[:, None]
            O = tl.dot(a, tl.trans(qd)) * s_down[:, None]
        else:
            a = S.to(OP)
            D = tl.dot(a, tl.trans(kd), input_precision=PREC)
            O = tl.dot(a, tl.trans(qd), input_precision=PREC)
        if SCALED:
            vt *= tl.load(p_token)[None, :]
        D = tl.clamp(vt - D, -D_LIMIT, D_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        U = tl.dot(round_mantissa(D, SMALL), tl.trans(T1), input_precision=SMALL)
        if SCALED:
            U *= tl.load(p_token + C)[None, :]
            U = tl.clamp(U, -D_LIMIT, D_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        O += tl.dot(round_mantissa(U, SMALL), tl.trans(M1), input_precision=SMALL)
        if tl.float16 == OP:
            # the state shares the accumulator, so a U far below it must not be scaled past float32's range
            u_up, u_down = power_of_two(tl.maximum(tl.max(tl.abs(U), axis=1), s_max * 1e-4), 8)
            S = tl.dot((U * u_up[:, None]).to(OP), ke, S * decay[None, :] * u_up[:, None]) * u_down[:, None]
        else:
            S = tl.dot(U.to(OP), ke, S * decay[None, :], input_precision=PREC)
        O *= scale
        if SCALED:
            O *= tl.load(p_token + 2 * C)[None, :]
        tl.store(p_o, tl.trans(O).to(o_p.dtype.element_ty), m_v)
        p_wide += C * BK
        p_square += 2 * C * C
        p_decay += BK
        p_token += 3 * C
        p_v += C * svt
        p_o += C * sot
    if HAS_S1:
        p_s1 = s1_p + target * s1n + h * s1h + x[:, None] * s1v + c[None, :] * s1k
        tl.store(p_s1, S.to(s1_p.dtype.element_ty), m_s & (target >= 0))

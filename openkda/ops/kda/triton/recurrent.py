"""Token by token: decoding steps, short sequences, and the way from a chunk's start to a chosen token.

A program holds BV value channels of one head's state, [BK, BV] in float32 registers, and walks its tokens. The read for the
output is taken before the write: S_new^T q = S^T q + (k . q) u, so that both reductions over K happen at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import decay_rate, delta_step, log2_decay, sigmoid, unit_length

DENSE = tl.constexpr(0)  # row n: all T tokens of batch n
PACKED = tl.constexpr(1)  # row n: tokens cu[n] .. cu[n + 1] of batch 0
LISTED = tl.constexpr(2)  # row n: length[n] tokens from flat token start[n]


@triton.jit(do_not_specialize=["T", "sqr", "skr", "svr", "sgr", "sor", "sbb", "sbt", "sbh"])
def recurrent_kernel(
    q_p, k_p, v_p, g_p, beta_p, A_log_p, dt_bias_p, o_p, rows_p, length_p, s0_p, s1_p, source_p, target_p,
    sqr, sqt, sqh, skr, skt, skh, svr, svt, svh, sgr, sgt, sgh, sbb, sbt, sbh, sor, sot, soh,
    s0n, s0h, s0k, s0v, s1n, s1h, s1k, s1v,
    T, bound, eps, scale,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_DT: tl.constexpr,
    L2NORM: tl.constexpr, SIGMOID: tl.constexpr, HAS_S0: tl.constexpr, HAS_S1: tl.constexpr,
    INDEXED: tl.constexpr, HAS_O: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """One program a (row, value head, block of BV value channels).

    With INDEXED, source_p and target_p hold the state slots read and written; -1: zeros, nothing. With SKIP a row
    without a slot also computes nothing, and its output is zero.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    v0 = (pid % NV) * BV
    head = pid // NV % HV
    row = pid // NV // HV
    h = head.to(tl.int64)
    hq = (head // GROUP).to(tl.int64)
    n = row.to(tl.int64)
    if ROWS == PACKED:
        start = tl.load(rows_p + n).to(tl.int64)
        length = (tl.load(rows_p + n + 1).to(tl.int64) - start).to(tl.int32)
        batch = n * 0
    elif ROWS == LISTED:
        flat = tl.load(rows_p + n).to(tl.int64)
        length = tl.load(length_p + n).to(tl.int32)
        batch = flat // T
        start = flat % T
    else:
        start = n * 0
        length = T
        batch = n
    source = n
    target = n
    if INDEXED:
        source = tl.load(source_p + n).to(tl.int64)
        target = tl.load(target_p + n).to(tl.int64)
    c = tl.arange(0, BK)
    x = v0 + tl.arange(0, BV)
    m_k = c < K
    m_v = x < V
    m_s = m_k[:, None] & m_v[None, :]
    p_o = o_p + (batch * sor + start) * sot + h * soh + x
    if SKIP:  # noqa: SIM102 (SKIP is known when compiling, the slot is not)
        if source < 0:
            for _ in range(length):
                tl.store(p_o, tl.zeros([BV], o_p.dtype.element_ty), m_v)
                p_o += sot
            return
    S = tl.zeros([BK, BV], tl.float32)
    if HAS_S0:
        p_s0 = s0_p + source * s0n + h * s0h + c[:, None] * s0k + x[None, :] * s0v
        S = tl.load(p_s0, m_s & (source >= 0), other=0.0).to(tl.float32)
    dt = tl.zeros([BK], tl.float32)
    if HAS_DT:
        dt = tl.load(dt_bias_p + h * K + c, m_k, other=0.0)
    rate = 1.0
    if HAS_A:
        rate = decay_rate(tl.load(A_log_p + h))
    p_q = q_p + (batch * sqr + start) * sqt + hq * sqh + c
    p_k = k_p + (batch * skr + start) * skt + hq * skh + c
    p_v = v_p + (batch * svr + start) * svt + h * svh + x
    p_g = g_p + (batch * sgr + start) * sgt + h * sgh + c
    p_b = beta_p + batch * sbb + start * sbt + h * sbh
    for _ in range(length):
        k = tl.load(p_k, m_k, other=0.0).to(tl.float32)
        q = tl.load(p_q, m_k, other=0.0).to(tl.float32)
        v = tl.load(p_v, m_v, other=0.0).to(tl.float32)
        z = tl.load(p_g, m_k, other=0.0).to(tl.float32) + dt
        beta = tl.load(p_b).to(tl.float32)
        if SIGMOID:
            beta = sigmoid(beta)
        if L2NORM:
            q = unit_length(q, eps)
            k = unit_length(k, eps)
        S, o = delta_step(S, q, k, v, log2_decay(z, rate, bound, GATE), beta)
        if HAS_O:
            tl.store(p_o, (o * scale).to(o_p.dtype.element_ty), m_v)
        p_q += sqt
        p_k += skt
        p_v += svt
        p_g += sgt
        p_b += sbt
        p_o += sot
    if HAS_S1:
        p_s1 = s1_p + target * s1n + h * s1h + c[:, None] * s1k + x[None, :] * s1v
        tl.store(p_s1, S.to(s1_p.dtype.element_ty), m_s & (target >= 0))

"""Backward, first kernel: the serial walk from the last chunk to the first that carries the state's gradient.

With T, M, kd, qd, ke and decay of `prepare.py`, one chunk of the forward is, from the entering state S,

    D = v - kd S        U = T D        o = scale (qd S + M U)        S' = Diag(decay) S + ke^T U

and its reverse, from the gradient dS' of the leaving state and do of the output,

    dU = scale M^T do + ke dS'      dD = T^T dU      dS = Diag(decay) dS' + scale qd^T do - kd^T dD

dD is the gradient of v. A program owns BV value channels of one head of one sequence, holds dS^T [BV, BK] in float32
registers, and leaves dS' of every chunk (for the gradients that `gradients.py` builds chunk by chunk) and dD.

Operands are float16 or bfloat16; float16 ones carry a power of two per value channel, since nothing bounds a gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.gate_math import power_of_two


@triton.jit
def _operand(x, OP: tl.constexpr):
    """x [BV, n] as (operand, factor [BV] that undoes its scale)."""
    if OP == tl.float16:
        up, down = power_of_two(tl.max(tl.abs(x), axis=1), 8)
        return (x * up[:, None]).to(OP), down
    else:
        return x.to(OP), tl.full([x.shape[0]], 1.0, tl.float32)


@triton.jit
def _dot_terms(x, w1, w2, SMALL_OP: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr):
    """x w for float32 x and w = w1 + w2 given as terms: relative error 2^-16 from two bfloat16 terms."""
    x1 = x.to(SMALL_OP)
    out = tl.dot(x1, w1, input_precision=PREC)
    if TERMS == 2:
        out = tl.dot((x - x1.to(tl.float32)).to(SMALL_OP), w1, out, input_precision=PREC)
        out = tl.dot(x1, w2, out, input_precision=PREC)
    return out


@triton.jit
def reverse_scan_kernel(
    do_p, dd_p, cu_p, ds1_p, ds0_p, ds_p,
    kd_p, qd_p, ke_p, tm_p, decay_p,
    sob, sot, soh, sdb, sdt, sdh, s1n, s1h, s1k, s1v,
    T, N, slots, scale,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, HAS_DS1: tl.constexpr, HAS_DS0: tl.constexpr, HAS_DO: tl.constexpr,
    OP: tl.constexpr, SMALL_OP: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, block of BV value channels). ds [HV, slots, V, BK], ds0 [N, HV, K, V]."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    x = (pid % NV) * BV + tl.arange(0, BV)
    h = pid // NV % HV
    n = pid // NV // HV
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
    m_s = (x < V)[:, None] & (c < K)[None, :]
    dS = tl.zeros([BV, BK], tl.float32)
    if HAS_DS1:
        dS = tl.load(ds1_p + n * s1n + h * s1h + x[:, None] * s1v + c[None, :] * s1k, m_s, other=0.0).to(tl.float32)

    chunks = tl.cdiv(length, C)
    block = h * slots + slot + chunks - 1
    p_wide = block * (C * BK) + t[:, None] * BK + c[None, :]
    p_square = tm_p + block * (2 * TERMS * C * C) + t[:, None] * C + t[None, :]
    p_decay = decay_p + block * BK + c
    p_ds = ds_p + block * (V * BK) + x[:, None] * BK + c[None, :]
    row = start + (chunks - 1) * C + t
    p_do = do_p + batch * sob + h * soh + row[:, None] * sot + x[None, :]
    p_dd = dd_p + batch * sdb + h * sdh + row[:, None] * sdt + x[None, :]
    for i in tl.range(0, chunks, num_stages=STAGES):
        m_v = (t < length - (chunks - 1 - i) * C)[:, None] & (x < V)[None, :]
        kd = tl.load(kd_p + p_wide)
        qd = tl.load(qd_p + p_wide)
        ke = tl.load(ke_p + p_wide)
        T1 = tl.load(p_square)
        M1 = tl.load(p_square + TERMS * C * C)
        decay = tl.load(p_decay)
        T2 = T1
        M2 = M1
        if TERMS == 2:
            T2 = tl.load(p_square + C * C)
            M2 = tl.load(p_square + 3 * C * C)
        tl.store(p_ds, dS.to(ds_p.dtype.element_ty), (x < V)[:, None])
        a, a_down = _operand(dS, OP)
        dU = tl.dot(a, tl.trans(ke), input_precision=PREC) * a_down[:, None]
        dS *= decay[None, :]
        if HAS_DO:
            dot = tl.trans(tl.load(p_do, m_v, other=0.0)).to(tl.float32) * scale
            dU += _dot_terms(dot, M1, M2, SMALL_OP, TERMS, PREC)
            b, b_down = _operand(dot, OP)
            dS += tl.dot(b, qd, input_precision=PREC) * b_down[:, None]
        dD = _dot_terms(dU, T1, T2, SMALL_OP, TERMS, PREC)
        d, d_down = _operand(dD, OP)
        dS -= tl.dot(d, kd, input_precision=PREC) * d_down[:, None]
        tl.store(p_dd, tl.trans(dD).to(dd_p.dtype.element_ty), m_v)
        p_wide -= C * BK
        p_square -= 2 * TERMS * C * C
        p_decay -= BK
        p_ds -= V * BK
        p_do -= C * sot
        p_dd -= C * sdt
    if HAS_DS0:
        tl.store(ds0_p + (n * HV + h) * (K * V) + c[None, :] * V + x[:, None], dS, m_s)

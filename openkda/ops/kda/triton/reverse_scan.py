"""Backward, third kernel: the serial walk from the last chunk to the first that carries the state's gradient.

With T, M, kd, qd, ke and decay of `prepare.py`, one chunk of the forward is, from the entering state S,

    D = v - kd S        U = T D        o = scale (qd S + M U)        S' = Diag(decay) S + ke^T U

and its reverse, from the gradient dS' of the leaving state and do of the output,

    dU = scale M^T do + ke dS'      dD = T^T dU      dS = Diag(decay) dS' + scale qd^T do - kd^T dD

dD is the gradient of v. A program owns BV value channels of one head of one sequence, holds dS^T [BV, BK] in float32
registers, and leaves dD, and dS' of every SAVE chunks (for `products.py`).

float16 operands carry a power of two per value channel, since nothing bounds a gradient; T and M, which are small, are met in
tf32, which has float32's range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.gate_math import round_mantissa
from openkda.ops.kda.triton.replay import scaled_dot


@triton.jit(do_not_specialize=["T", "N", "slots", "saves"])
def reverse_scan_kernel(
    do_p, dd_p, cu_p, ds1_p, ds0_p, ds_p,
    kd_p, qd_p, ke_p, tm_p, decay_p,
    sob, sot, soh, sdb, sdt, sdh, s1n, s1h, s1k, s1v,
    T, N, slots, saves, scale,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SAVE: tl.constexpr, PACKED: tl.constexpr, HAS_DS1: tl.constexpr, HAS_DS0: tl.constexpr, HAS_DO: tl.constexpr,
    OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, block of BV value channels). ds [HV, saves, V, BK], ds0 [N, HV, K, V]."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    x = (pid % NV) * BV + tl.arange(0, BV)
    h = pid // NV % HV
    n = pid // NV // HV
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
    m_s = (x < V)[:, None] & (c < K)[None, :]
    dS = tl.zeros([BV, BK], tl.float32)
    if HAS_DS1:
        dS = tl.load(ds1_p + n * s1n + h * s1h + x[:, None] * s1v + c[None, :] * s1k, m_s, other=0.0).to(tl.float32)

    chunks = tl.cdiv(length, C)
    block = h * slots + slot + chunks - 1
    p_wide = block * (C * BK) + t[:, None] * BK + c[None, :]
    p_square = tm_p + block * (2 * C * C) + t[:, None] * C + t[None, :]
    p_decay = decay_p + block * BK + c
    p_ds = ds_p + (h * saves + save) * (V * BK) + x[:, None] * BK + c[None, :]
    row = start + (chunks - 1) * C + t
    if HAS_DO:
        p_do = do_p + batch * sob + h * soh + row[:, None] * sot + x[None, :]
    p_dd = dd_p + batch * sdb + h * sdh + row[:, None] * sdt + x[None, :]
    for i in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - i
        leaves = (chunk % SAVE == SAVE - 1) | (i == 0)
        m_v = (t < length - chunk * C)[:, None] & (x < V)[None, :]
        kd = tl.load(kd_p + p_wide)
        qd = tl.load(qd_p + p_wide)
        ke = tl.load(ke_p + p_wide)
        T1 = tl.load(p_square)
        M1 = tl.load(p_square + C * C)
        decay = tl.load(p_decay)
        if leaves:
            tl.store(p_ds + (chunk // SAVE) * (V * BK), dS.to(ds_p.dtype.element_ty), (x < V)[:, None])
        dU = scaled_dot(dS, tl.trans(ke), OP, PREC)
        dS *= decay[None, :]
        if HAS_DO:
            dot = tl.trans(tl.load(p_do, m_v, other=0.0)).to(tl.float32) * scale
            dU = tl.dot(round_mantissa(dot, PREC), M1, dU, input_precision=PREC)
            dS += scaled_dot(dot, qd, OP, PREC)
        dD = tl.dot(round_mantissa(dU, PREC), T1, input_precision=PREC)
        dS -= scaled_dot(dD, kd, OP, PREC)
        tl.store(p_dd, tl.trans(dD).to(dd_p.dtype.element_ty), m_v)
        p_wide -= C * BK
        p_square -= 2 * C * C
        p_decay -= BK
        if HAS_DO:
            p_do -= C * sot
        p_dd -= C * sdt
    if HAS_DS0:
        tl.store(ds0_p + (n * HV + h) * (K * V) + c[None, :] * V + x[:, None], dS, m_s)

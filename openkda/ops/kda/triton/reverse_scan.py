"""Backward, fourth kernel: the serial walk from the last chunk to the first that carries the state's gradient.

With T, M, kd, qd, ke and decay of `prepare.py`, one chunk of the forward is, from the entering state S,

    D = v - kd S        U = T D        o = scale (qd S + M U)        S' = Diag(decay) S + ke^T U

and its reverse, from the gradient dS' of the leaving state and do of the output,

    dU = scale M^T do + ke dS'      dD = T^T dU      dS = Diag(decay) dS' + scale qd^T do - kd^T dD

dD is the gradient of v. A program owns BV value channels of one head of one sequence, holds dS^T [BV, BK] in float32
registers, and leaves dD, and dS' of every chunk (for `gradients.py`).

float16 operands carry a power of two per value channel, since nothing bounds a gradient; dD and dS' are kept as those
operands, beside dD in v's dtype. T and M, which are small, are met in tf32, which has float32's range.

With CHAIN a sequence consists of several members of the pack, cut where a state was asked for (`positions.py`): the
gradient of every member's last state is added on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.replay import keep, scaled, scaled_dot, small_dot


@triton.jit
def _walk(
    dS, n, h, j, x,
    do_p, dv_p, dd_p, to_p, cu_p, ds1_p, ds_p, dd_unit_p, to_unit_p, ds_unit_p, kd_p, qd_p, ke_p, tm_p, decay_p,
    sob, sot, soh, sdb, sdt, sdh, s1n, s1h, s1k, s1v, T, slots, scale,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, NV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, HAS_DS1: tl.constexpr, HAS_DO: tl.constexpr,
    KEEP: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dS^T [BV, BK] of the state after sequence n -> that of the state before it."""
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
    if HAS_DS1:
        m_s = (x < V)[:, None] & (c < K)[None, :]
        dS += tl.load(ds1_p + n * s1n + h * s1h + x[:, None] * s1v + c[None, :] * s1k, m_s, other=0.0).to(tl.float32)

    chunks = tl.cdiv(length, C)
    block = h * slots + slot + chunks - 1
    p_wide = block * (C * BK) + t[:, None] * BK + c[None, :]
    p_square = tm_p + block * (2 * C * C) + t[:, None] * C + t[None, :]
    p_decay = decay_p + block * BK + c
    p_ds = ds_p + block * (V * BK) + x[:, None] * BK + c[None, :]
    p_ds_unit = ds_unit_p + block * NV + j
    p_dd_unit = dd_unit_p + block * NV + j
    p_to_unit = to_unit_p + block * NV + j
    row = start + (chunks - 1) * C + t
    if HAS_DO:
        p_do = do_p + batch * sob + h * soh + row[:, None] * sot + x[None, :]
    at = batch * sdb + h * sdh + row[:, None] * sdt + x[None, :]
    p_dv = dv_p + at
    p_dd = dd_p + at
    p_to = to_p + at
    for i in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - i
        m_v = (t < length - chunk * C)[:, None] & (x < V)[None, :]
        kd = tl.load(kd_p + p_wide)
        qd = tl.load(qd_p + p_wide)
        ke = tl.load(ke_p + p_wide)
        T1 = tl.load(p_square)
        M1 = tl.load(p_square + C * C)
        decay = tl.load(p_decay)
        kept, down = scaled(dS, KEEP)
        keep(p_ds, p_ds_unit, dS, down, (x < V)[:, None], False, KEEP)
        dU = scaled_dot(dS, kept, down, tl.trans(ke), OP, PREC)
        dS *= decay[None, :]
        if HAS_DO:
            dot = tl.trans(tl.load(p_do, m_v, other=0.0)).to(tl.float32) * scale
            kept, down = scaled(dot, KEEP)
            keep(p_to, p_to_unit, dot, down, m_v, True, KEEP)
            dU += small_dot(dot, kept, down, M1, PREC)
            dS += scaled_dot(dot, kept, down, qd, OP, PREC)
        kept, down = scaled(dU, KEEP)
        dD = small_dot(dU, kept, down, T1, PREC)
        kept, down = scaled(dD, KEEP)
        dS -= scaled_dot(dD, kept, down, kd, OP, PREC)
        tl.store(p_dv, tl.trans(dD).to(dv_p.dtype.element_ty), m_v)
        if tl.float16 == KEEP:
            keep(p_dd, p_dd_unit, dD, down, m_v, True, KEEP)
        p_wide -= C * BK
        p_square -= 2 * C * C
        p_decay -= BK
        if HAS_DO:
            p_do -= C * sot
        p_dv -= C * sdt
        p_dd -= C * sdt
        p_to -= C * sdt
        p_dd_unit -= NV
        p_to_unit -= NV
        p_ds -= V * BK
        p_ds_unit -= NV
    return dS


@triton.jit(do_not_specialize=["T", "N", "slots"])
def reverse_scan_kernel(
    do_p, dv_p, dd_p, to_p, cu_p, chain_p, ds1_p, ds0_p, ds_p, dd_unit_p, to_unit_p, ds_unit_p,
    kd_p, qd_p, ke_p, tm_p, decay_p,
    sob, sot, soh, sdb, sdt, sdh, s1n, s1h, s1k, s1v,
    T, N, slots, scale,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, CHAIN: tl.constexpr, HAS_DS1: tl.constexpr, HAS_DS0: tl.constexpr,
    HAS_DO: tl.constexpr, KEEP: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, block of BV value channels).

    dv and dd [B, T, HV, V], ds [HV, slots, V, BK], each of dd and ds with units [HV, slots, V] in 16 bits, where
    dd is not dv; ds0 [N, HV, K, V]. With CHAIN sequence n is the members chain[n] .. chain[n + 1] - 1 of the pack.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    x = (pid % NV) * BV + tl.arange(0, BV)
    h = pid // NV % HV
    n = pid // NV // HV
    dS = tl.zeros([BV, BK], tl.float32)
    if CHAIN:
        first = tl.load(chain_p + n)
        members = (tl.load(chain_p + n + 1) - first).to(tl.int32)
        for back in tl.range(0, members):
            dS = _walk(
                dS, first + members - 1 - back, h, pid % NV, x,
                do_p, dv_p, dd_p, to_p, cu_p, ds1_p, ds_p, dd_unit_p, to_unit_p, ds_unit_p, kd_p, qd_p, ke_p, tm_p, decay_p,
                sob, sot, soh, sdb, sdt, sdh, s1n, s1h, s1k, s1v, T, slots, scale,
                K, BK, V, NV, C, PACKED, HAS_DS1, HAS_DO, KEEP, OP, PREC, STAGES,
            )  # fmt: skip
    else:
        dS = _walk(
            dS, n, h, pid % NV, x,
            do_p, dv_p, dd_p, to_p, cu_p, ds1_p, ds_p, dd_unit_p, to_unit_p, ds_unit_p, kd_p, qd_p, ke_p, tm_p, decay_p,
            sob, sot, soh, sdb, sdt, sdh, s1n, s1h, s1k, s1v, T, slots, scale,
            K, BK, V, NV, C, PACKED, HAS_DS1, HAS_DO, KEEP, OP, PREC, STAGES,
        )  # fmt: skip
    if HAS_DS0:
        c = tl.arange(0, BK)
        m_s = (x < V)[:, None] & (c < K)[None, :]
        tl.store(ds0_p + (n * HV + h) * (K * V) + c[None, :] * V + x[:, None], dS, m_s)

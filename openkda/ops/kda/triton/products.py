"""Backward, fourth kernel: the products over value channels that the gradients of one chunk need.

From the entering state S, the gradient dS' of the leaving one, U and dD of the two scans, and do:

    dM = scale tril(do U^T)     dA = -stril(dD U^T)           gradients of the scores M and A of `prepare.py`
    d(qd) = scale do S^T        d(kd) = -dD S^T               what the entering state says
    d(ke) = U dS'^T             both = sum_v S dS'            what the leaving state says
    dbeta = dD . U / beta^2

The last: with E = v - (what the state predicts), U = beta E, and with Y the gradient that reaches beta E, dD = beta Y; so
dbeta = E . Y.

The backward of the l2norm needs q . dq and k . dk over all channels. Both are known here, before either gradient: o is
linear in q, so q . dq = do . o; and k, which is compared with the state and written to it, has k . dk =
dD . (2 U / beta - v). So `gradients.py` can give every slice of channels to a program of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.gate_math import find_sequence, sigmoid
from openkda.ops.kda.triton.prepare import BETA_FLOOR


@triton.jit(do_not_specialize=["B", "T", "N", "slots", "sbb", "sbt", "sbh"])
def products_kernel(
    v_p, beta_p, cu_p, o_p, do_p, u_p, dd_p, s_p, ds_p,
    d_p, wide_p, both_p, dbeta_p, rows_p,
    svb, svt, svh, sbb, sbt, sbh, sob, sot, soh,
    B, T, N, slots, scale,
    HV: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, HAS_DO: tl.constexpr,
    OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One program a chunk and value head.

    v and do are strided; o, u, dd [B, T, HV, V] and dbeta [B, T, HV] contiguous; s, ds [HV, slots, V, BK].
    Writes d [HV, slots, 2, C, C] = dM, dA; wide [HV, slots, 3, C, BK]; both [HV, slots, BK]; rows [2, B, T, HV] = q . dq
    and k . dk (with L2NORM).
    """
    pid = tl.program_id(0).to(tl.int64)
    h = pid % HV
    slot = pid // HV
    if PACKED:
        n = find_sequence(slot, cu_p, N, C)
        start = tl.load(cu_p + n).to(tl.int64)
        first = (slot - (start // C + n)) * C
        length = tl.load(cu_p + n + 1).to(tl.int64) - start
        batch = n * 0
    else:
        per = tl.cdiv(T, C)
        batch = slot // per
        first = (slot % per) * C
        length = T.to(tl.int64)
        start = batch * 0
    if first >= length:
        return
    t = tl.arange(0, C)
    c = tl.arange(0, BK)
    real = t < length - first
    rows = start + first + t
    at = (batch * T + rows) * HV + h
    block = h * slots + slot
    if HAS_DO:
        p_do = do_p + batch * sob + h * soh + rows[:, None] * sot
    dM = tl.zeros([C, C], tl.float32)
    dA = tl.zeros([C, C], tl.float32)
    dqd = tl.zeros([C, BK], tl.float32)
    dkd = tl.zeros([C, BK], tl.float32)
    dke = tl.zeros([C, BK], tl.float32)
    both = tl.zeros([BK], tl.float32)
    ddu = tl.zeros([C], tl.float32)
    ddv = tl.zeros([C], tl.float32)
    doo = tl.zeros([C], tl.float32)
    p_v = v_p + batch * svb + h * svh + rows[:, None] * svt
    for v0 in tl.range(0, V, BV):
        x = v0 + tl.arange(0, BV)
        m = real[:, None] & (x < V)[None, :]
        u = tl.load(u_p + at[:, None] * V + x[None, :], m, other=0.0).to(OP)
        dd = tl.load(dd_p + at[:, None] * V + x[None, :], m, other=0.0).to(OP)
        p_s = block * (V * BK) + x[:, None] * BK + c[None, :]
        S = tl.load(s_p + p_s, (x < V)[:, None], other=0.0)
        dS = tl.load(ds_p + p_s, (x < V)[:, None], other=0.0)
        if HAS_DO:
            do = tl.load(p_do + x[None, :], m, other=0.0).to(OP)
            dM = tl.dot(do, tl.trans(u), dM, input_precision=PREC)
            dqd = tl.dot(do, S, dqd, input_precision=PREC)
            if L2NORM:
                o = tl.load(o_p + at[:, None] * V + x[None, :], m, other=0.0).to(tl.float32)
                doo += tl.sum(o * do.to(tl.float32), axis=1)
        dA = tl.dot(dd, tl.trans(u), dA, input_precision=PREC)
        dkd = tl.dot(dd, S, dkd, input_precision=PREC)
        dke = tl.dot(u, dS, dke, input_precision=PREC)
        both += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=0)
        if L2NORM:
            v = tl.load(p_v + x[None, :], m, other=0.0).to(tl.float32)
            ddv += tl.sum(v * dd.to(tl.float32), axis=1)
        ddu += tl.sum(u.to(tl.float32) * dd.to(tl.float32), axis=1)
    p_d = d_p + block * (2 * C * C) + t[:, None] * C + t[None, :]
    tl.store(p_d, tl.where(t[:, None] >= t[None, :], dM * scale, 0.0).to(d_p.dtype.element_ty))
    tl.store(p_d + C * C, tl.where(t[:, None] > t[None, :], -dA, 0.0).to(d_p.dtype.element_ty))
    p_wide = wide_p + block * (3 * C * BK) + t[:, None] * BK + c[None, :]
    tl.store(p_wide, (dqd * scale).to(wide_p.dtype.element_ty))
    tl.store(p_wide + C * BK, (-dkd).to(wide_p.dtype.element_ty))
    tl.store(p_wide + 2 * C * BK, dke.to(wide_p.dtype.element_ty))
    tl.store(both_p + block * BK + c, both)
    beta = tl.load(beta_p + batch * sbb + h * sbh + rows * sbt, real, other=0.0).to(tl.float32)
    slope = tl.full([C], 1.0, tl.float32)
    if SIGMOID:
        beta = sigmoid(beta)
        slope = beta * (1.0 - beta)
    beta = tl.maximum(beta, BETA_FLOOR)  # U and dD are proportional to beta, as `prepare.py` floored it
    tl.store(dbeta_p + at, ddu / beta / beta * slope, real)
    if L2NORM:
        tl.store(rows_p + at, doo, real)
        tl.store(rows_p + B.to(tl.int64) * T * HV + at, 2.0 * ddu / beta - ddv, real)

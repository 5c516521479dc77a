"""Backward, fifth kernel: the gradients of the scores of one chunk, of beta, and what the l2norm's backward needs.

From U, dD and do (times scale) of the two walks, for a chunk of 64 tokens:

    dM = tril(do U^T)           dA = -stril(dD U^T)           gradients of the scores M and A of `prepare.py`
    dbeta = dD . U / beta^2

The last: with E = v - (what the state predicts), U = beta E, and with Y the gradient that reaches beta E, dD = beta Y; so
dbeta = E . Y.

The backward of the l2norm needs q . dq and k . dk over all channels. Both are known here, before either gradient: o is
linear in q, so q . dq = do . o; and k, which is compared with the state and written to it, has k . dk =
dD . (2 U / beta - v). So `gradients.py` can give every slice of channels to a program of its own.

In 16 bits operands and result are float16 with a power of two a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.gate_math import find_sequence, power_of_two, sigmoid
from openkda.ops.kda.triton.gradients import unit_of
from openkda.ops.kda.triton.prepare import BETA_FLOOR


@triton.jit(do_not_specialize=["B", "T", "N", "slots", "sbb", "sbt", "sbh"])
def products_kernel(
    v_p, beta_p, cu_p, o_p, to_p, u_p, dd_p, to_unit_p, u_unit_p, dd_unit_p,
    d_p, d_unit_p, dbeta_p, rows_p,
    svb, svt, svh, sbb, sbt, sbh,
    B, T, N, slots, scale,
    HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BU: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, HAS_DO: tl.constexpr,
    PREC: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a chunk and value head.

    v is strided; o, u, dd, to = scale do [B, T, HV, V] and dbeta [B, T, HV] contiguous; units [HV, slots, V / BU].
    Writes d [HV, slots, 2, C, C] = dM, dA and d_unit [HV, slots]; rows [2, B, T, HV] = q . dq and k . dk (with L2NORM).
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
    real = t < (length - first).to(tl.int32)
    row = start + first
    base = (batch * T + row) * HV + h
    at = base + t * HV
    block = h * slots + slot
    p_v = v_p + batch * svb + h * svh + row * svt
    dM = tl.zeros([C, C], tl.float32)
    dA = tl.zeros([C, C], tl.float32)
    ddu = tl.zeros([C], tl.float32)
    ddv = tl.zeros([C], tl.float32)
    doo = tl.zeros([C], tl.float32)
    for v0 in tl.range(0, V, BV, num_stages=STAGES):
        x = v0 + tl.arange(0, BV)
        m = real[:, None] & (x < V)[None, :]
        at_v = (t * (HV * V))[:, None] + x[None, :]
        u = tl.load(u_p + base * V + at_v, m, other=0.0)
        dd = tl.load(dd_p + base * V + at_v, m, other=0.0)
        u_unit = unit_of(u_unit_p, block, v0, V, BU, UNITS)
        dd_unit = unit_of(dd_unit_p, block, v0, V, BU, UNITS)
        dA += tl.dot(dd, tl.trans(u), input_precision=PREC) * (dd_unit * u_unit)
        if HAS_DO:
            do = tl.load(to_p + base * V + at_v, m, other=0.0)
            to_unit = unit_of(to_unit_p, block, v0, V, BU, UNITS)
            dM += tl.dot(do, tl.trans(u), input_precision=PREC) * (to_unit * u_unit)
            if L2NORM:
                o = tl.load(o_p + base * V + at_v, m, other=0.0).to(tl.float32)
                doo += tl.sum(o * do.to(tl.float32), axis=1) * to_unit
        dd = dd.to(tl.float32)
        if L2NORM:
            v = tl.load(p_v + (t[:, None] * svt + x[None, :]), m, other=0.0).to(tl.float32)
            ddv += tl.sum(v * dd, axis=1) * dd_unit
        ddu += tl.sum(u.to(tl.float32) * dd, axis=1) * (dd_unit * u_unit)
    dM = tl.where(t[:, None] >= t[None, :], dM, 0.0)
    dA = tl.where(t[:, None] > t[None, :], -dA, 0.0)
    up, down = power_of_two(tl.max(tl.max(tl.maximum(tl.abs(dM), tl.abs(dA)), axis=1), axis=0), 14)
    p_d = d_p + block * (2 * C * C) + t[:, None] * C + t[None, :]
    tl.store(p_d, (dM * up).to(d_p.dtype.element_ty))
    tl.store(p_d + C * C, (dA * up).to(d_p.dtype.element_ty))
    tl.store(d_unit_p + block, down)
    beta = tl.load(beta_p + batch * sbb + h * sbh + row * sbt + t * sbt, real, other=0.0).to(tl.float32)
    slope = tl.full([C], 1.0, tl.float32)
    if SIGMOID:
        beta = sigmoid(beta)
        slope = beta * (1.0 - beta)
    beta = tl.maximum(beta, BETA_FLOOR)  # U and dD are proportional to beta, as `prepare.py` floored it
    tl.store(dbeta_p + at, ddu / beta / beta * slope, real)
    if L2NORM:
        tl.store(rows_p + at, tl.where(scale == 0.0, 0.0, doo / scale), real)
        tl.store(rows_p + B.to(tl.int64) * T * HV + at, 2.0 * ddu / beta - ddv, real)

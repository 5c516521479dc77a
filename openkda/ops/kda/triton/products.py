"""Backward, third kernel: the products over value channels that the gradients of one chunk need.

From the entering state S, the gradient dS' of the leaving one, U and dD of the two walks, and do:

    dM = scale tril(do U^T)     dA = -stril(dD U^T)           gradients of the scores M and A of `prepare.py`
    dbeta = dD . U / beta^2     dv = dD
    d(qd) = scale do S^T        d(kd) = -dD S^T               what the entering state says
    d(ke) = U dS'^T             both = sum_v S dS'            what the leaving state says

dbeta: with E = v - (what the state predicts), U = beta E, and with Y the gradient that reaches beta E, dD = beta Y; so
dbeta = E . Y.

The backward of the l2norm needs q . dq and k . dk over all channels. Both are known here, before either gradient: o is
linear in q, so q . dq = do . o; and k, which is compared with the state and written to it, has k . dk =
dD . (2 U / beta - v). So `gradients.py` can give every slice of channels to a program of its own.

The first two lines are one program's work for a chunk, the others are split over slices of key channels: all of it in one
program filled the registers of a processor, so that nothing ran while it waited for memory (1.23 ms at H = 96, T = 8192, H200).

In 16 bits operands are float16 with the powers of two of `walks.py`, and so are the results, with one for each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.prepare import BETA_FLOOR
from openkda.ops.triton.api import find_sequence, power_of_two, sigmoid


@triton.jit
def _store(p, p_unit, x):
    """x [64, n] in p's type; float16 with one power of two."""
    if tl.float16 == p.dtype.element_ty:
        up, down = power_of_two(tl.max(tl.max(tl.abs(x), axis=1), axis=0), 14)
        x *= up
        tl.store(p_unit, down)
    tl.store(p, x.to(p.dtype.element_ty))


@triton.jit
def _rows(do, OP: tl.constexpr):
    """do [64, n] as an operand, and what multiplies each row of its products back."""
    if tl.float16 == OP:
        up, down = power_of_two(tl.max(tl.abs(do), axis=1), 12)
        return (do * up[:, None]).to(OP), down
    else:
        return do.to(OP), tl.full([do.shape[0]], 1.0, tl.float32)


@triton.jit
def _unit(p, m, UNITS: tl.constexpr):
    """Powers of two [64] of rows."""
    if UNITS:
        return tl.load(p, m, other=0.0)
    else:
        return m.to(tl.float32)


@triton.jit
def _states(
    p_do, u_p, dd_p, p_s, p_ds, u_unit_p, dd_unit_p, p_s_unit, p_ds_unit, wide_p, both_p, unit_p,
    at_token, at_do, tile, real, q_up, block, part, scale,
    HV: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BU: tl.constexpr,
    HAS_DO: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d(qd), d(kd), d(ke) and `both` of BS key channels."""
    UNITS: tl.constexpr = tl.float16 == OP
    t = tl.arange(0, 64)
    c = part * BS + tl.arange(0, BS)
    dqd = tl.zeros([64, BS], tl.float32)
    dkd = tl.zeros([64, BS], tl.float32)
    dke = tl.zeros([64, BS], tl.float32)
    both = tl.zeros([BS], tl.float32)
    for v0 in tl.range(0, V, BV, num_stages=STAGES):
        x = v0 + tl.arange(0, BV)
        m = real[:, None] & (x < V)[None, :]
        at = at_token[:, None] * V + x[None, :]
        at_s = x[:, None] * BK + c[None, :]
        u = tl.load(u_p + at, m, other=0.0)
        dd = tl.load(dd_p + at, m, other=0.0)
        S = tl.load(p_s + at_s, (x < V)[:, None], other=0.0)
        dS = tl.load(p_ds + at_s, (x < V)[:, None], other=0.0)
        s_unit = 1.0
        ds_unit = 1.0
        if UNITS:
            s_unit = tl.load(p_s_unit + v0 // BU)
            ds_unit = tl.load(p_ds_unit + v0 // BU)
        both += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=0) * (s_unit * ds_unit)
        unit = _unit(dd_unit_p + tile + v0 // BU * 16, real, UNITS) * s_unit
        dkd += tl.dot(dd, S, input_precision=PREC) * unit[:, None]
        unit = _unit(u_unit_p + tile + v0 // BU * 16, real, UNITS) * ds_unit
        dke += tl.dot(u, dS, input_precision=PREC) * unit[:, None]
        if HAS_DO:
            do, unit = _rows(tl.load(p_do + (at_do[:, None] + x[None, :]), m, other=0.0).to(tl.float32), OP)
            dqd += tl.dot(do, S, input_precision=PREC) * (unit * q_up * s_unit)[:, None]
    p = wide_p + block * (192 * BK) + t[:, None] * BK + c[None, :]
    p_unit = unit_p + (block * (BK // BS) + part) * 4
    _store(p, p_unit + 1, dqd * scale)
    _store(p + 64 * BK, p_unit + 2, -dkd)
    _store(p + 128 * BK, p_unit + 3, dke)
    tl.store(both_p + block * BK + c, both)


@triton.jit
def _pairs(
    p_v, p_do, o_p, u_p, dd_p, dv_p, u_unit_p, dd_unit_p, d_p, unit_p, at_token, at_do, svt, tile, real, q_up, k_size, block,
    scale, BK: tl.constexpr, BS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BU: tl.constexpr, L2NORM: tl.constexpr,
    HAS_DO: tl.constexpr,
    OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dM, dA and dv; returns dD . U, dD . v and do . o of every token."""
    UNITS: tl.constexpr = tl.float16 == OP
    t = tl.arange(0, 64)
    dM = tl.zeros([64, 64], tl.float32)
    dA = tl.zeros([64, 64], tl.float32)
    ddu = tl.zeros([64], tl.float32)
    ddv = tl.zeros([64], tl.float32)
    doo = tl.zeros([64], tl.float32)
    for v0 in tl.range(0, V, BV, num_stages=STAGES):
        x = v0 + tl.arange(0, BV)
        m = real[:, None] & (x < V)[None, :]
        at = at_token[:, None] * V + x[None, :]
        u = tl.load(u_p + at, m, other=0.0)
        dd = tl.load(dd_p + at, m, other=0.0)
        u_unit = _unit(u_unit_p + tile + v0 // BU * 16, real, UNITS)
        dd_unit = _unit(dd_unit_p + tile + v0 // BU * 16, real, UNITS)
        dA += tl.dot(dd, tl.trans(u), input_precision=PREC) * dd_unit[:, None] * u_unit[None, :]
        if HAS_DO:
            do = tl.load(p_do + (at_do[:, None] + x[None, :]), m, other=0.0).to(tl.float32)
            if L2NORM:
                doo += tl.sum(tl.load(o_p + at, m, other=0.0).to(tl.float32) * do, axis=1)
            do, unit = _rows(do, OP)
            dM += tl.dot(do, tl.trans(u), input_precision=PREC) * (unit * q_up)[:, None] * u_unit[None, :]
        dd = dd.to(tl.float32) * dd_unit[:, None]
        if UNITS:
            tl.store(dv_p + at, (dd * k_size[:, None]).to(dv_p.dtype.element_ty), m)
        if L2NORM:
            ddv += tl.sum(tl.load(p_v + (t[:, None] * svt + x[None, :]), m, other=0.0).to(tl.float32) * dd, axis=1)
        ddu += tl.sum(u.to(tl.float32) * dd, axis=1) * u_unit
    dM = tl.where(t[:, None] >= t[None, :], dM * scale, 0.0)
    dA = tl.where(t[:, None] > t[None, :], -dA, 0.0)
    p = d_p + block * 8192 + t[:, None] * 64 + t[None, :]
    if UNITS:
        # Below 2, as hopper/gradients.py wants it: there a decay the other way may be 2^115. It divides by the unit, so
        # what is nothing keeps one that leaves room for the states' terms.
        most = tl.max(tl.max(tl.maximum(tl.abs(dM), tl.abs(dA)), axis=1), axis=0)
        up, down = power_of_two(tl.maximum(most, 2.0**-100, propagate_nan=tl.PropagateNan.ALL), 0)
        dM *= up
        dA *= up
        for part in tl.static_range(0, BK // BS):
            tl.store(unit_p + (block * (BK // BS) + part) * 4, down)
    tl.store(p, dM.to(d_p.dtype.element_ty))
    tl.store(p + 4096, dA.to(d_p.dtype.element_ty))
    return ddu, ddv, doo


@triton.jit(do_not_specialize=["B", "T", "N", "slots", "tiles", "sbb", "sbt", "sbh"])
def products_kernel(
    v_p, beta_p, cu_p, token_p, o_p, do_p, u_p, dd_p, s_p, ds_p, u_unit_p, dd_unit_p, s_unit_p, ds_unit_p,
    dv_p, d_p, wide_p, both_p, unit_p, dbeta_p, rows_p,
    svb, svt, svh, sbb, sbt, sbh, sob, sot, soh,
    B, T, N, slots, tiles, scale,
    HV: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BU: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, SCALED: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_DO: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a chunk of 64 tokens, value head and job: pairs, or a slice of BS key channels.

    v and do are strided; o, u, dd, dv [B, T, HV, V] and dbeta [B, T, HV] contiguous; s, ds [HV, slots, V, BK]. Powers of two
    in 16 bits, one for every BU value channels: of u and dd [HV, tiles, V / BU, 16], of s and ds [HV, slots, V / BU].
    Writes dv; d [HV, slots, 2, 64, 64] = dM, dA; wide [HV, slots, 3, 64, BK]; unit [HV, slots, BK / BS, 4], the powers of two
    of d and of a slice of d(qd), d(kd), d(ke); both [HV, slots, BK]; rows [2, B, T, HV] = q . dq and k . dk (with L2NORM).
    """
    JOBS: tl.constexpr = BK // BS + 1
    pid = tl.program_id(0)
    job = pid % JOBS
    h = (pid // JOBS % HV).to(tl.int64)
    slot = (pid // JOBS // HV).to(tl.int64)
    if PACKED:
        n = find_sequence(slot, cu_p, N, 64)
        start = tl.load(cu_p + n).to(tl.int64)
        first = (slot - (start // 64 + n)) * 64
        length = tl.load(cu_p + n + 1).to(tl.int64) - start
        tile0 = start // 16 + n + first // 16
        batch = n * 0
    else:
        per = tl.cdiv(T, 64)
        batch = slot // per
        first = (slot % per) * 64
        length = T.to(tl.int64)
        tile0 = batch * tl.cdiv(T, 16) + first // 16
        start = batch * 0
    if first >= length:
        return
    NU: tl.constexpr = (V + BU - 1) // BU
    t = tl.arange(0, 64)
    real = t < (length - first).to(tl.int32)
    row = start + first
    block = h * slots + slot
    tokens = (batch * T + row) * HV + h
    # 64-bit bases of scalars, 32-bit offsets of tokens
    p_do = do_p
    at_do = t
    if HAS_DO:
        p_do = do_p + batch * sob + h * soh + row * sot
        at_do = t * sot
    at_token = t * HV
    tile = t // 16 * (NU * 16) + t % 16
    units = (h * tiles + tile0) * (NU * 16)
    q_up = tl.full([64], 1.0, tl.float32)
    k_size = q_up
    if SCALED:
        p_token = token_p + (h * tiles + tile0) * 48 + t // 16 * 48 + t % 16
        k_size = tl.load(p_token, real, other=1.0)
        q_up = 1.0 / tl.load(p_token + 16, real, other=1.0)
    if job == 0:
        ddu, ddv, doo = _pairs(
            v_p + batch * svb + h * svh + row * svt, p_do, o_p + tokens * V, u_p + tokens * V, dd_p + tokens * V,
            dv_p + tokens * V, u_unit_p + units, dd_unit_p + units, d_p, unit_p, at_token, at_do, svt, tile, real, q_up,
            k_size, block, scale, BK, BS, V, BV, BU, L2NORM, HAS_DO, OP, PREC, STAGES,
        )  # fmt: skip
        beta = tl.load(beta_p + batch * sbb + h * sbh + row * sbt + t * sbt, real, other=0.0).to(tl.float32)
        slope = tl.full([64], 1.0, tl.float32)
        if SIGMOID:
            beta = sigmoid(beta)
            slope = beta * (1.0 - beta)
        # U and dD are proportional to beta, as `prepare.py` floored it
        beta = tl.where(tl.abs(beta) < BETA_FLOOR, BETA_FLOOR, beta)
        tl.store(dbeta_p + tokens + at_token, ddu * k_size / beta * k_size / beta * slope, real)
        if L2NORM:
            tl.store(rows_p + tokens + at_token, doo, real)
            tl.store(rows_p + B.to(tl.int64) * T * HV + tokens + at_token, 2.0 * ddu / beta - ddv, real)
    else:
        _states(
            p_do, u_p + tokens * V, dd_p + tokens * V, s_p + block * (V * BK), ds_p + block * (V * BK), u_unit_p + units,
            dd_unit_p + units, s_unit_p + block * NU, ds_unit_p + block * NU, wide_p, both_p, unit_p,
            at_token, at_do, tile, real, q_up, block, job - 1, scale, HV, BK, BS, V, BV, BU, HAS_DO, OP, PREC, STAGES,
        )  # fmt: skip

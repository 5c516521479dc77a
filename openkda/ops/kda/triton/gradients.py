"""Backward, last kernel: from the products of one chunk to the gradients of its q, k and gate input.

`products.py` has left, for a chunk of 64 tokens (16 bits: float16 with powers of two): dM and dA [64, 64], the gradients of
the scores, and d(qd), d(kd), d(ke) [64, K], what the entering and leaving states say. With P_i the log decay summed up to
token i and Q_i from it to the end,

    dq_i  = e^{P_i} d(qd)_i + sum_j dM_ij e^{P_i - P_j} k_j
    dk_i  = e^{P_i} d(kd)_i + sum_j dA_ij e^{P_i - P_j} k_j                            as the row of a pair
          + e^{Q_i} d(ke)_i + sum_j e^{P_j - P_i} (dM_ji q_j + dA_ji k_j)               as its column
    d(log decay) summed to i: dP_i = q_i dq_i + k_i (dk_i as row - dk_i as column), and to the chunk's end:
          dP_C += sum_i ke_i d(ke)_i + decay sum_v S dS'

Four tiles of 16 tokens, every product [16, 16] x [16, K]. Between two tiles the decay is e^{prefix in i} * e^{whole tiles
between} * e^{suffix in j}: the middle factor is one vector of channels, multiplied after the product. Inside a tile a
bounded gate takes the tile's middle as anchor (16 tokens stay in float32 range); any other gate groups its pairs into
levels, as `prepare.py` does. No exponent is positive but the bounded tile's.

A program owns a slice of channels of one chunk and walks its tiles from the last to the first with the sum of dP over later
tokens in hand: loops instead of unrolled code, because 24 unrolled products took 70 s to compile and spilled. Slices of 16
channels and one warp: eight warps on whole rows waited for each other at every small product (7.6 ms at H = 96, T = 8192,
K = 128 on an H200 against 3.7; slices of 32 with two warps 4.6).

A pair adds to dP at its row what it subtracts at its column. Both sides multiply the same rounded operands, so that the
two cancel in the sum over later tokens: the decayed q and k of a tile are those of `prepare.py` wherever they occur. With q
and k unrounded on one side a fast gate's gradient drowned in what was left (9.8e-2 of it at log decays near -5, bfloat16;
A_log 0.1 with the last tile's k alone unrounded). A token's pair with itself has no decay and is left out.
Parameter gradients leave as one partial sum a chunk and are added in a fixed order, so two runs agree to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import (
    FORGOTTEN,
    GATE_BOUNDED,
    GATE_SOFTPLUS,
    LN2,
    LOG2E,
    decay_rate,
    find_sequence,
    log2_decay,
    round_mantissa,
    sigmoid,
)


@triton.jit
def _tile_decay(p_z, p_dt, m, m_c, rate, bound, GATE: tl.constexpr, HAS_DT: tl.constexpr):
    """Raw gate input (bias added) and log2 decay [16, BK] of one tile; 0 on rows that do not exist."""
    z = tl.load(p_z, m, other=0.0).to(tl.float32)
    if HAS_DT:
        z += tl.load(p_dt, m_c, other=0.0)[None, :]
    return z, tl.where(m, log2_decay(z, rate, bound, GATE), 0.0)


@triton.jit
def _unit(p, m, p_norm, real, NORMS: tl.constexpr):
    """[16, BS] of the rows of length one, and what they were multiplied by to have it."""
    x = tl.load(p, m, other=0.0).to(tl.float32)
    r = tl.full([16], 1.0, tl.float32)
    if NORMS:
        r = tl.load(p_norm, real, other=0.0)
        x *= r[:, None]
    return x, r


@triton.jit
def _written(p_dke, p_ke, p_decay, at_w, count, unit, BK: tl.constexpr, BS: tl.constexpr):
    """sum_i ke_i d(ke)_i of the chunk [BS], and the decay of all of it."""
    written = tl.zeros([BS], tl.float32)
    after = tl.full([BS], 1.0, tl.float32)
    for back in tl.range(0, count):
        tile = count - 1 - back
        ke = tl.load(p_ke + tile * (16 * BK) + at_w).to(tl.float32)
        dke = tl.load(p_dke + tile * (16 * BK) + at_w).to(tl.float32) * unit
        written += tl.sum(ke * dke, axis=0) * after
        after *= tl.load(p_decay + tile * BK)
    return after, written


@triton.jit
def _as_rows(
    p_d, p_ke, at_w, p_decay, tile, d_unit, BK: tl.constexpr, BS: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr
):
    """What the earlier tiles give to the dq and dk of `tile` (its own prefix decay pending), and their decay."""
    i = tl.arange(0, 16)
    dq = tl.zeros([16, BS], tl.float32)
    dk = tl.zeros([16, BS], tl.float32)
    e = tl.full([BS], 1.0, tl.float32)
    for back in tl.range(1, tile + 1):
        other = tile - back
        at = (16 * tile + i)[:, None] * 64 + (16 * other + i)[None, :]
        ke = tl.load(p_ke + 16 * other * BK + at_w)
        dq += tl.dot(tl.load(p_d + at).to(OP), ke, input_precision=PREC) * e[None, :]
        dk += tl.dot(tl.load(p_d + 4096 + at).to(OP), ke, input_precision=PREC) * e[None, :]
        e *= tl.load(p_decay + other * BK)
    return dq * d_unit, dk * d_unit, e


@triton.jit
def _as_columns(
    p_d, p_qd, p_kd, at_w, p_decay, tile, count, d_unit,
    BK: tl.constexpr, BS: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What the later tiles give to the dk of `tile` (its own suffix decay pending), and their decay."""
    i = tl.arange(0, 16)
    dk = tl.zeros([16, BS], tl.float32)
    e = tl.full([BS], 1.0, tl.float32)
    for other in tl.range(tile + 1, count):
        at = (16 * other + i)[None, :] * 64 + (16 * tile + i)[:, None]  # transposed
        d = tl.dot(tl.load(p_d + at).to(OP), tl.load(p_qd + 16 * other * BK + at_w), input_precision=PREC)
        d = tl.dot(tl.load(p_d + 4096 + at).to(OP), tl.load(p_kd + 16 * other * BK + at_w), d, input_precision=PREC)
        dk += d * e[None, :]
        e *= tl.load(p_decay + other * BK)
    return dk * d_unit, e


@triton.jit
def _own_pairs(
    p_d, tile, q, k, g, bound, d_unit, BS: tl.constexpr, GATE: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr
):
    """Pairs inside a tile: dq, dk and dP."""
    i = tl.arange(0, 16)
    at = (16 * tile + i)[:, None] * 64 + (16 * tile + i)[None, :]
    dM = tl.load(p_d + at)
    dA = tl.load(p_d + 4096 + at)
    own = tl.sum(tl.where(i[:, None] == i[None, :], dM.to(tl.float32), 0.0), axis=1)[:, None] * d_unit
    dM = tl.where(i[:, None] > i[None, :], dM, 0.0)
    dq = own * k  # a token with itself: no decay between, so nothing for dP
    dk = own * q
    if GATE == GATE_BOUNDED:
        shifted = tl.cumsum(g, axis=0) - bound * (8.0 * LOG2E)
        up = tl.exp2(shifted)
        down = tl.exp2(-shifted)
        qu = round_mantissa(q * up, PREC)  # up to 2^58: float16 has no room for them
        ku = round_mantissa(k * up, PREC)
        kc = round_mantissa(k * down, PREC)
        dM = dM.to(tl.float32)
        dA = dA.to(tl.float32)
        q1 = tl.dot(dM, kc, input_precision=PREC) * d_unit
        row = tl.dot(dA, kc, input_precision=PREC) * d_unit
        col = tl.dot(tl.trans(dM), qu, input_precision=PREC)
        col = tl.dot(tl.trans(dA), ku, col, input_precision=PREC) * d_unit
        dP = qu * q1 + ku * row - kc * col
        return dq + q1 * up, dk + row * up + col * down, dP
    else:
        dP = tl.zeros([16, BS], tl.float32)
        P = g
        Q = g * 0.0
        R = g
        for j in tl.static_range(0, 4):
            upper = (i // (1 << j)) % 2 == 1
            run = i // (2 << j)
            m = (upper[:, None] & (upper[None, :] == 0)) & (run[:, None] == run[None, :])
            e = tl.exp2(tl.where(upper[:, None], P, Q))
            Ml = tl.where(m, dM, 0.0).to(OP)
            Al = tl.where(m, dA, 0.0).to(OP)
            qe = (q * e).to(OP)
            ke = (k * e).to(OP)
            q1 = tl.dot(Ml, ke, input_precision=PREC) * d_unit
            d = tl.dot(Al, ke, input_precision=PREC)
            d = tl.dot(tl.trans(Ml), qe, d, input_precision=PREC)
            d = tl.dot(tl.trans(Al), ke, d, input_precision=PREC) * d_unit
            dP += qe * q1 + tl.where(upper[:, None], ke * d, -(ke * d))
            dq += q1 * e
            dk += d * e
            P, Q, R = _merge_runs(P, Q, R, 1 << j, BS)
        return dq, dk, dP


@triton.jit
def _merge_runs(P, Q, R, b: tl.constexpr, BS: tl.constexpr):
    """Sums over runs of b tokens (prefix P, suffix Q [16, BS], total R [16 / b, BS]) -> over runs of 2b tokens."""
    NR: tl.constexpr = 16 // (2 * b)
    side = tl.arange(0, 2)
    pair = tl.reshape(R, [NR, 2, BS])
    before = tl.sum(tl.where(side[None, :, None] == 0, pair, 0.0), axis=1)
    after = tl.sum(tl.where(side[None, :, None] == 1, pair, 0.0), axis=1)
    second = side[None, :, None, None] == 1
    P = tl.reshape(tl.reshape(P, [NR, 2, b, BS]) + tl.where(second, before[:, None, None, :], 0.0), [16, BS])
    Q = tl.reshape(tl.reshape(Q, [NR, 2, b, BS]) + tl.where(second, 0.0, after[:, None, None, :]), [16, BS])
    return P, Q, before + after


@triton.jit
def _gate_gradient(dg, z, g2, rate, bound, GATE: tl.constexpr):
    """(gradient of the raw gate input, of A_log per element) from that of the natural log decay."""
    dg = tl.where(g2 <= FORGOTTEN, 0.0, dg)
    if GATE == GATE_SOFTPLUS:
        return -dg * rate * sigmoid(z), dg * (g2 * LN2)
    elif GATE == GATE_BOUNDED:
        s = sigmoid(rate * z)
        dz = dg * bound * s * (1.0 - s) * rate
        return dz, dz * z
    else:
        return dg, dg * 0.0


@triton.jit(do_not_specialize=["B", "T", "N", "slots", "tiles"])
def gradients_kernel(
    q_p, k_p, g_p, A_log_p, dt_bias_p, cu_p, d_p, wide_p, both_p, unit_p,
    kd_p, qd_p, ke_p, decay_p, norm_p, rows_p,
    dq_p, dk_p, dz_p, ddt_p, dA_log_p,
    sqb, sqt, sqh, skb, skt, skh, sgb, sgt, sgh,
    B, T, N, slots, tiles, bound,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_DT: tl.constexpr, PACKED: tl.constexpr,
    L2NORM: tl.constexpr, SCALED: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One program a chunk of 64 tokens, value head and slice of BS channels.

    d [HV, slots, 2, 64, 64], wide [HV, slots, 3, 64, BK], both [HV, slots, BK], unit [HV, slots, BK / BP, 4] and rows
    [2, B, T, HV] from `products.py`; kd, qd, ke [HV, tiles, 16, BK], decay [HV, tiles, BK] and norm [HV, tiles, 3, 16] from
    `prepare.py`.
    Writes dq, dk, dz [B, T, HV, K], ddt [slots, HV, K], dA_log [slots, HV, K].
    """
    C: tl.constexpr = 64
    NS: tl.constexpr = BK // BS
    pid = tl.program_id(0).to(tl.int64)
    c = pid % NS * BS + tl.arange(0, BS)
    h = pid // NS % HV
    slot = pid // NS // HV
    if PACKED:
        n = find_sequence(slot, cu_p, N, C)
        start = tl.load(cu_p + n).to(tl.int64)
        first = (slot - (start // C + n)) * C
        length = tl.load(cu_p + n + 1).to(tl.int64) - start
        tile0 = start // 16 + n + first // 16
        batch = n * 0
    else:
        per = tl.cdiv(T, C)
        batch = slot // per
        first = (slot % per) * C
        length = T.to(tl.int64)
        tile0 = batch * tl.cdiv(T, 16) + first // 16
        start = batch * 0
    i = tl.arange(0, 16)
    m_c = c < K
    p_sum = (slot * HV + h) * K + c
    if first >= length:
        if HAS_DT:
            tl.store(ddt_p + p_sum, tl.zeros([BS], tl.float32), m_c)
        if HAS_A:
            tl.store(dA_log_p + p_sum, tl.zeros([BS], tl.float32), m_c)
        return
    row = start + first
    left = (length - first).to(tl.int32)
    count = tl.minimum((left + 15) // 16, 4)  # not a constant: unrolled loops spilled
    # Scalar 64-bit bases and small 32-bit offsets: tensors of pointers cost 100 registers here.
    p_q = q_p + batch * sqb + h // GROUP * sqh + row * sqt
    p_k = k_p + batch * skb + h // GROUP * skh + row * skt
    p_z = g_p + batch * sgb + h * sgh + row * sgt
    out = ((batch * T + row) * HV + h) * K
    p_dt = c  # unused without a bias
    if HAS_DT:
        p_dt = dt_bias_p + h * K + c
    block = h * slots + slot
    p_d = d_p + block * (2 * C * C)
    p_wide = wide_p + block * (3 * C * BK)
    at_tile = h * tiles + tile0
    p_qd = qd_p + at_tile * (16 * BK)
    p_kd = kd_p + at_tile * (16 * BK)
    p_ke = ke_p + at_tile * (16 * BK)
    p_decay = decay_p + at_tile * BK + c
    d_unit = 1.0
    dqd_unit = 1.0
    dkd_unit = 1.0
    dke_unit = 1.0
    if tl.float16 == OP:
        p_unit = unit_p + (block * (BK // BP) + (pid % NS) * BS // BP) * 4
        d_unit = tl.load(p_unit)
        dqd_unit = tl.load(p_unit + 1)
        dkd_unit = tl.load(p_unit + 2)
        dke_unit = tl.load(p_unit + 3)
    at_q = i[:, None] * sqt + c[None, :]
    at_k = i[:, None] * skt + c[None, :]
    at_z = i[:, None] * sgt + c[None, :]
    at_out = i[:, None] * (HV * K) + c[None, :]
    at_w = i[:, None] * BK + c[None, :]
    p_norm = norm_p + (h * tiles + tile0) * 48
    p_rows = rows_p + (batch * T + row) * HV + h
    rate = 1.0
    if HAS_A:
        rate = decay_rate(tl.load(A_log_p + h))

    whole, carry = _written(p_wide + 2 * C * BK, p_ke, p_decay, at_w, count, dke_unit, BK, BS)
    carry += tl.load(both_p + block * BK + c) * whole
    ddt = tl.zeros([BS], tl.float32)
    dA = tl.zeros([BS], tl.float32)
    for back in tl.range(0, count):
        tile = count - 1 - back
        t = 16 * tile
        real = t + i < left
        m = real[:, None] & m_c[None, :]
        # One contribution after the other, each added at once: all of them held together spilled.
        q, q_norm = _unit(p_q + t * sqt + at_q, m, p_norm + 48 * tile + 16 + i, real, L2NORM or SCALED)
        k, k_norm = _unit(p_k + t * skt + at_k, m, p_norm + 48 * tile + i, real, L2NORM or SCALED)
        _, g = _tile_decay(p_z + t * sgt + at_z, p_dt, m, m_c, rate, bound, GATE, HAS_DT)
        dq, dk, dP = _own_pairs(p_d, tile, q, k, g, bound, d_unit, BS, GATE, OP, PREC)
        P = tl.cumsum(g, axis=0)
        near = tl.exp2(P)
        far = tl.exp2(tl.minimum(tl.sum(g, axis=0)[None, :] - P, 0.0))
        d, d_k, before = _as_rows(p_d, p_ke, at_w, p_decay, tile, d_unit, BK, BS, OP, PREC)
        d += before[None, :] * (tl.load(p_wide + t * BK + at_w) * dqd_unit)
        d_k += before[None, :] * (tl.load(p_wide + (C + t) * BK + at_w) * dkd_unit)
        dP += tl.load(p_qd + t * BK + at_w).to(tl.float32) * d + tl.load(p_kd + t * BK + at_w).to(tl.float32) * d_k
        dq += near * d
        dk += near * d_k
        d, after = _as_columns(p_d, p_qd, p_kd, at_w, p_decay, tile, count, d_unit, BK, BS, OP, PREC)
        d += after[None, :] * (tl.load(p_wide + (2 * C + t) * BK + at_w) * dke_unit)
        dP -= tl.load(p_ke + t * BK + at_w).to(tl.float32) * d
        dk += far * d
        if L2NORM:
            along_q = tl.load(p_rows + (t + i) * HV, real, other=0.0)
            along_k = tl.load(p_rows + B.to(tl.int64) * T * HV + (t + i) * HV, real, other=0.0)
            dq -= q * along_q[:, None]
            dk -= k * along_k[:, None]
        if L2NORM or SCALED:
            dq *= q_norm[:, None]
            dk *= k_norm[:, None]
        tl.store(dq_p + out + t * (HV * K) + at_out, dq.to(dq_p.dtype.element_ty), m)
        tl.store(dk_p + out + t * (HV * K) + at_out, dk.to(dk_p.dtype.element_ty), m)
        dg = tl.cumsum(dP, axis=0, reverse=True) + carry[None, :]
        z, g = _tile_decay(p_z + t * sgt + at_z, p_dt, m, m_c, rate, bound, GATE, HAS_DT)
        dz, dA_log = _gate_gradient(dg, z, g, rate, bound, GATE)
        tl.store(dz_p + out + t * (HV * K) + at_out, dz.to(dz_p.dtype.element_ty), m)
        carry += tl.sum(dP, axis=0)
        ddt += tl.sum(tl.where(m, dz, 0.0), axis=0)
        dA += tl.sum(tl.where(m, dA_log, 0.0), axis=0)
    if HAS_DT:
        tl.store(ddt_p + p_sum, ddt, m_c)
    if HAS_A:
        tl.store(dA_log_p + p_sum, dA, m_c)

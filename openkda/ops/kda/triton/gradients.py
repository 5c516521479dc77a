"""Backward, last kernel: from the products of one chunk to the gradients of its q, k and gate input.

`products.py` has left, for a chunk of 64 tokens: dM and dA [64, 64], the gradients of the scores, and d(qd), d(kd), d(ke)
[64, K], what the entering and leaving states say. With P_i the log decay summed up to token i and Q_i from it to the end,

    dq_i  = e^{P_i} d(qd)_i + sum_j dM_ij e^{P_i - P_j} k_j
    dk_i  = e^{P_i} d(kd)_i + sum_j dA_ij e^{P_i - P_j} k_j                            as the row of a pair
          + e^{Q_i} d(ke)_i + sum_j e^{P_j - P_i} (dM_ji q_j + dA_ji k_j)               as its column
    d(log decay) summed to i: dP_i = q_i dq_i + k_i (dk_i as row - dk_i as column), and to the chunk's end:
          dP_C += sum_i ke_i d(ke)_i + decay sum_v S dS'

Four tiles of 16 tokens, every product [16, 16] x [16, K]. Between two tiles the decay is e^{prefix in i} * e^{whole tiles
between} * e^{suffix in j}: the middle factor is one vector of channels, multiplied after the product. Inside a tile a
bounded gate takes the tile's middle as anchor (16 tokens stay in float32 range); any other gate groups its pairs into
levels, as `prepare.py` does. No exponent is positive but the bounded tile's.

A program owns a slice of channels of one chunk. It first leaves the decayed operands of its four tiles in a scratch
buffer, then walks the tiles from the last to the first with the sum of dP over later tokens in hand: loops instead of
unrolled code, because 24 unrolled products took 70 s to compile and spilled. Slices of 16 channels and one warp: eight
warps on whole rows waited for each other at every small product (7.6 ms at H = 96, T = 8192, K = 128 on an H200 against
3.7; slices of 32 with two warps 4.6).

A pair adds to dP at its row what it subtracts at its column. Both sides multiply the same rounded operands, so that the
two cancel in the sum over later tokens: with q and k unrounded on one side a fast gate's gradient drowned in what was
left (9.8e-2 of it at log decays near -5, bfloat16; now 3.6e-3). A token's pair with itself has no decay and is left out.
Parameter gradients leave as one partial sum a chunk and are added in a fixed order, so two runs agree to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.gate_math import (
    FORGOTTEN,
    GATE_BOUNDED,
    GATE_SOFTPLUS,
    LN2,
    LOG2E,
    decay_rate,
    find_sequence,
    log2_decay,
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
def _unit(p, m, p_norm, real, L2NORM: tl.constexpr):
    """[16, BS] of the rows of length one, and what they were multiplied by to have it."""
    x = tl.load(p, m, other=0.0).to(tl.float32)
    r = tl.full([16], 1.0, tl.float32)
    if L2NORM:
        r = tl.load(p_norm, real, other=0.0)
        x *= r[:, None]
    return x, r


@triton.jit
def _leave_operands(
    p_q, p_k, p_z, p_dt, p_norm, p_dke, p_op, p_total, at_w, c, sqt, skt, sgt, left, count, m_c, rate, bound,
    BK: tl.constexpr, BS: tl.constexpr, GATE: tl.constexpr, HAS_DT: tl.constexpr, L2NORM: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """First walk: every tile's q and k decayed from its start and k decayed to its end, [3, 64, BK], and its log2 decay.

    Returns the log2 decay of the whole chunk and sum_i ke_i d(ke)_i, [BS] each.
    """
    i = tl.arange(0, 16)
    after = tl.zeros([BS], tl.float32)
    written = tl.zeros([BS], tl.float32)
    for back in tl.range(0, count):
        t = 16 * (count - 1 - back)
        real = t + i < left
        m = real[:, None] & m_c[None, :]
        q, _ = _unit(p_q + ((t + i)[:, None] * sqt + c[None, :]), m, p_norm + 3 * t + 16 + i, real, L2NORM)
        k, _ = _unit(p_k + ((t + i)[:, None] * skt + c[None, :]), m, p_norm + 3 * t + i, real, L2NORM)
        _, g = _tile_decay(p_z + ((t + i)[:, None] * sgt + c[None, :]), p_dt, m, m_c, rate, bound, GATE, HAS_DT)
        P = tl.cumsum(g, axis=0)
        R = tl.sum(g, axis=0)
        near = tl.exp2(P)
        ke = k * tl.exp2(tl.minimum(R[None, :] - P, 0.0))
        tl.store(p_op + t * BK + at_w, (q * near).to(OP))
        tl.store(p_op + (64 + t) * BK + at_w, (k * near).to(OP))
        tl.store(p_op + (128 + t) * BK + at_w, ke.to(OP))
        tl.store(p_total + (t // 16) * BK, R)
        dke = tl.load(p_dke + t * BK + at_w).to(tl.float32)
        written += tl.sum(ke * dke, axis=0) * tl.exp2(after)
        after += R
    return after, written


@triton.jit
def _as_rows(p_d, p_op, at_w, p_total, tile, BK: tl.constexpr, BS: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr):
    """What the earlier tiles give to the dq and dk of `tile` (its own prefix decay pending), and their log2 decay."""
    i = tl.arange(0, 16)
    dq = tl.zeros([16, BS], tl.float32)
    dk = tl.zeros([16, BS], tl.float32)
    between = tl.zeros([BS], tl.float32)
    for back in tl.range(1, tile + 1):
        other = tile - back
        at = (16 * tile + i)[:, None] * 64 + (16 * other + i)[None, :]
        ke = tl.load(p_op + (128 + 16 * other) * BK + at_w)
        e = tl.exp2(between)[None, :]
        dq += tl.dot(tl.load(p_d + at).to(OP), ke, input_precision=PREC) * e
        dk += tl.dot(tl.load(p_d + 4096 + at).to(OP), ke, input_precision=PREC) * e
        between += tl.load(p_total + other * BK)
    return dq, dk, between


@triton.jit
def _as_columns(
    p_d, p_op, at_w, p_total, tile, count, BK: tl.constexpr, BS: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr
):
    """What the later tiles give to the dk of `tile` (its own suffix decay pending), and their log2 decay."""
    i = tl.arange(0, 16)
    dk = tl.zeros([16, BS], tl.float32)
    between = tl.zeros([BS], tl.float32)
    for other in tl.range(tile + 1, count):
        at = (16 * other + i)[None, :] * 64 + (16 * tile + i)[:, None]  # transposed
        d = tl.dot(tl.load(p_d + at).to(OP), tl.load(p_op + 16 * other * BK + at_w), input_precision=PREC)
        d = tl.dot(
            tl.load(p_d + 4096 + at).to(OP), tl.load(p_op + (64 + 16 * other) * BK + at_w), d, input_precision=PREC
        )
        dk += d * tl.exp2(between)[None, :]
        between += tl.load(p_total + other * BK)
    return dk, between


@triton.jit
def _own_pairs(p_d, tile, q, k, g, bound, BS: tl.constexpr, GATE: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr):
    """Pairs inside a tile: dq, dk and dP."""
    i = tl.arange(0, 16)
    at = (16 * tile + i)[:, None] * 64 + (16 * tile + i)[None, :]
    dM = tl.load(p_d + at)
    dA = tl.load(p_d + 4096 + at)
    own = tl.sum(tl.where(i[:, None] == i[None, :], dM.to(tl.float32), 0.0), axis=1)[:, None]
    dM = tl.where(i[:, None] > i[None, :], dM, 0.0)
    dq = own * k  # a token with itself: no decay between, so nothing for dP
    dk = own * q
    if GATE == GATE_BOUNDED:
        shifted = tl.cumsum(g, axis=0) - bound * (8.0 * LOG2E)
        up = tl.exp2(shifted)
        down = tl.exp2(-shifted)
        qu = (q * up).to(OP)
        ku = (k * up).to(OP)
        kc = (k * down).to(OP)
        q1 = tl.dot(dM.to(OP), kc, input_precision=PREC)
        row = tl.dot(dA.to(OP), kc, input_precision=PREC)
        col = tl.dot(tl.trans(dM.to(OP)), qu, input_precision=PREC)
        col = tl.dot(tl.trans(dA.to(OP)), ku, col, input_precision=PREC)
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
            q1 = tl.dot(Ml, ke, input_precision=PREC)
            d = tl.dot(Al, ke, input_precision=PREC)
            d = tl.dot(tl.trans(Ml), qe, d, input_precision=PREC)
            d = tl.dot(tl.trans(Al), ke, d, input_precision=PREC)
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
    q_p, k_p, g_p, A_log_p, dt_bias_p, cu_p, d_p, wide_p, both_p, op_p, total_p, norm_p, rows_p,
    dq_p, dk_p, dz_p, ddt_p, dA_log_p,
    sqb, sqt, sqh, skb, skt, skh, sgb, sgt, sgh,
    B, T, N, slots, tiles, bound,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_DT: tl.constexpr, PACKED: tl.constexpr,
    L2NORM: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One program a chunk of 64 tokens, value head and slice of BS channels.

    d [HV, slots, 2, 64, 64], wide [HV, slots, 3, 64, BK] and both [HV, slots, BK] from `products.py`.
    op [HV, slots, 3, 64, BK] and total [HV, slots, 4, BK] are scratch; norm [HV, tiles, 3, 16] from `prepare.py`,
    rows [2, B, T, HV] from `products.py`.
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
    p_op = op_p + block * (3 * C * BK)
    p_total = total_p + block * (4 * BK) + c
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

    whole, carry = _leave_operands(
        p_q, p_k, p_z, p_dt, p_norm, p_wide + 2 * C * BK, p_op, p_total, at_w, c, sqt, skt, sgt, left, count, m_c, rate, bound,
        BK, BS, GATE, HAS_DT, L2NORM, OP,
    )  # fmt: skip
    tl.debug_barrier()  # the tiles read each other's operands
    carry += tl.load(both_p + block * BK + c) * tl.exp2(whole)
    ddt = tl.zeros([BS], tl.float32)
    dA = tl.zeros([BS], tl.float32)
    for back in tl.range(0, count):
        tile = count - 1 - back
        t = 16 * tile
        real = t + i < left
        m = real[:, None] & m_c[None, :]
        # One contribution after the other, each added at once: all of them held together spilled.
        q, q_norm = _unit(p_q + t * sqt + at_q, m, p_norm + 48 * tile + 16 + i, real, L2NORM)
        k, k_norm = _unit(p_k + t * skt + at_k, m, p_norm + 48 * tile + i, real, L2NORM)
        _, g = _tile_decay(p_z + t * sgt + at_z, p_dt, m, m_c, rate, bound, GATE, HAS_DT)
        dq, dk, dP = _own_pairs(p_d, tile, q, k, g, bound, BS, GATE, OP, PREC)
        P = tl.cumsum(g, axis=0)
        near = tl.exp2(P)
        far = tl.exp2(tl.minimum(tl.sum(g, axis=0)[None, :] - P, 0.0))
        d, d_k, before = _as_rows(p_d, p_op, at_w, p_total, tile, BK, BS, OP, PREC)
        dP += (q * near).to(OP) * d + (k * near).to(OP) * d_k
        e = tl.exp2(before)[None, :]
        d = near * d
        d_k = near * d_k
        near *= e
        w = near * tl.load(p_wide + t * BK + at_w)
        dP += q * w
        dq += d + w
        w = near * tl.load(p_wide + (C + t) * BK + at_w)
        dP += k * w
        dk += d_k + w
        d, after = _as_columns(p_d, p_op, at_w, p_total, tile, count, BK, BS, OP, PREC)
        dP -= (k * far).to(OP) * d
        dk += far * d
        w = far * tl.exp2(after)[None, :] * tl.load(p_wide + (2 * C + t) * BK + at_w)
        dP -= k * w
        dk += w
        if L2NORM:
            along_q = tl.load(p_rows + (t + i) * HV, real, other=0.0)
            along_k = tl.load(p_rows + B.to(tl.int64) * T * HV + (t + i) * HV, real, other=0.0)
            dq = q_norm[:, None] * (dq - q * along_q[:, None])
            dk = k_norm[:, None] * (dk - k * along_k[:, None])
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

"""Backward, last kernel: from the score gradients, the two scans and the states to the gradients of q, k and the gate input.

With P_i the log decay summed from the start of a chunk of 64 tokens to token i, Q_i from it to the end, S the entering state,
dS' the gradient of the leaving one, and dM, dA [64, 64] from `products.py`:

    d(qd) = scale do S^T      d(kd) = -dD S^T      d(ke) = U dS'^T            what the two states say
    dq_i  = e^{P_i} d(qd)_i + sum_j dM_ij e^{P_i - P_j} k_j
    dk_i  = e^{P_i} d(kd)_i + sum_j dA_ij e^{P_i - P_j} k_j                            as the row of a pair
          + e^{Q_i} d(ke)_i + sum_j e^{P_j - P_i} (dM_ji q_j + dA_ji k_j)               as its column
    d(log decay) summed to i: dP_i = q_i dq_i + k_i (dk_i as row - dk_i as column), and to the chunk's end:
          dP_C += sum_i ke_i d(ke)_i + decay sum_v S dS'

Pairs are grouped in levels as in `prepare.py`: level b holds those whose tokens lie in the two halves of one aligned run of 2b
tokens, with the border between the halves as anchor, so no exponent is positive. Of a level everything is a product of full
[64, 64] and [64, BS] tiles: the exponents (a matrix of zeros and ones times the log decays: sums, never differences), and the
four sums over pairs (the scores' gradients with all other levels masked out). The masked part is wasted tensor work, a
quarter to nine tenths of it, but tensor cores are idle here anyway, and a loop over levels is short code: six walks over
tiles of 16 tokens, each waiting for its own small loads, took 3.7 ms where this takes TIME (H = 96, T = 8192, K = 128,
H200). Inside a tile of 16 a bounded gate takes the tile's middle as anchor (16 tokens stay in float32's range).

A pair adds to dP at its row what it subtracts at its column. Both sides multiply the same rounded operands, so that the
two cancel in the sum over later tokens: with q and k unrounded on one side a fast gate's gradient drowned in what was
left (9.8e-2 of it at log decays near -5, bfloat16). A token's pair with itself has no decay and is left out.
Parameter gradients leave as one partial sum a chunk and are added in a fixed order, so two runs agree to the bit.
"""

from __future__ import annotations

import torch
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
    quick_exp2,
    round_mantissa,
    sigmoid,
)


def sums(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[5, 64, 64] of zeros and ones: of which tokens j the log decay counts for token i. From the chunk's start to i; from i
    to its end; at levels 32 and 16, between i and the border of its run; and j >= i."""
    i, j = torch.arange(64, device=device)[:, None], torch.arange(64, device=device)[None, :]
    level = [(i // b == j // b) & ((j > i) ^ (i // b % 2 == 1)) for b in (32, 16)]
    return torch.stack([j <= i, j > i, *level, j >= i]).to(dtype)


@triton.jit
def tokens(p, m):
    return tl.load(p, m, other=0.0).to(tl.float32)


@triton.jit
def unit_of(p, block, v0, V: tl.constexpr, BU: tl.constexpr, UNITS: tl.constexpr):
    """What `replay.keep` divided the value channels from v0 on by, for the walks' blocks of BU."""
    unit = 1.0
    if UNITS:
        unit = tl.load(p + block * ((V + BU - 1) // BU) + v0 // BU)
    return unit


@triton.jit
def _from_states(
    p_to, p_u, p_dd, p_s, p_ds, to_unit_p, u_unit_p, dd_unit_p, s_unit_p, ds_unit_p, block, real, c,
    HV: tl.constexpr, HAS_DO: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BU: tl.constexpr, BK: tl.constexpr,
    BS: tl.constexpr, PREC: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """scale do S^T, dD S^T, U dS'^T [64, BS] and sum_v S dS' [BS]."""
    t = tl.arange(0, 64)
    dqd = tl.zeros([64, BS], tl.float32)
    dkd = tl.zeros([64, BS], tl.float32)
    dke = tl.zeros([64, BS], tl.float32)
    both = tl.zeros([BS], tl.float32)
    for v0 in tl.range(0, V, BV, num_stages=STAGES):
        x = v0 + tl.arange(0, BV)
        m_v = x < V
        m = real[:, None] & m_v[None, :]
        at = (t * (HV * V))[:, None] + x[None, :]
        S = tl.load(p_s + x[:, None] * BK + c[None, :], m_v[:, None], other=0.0)
        dS = tl.load(p_ds + x[:, None] * BK + c[None, :], m_v[:, None], other=0.0)
        s_unit = unit_of(s_unit_p, block, v0, V, BU, UNITS)
        ds_unit = unit_of(ds_unit_p, block, v0, V, BU, UNITS)
        both += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=0) * (s_unit * ds_unit)
        if HAS_DO:
            do = tl.load(p_to + at, m, other=0.0)
            dqd += tl.dot(do, S, input_precision=PREC) * (unit_of(to_unit_p, block, v0, V, BU, UNITS) * s_unit)
        dd = tl.load(p_dd + at, m, other=0.0)
        dkd += tl.dot(dd, S, input_precision=PREC) * (unit_of(dd_unit_p, block, v0, V, BU, UNITS) * s_unit)
        u = tl.load(p_u + at, m, other=0.0)
        dke += tl.dot(u, dS, input_precision=PREC) * (unit_of(u_unit_p, block, v0, V, BU, UNITS) * ds_unit)
    return dqd, dkd, dke, both


@triton.jit
def later(x, sums_p, TERM: tl.constexpr):
    """Sums over a token and all later ones [64, BS], good to float32: what cancels there must have been kept."""
    t = tl.arange(0, 64)
    w = tl.load(sums_p + 4 * 4096 + t[:, None] * 64 + t[None, :]).to(TERM)
    if tl.float32 == TERM:
        return tl.dot(w, x, input_precision="tf32x3")
    else:
        high = x.to(TERM)
        x -= high.to(tl.float32)
        middle = x.to(TERM)
        low = (x - middle.to(tl.float32)).to(TERM)
        return tl.dot(w, high, tl.dot(w, middle, tl.dot(w, low)))


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


@triton.jit
def across(i, j, b: tl.constexpr):
    """Pairs of level b: row i in the second and column j in the first half of one run of 2b tokens."""
    return (i // b % 2 == 1) & (j // b % 2 == 0) & (i // (2 * b) == j // (2 * b))


@triton.jit
def level_sums(which: tl.constexpr, sums_p, g, PREC: tl.constexpr):
    """A matrix of zeros and ones of `SUMS` times the log decays: sums of numbers of one sign, never a difference."""
    t = tl.arange(0, 64)
    w = tl.load(sums_p + which * 4096 + t[:, None] * 64 + t[None, :])
    return tl.dot(w.to(g.dtype), g, input_precision=PREC)


@triton.jit
def _inside_tiles(
    p_d, q, k, g, unit, bound, GATE: tl.constexpr, OP: tl.constexpr, WIDE: tl.constexpr, PREC: tl.constexpr
):
    """All pairs inside tiles of 16 tokens, from [4, 16, BS]: dq, dk and dP."""
    tile = tl.arange(0, 4)[:, None, None] * 16
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    at = (tile + i) * 64 + (tile + j)
    dM = tl.load(p_d + at)
    dA = tl.load(p_d + 4096 + at)
    own = tl.sum(tl.where(i == j, dM.to(tl.float32), 0.0), axis=2)[:, :, None] * unit
    dM = tl.where(i > j, dM, 0.0)
    dq = own * k  # a token with itself: no decay between, so nothing for dP
    dk = own * q
    if GATE == GATE_BOUNDED:
        w = tl.broadcast_to((j <= i).to(g.dtype), [4, 16, 16])
        x = tl.dot(w, g, input_precision=PREC) - bound * (8.0 * LOG2E)
        up = quick_exp2(x)
        down = quick_exp2(-x)
        qu = q * up
        ku = k * up
        kd = k * down
        if tl.float32 == WIDE:
            qu = round_mantissa(qu, PREC)
            ku = round_mantissa(ku, PREC)
            kd = round_mantissa(kd, PREC)
        else:
            qu = qu.to(WIDE)
            ku = ku.to(WIDE)
            kd = kd.to(WIDE)
        M = dM.to(WIDE)
        A = dA.to(WIDE)
        q1 = tl.dot(M, kd, input_precision=PREC) * unit
        row = tl.dot(A, kd, input_precision=PREC) * unit
        col = tl.dot(tl.trans(M, 0, 2, 1), qu, input_precision=PREC)
        col = tl.dot(tl.trans(A, 0, 2, 1), ku, col, input_precision=PREC) * unit
        return dq + q1 * up, dk + row * up + col * down, qu * q1 + ku * row - kd * col
    else:
        dP = q * 0.0
        for level in tl.range(0, 4, num_stages=1):
            upper = (i >> level) % 2 == 1
            w = ((i >> level) == (j >> level)) & ((j > i) ^ upper)
            e = quick_exp2(tl.dot(tl.broadcast_to(w.to(g.dtype), [4, 16, 16]), g, input_precision=PREC))
            m = upper & ((j >> level) % 2 == 0) & ((i >> (level + 1)) == (j >> (level + 1)))
            M = tl.where(m, dM, 0.0).to(OP)
            A = tl.where(m, dA, 0.0).to(OP)
            q1, d, p = _both_ways(M, A, tl.trans(M, 0, 2, 1), tl.trans(A, 0, 2, 1), q, k, e, upper, unit, OP, PREC)
            dq += q1
            dk += d
            dP += p
        return dq, dk, dP


@triton.jit
def _both_ways(M, A, Mt, At, q, k, e, upper, unit, OP: tl.constexpr, PREC: tl.constexpr):
    """dq, dk and dP of the pairs of one level, in which a token is the row or the column of all its pairs."""
    qe = (q * e).to(OP)
    ke = (k * e).to(OP)
    q1 = tl.dot(M, ke, input_precision=PREC) * unit
    d = tl.dot(A, ke, input_precision=PREC)
    d = tl.dot(Mt, qe, d, input_precision=PREC)
    d = tl.dot(At, ke, d, input_precision=PREC) * unit
    return q1 * e, d * e, qe * q1 + tl.where(upper, ke * d, -(ke * d))


@triton.jit
def _between_tiles(p_d, b: tl.constexpr, sums_p, q, k, g, unit, OP: tl.constexpr, PREC: tl.constexpr):
    """Level b in {16, 32}: dq, dk and dP, [64, BS]."""
    t = tl.arange(0, 64)
    i = t[:, None]
    j = t[None, :]
    m = across(i, j, b)
    M = tl.load(p_d + i * 64 + j, m, other=0.0).to(OP)
    A = tl.load(p_d + 4096 + i * 64 + j, m, other=0.0).to(OP)
    e = quick_exp2(level_sums(2 if b == 32 else 3, sums_p, g, PREC))
    return _both_ways(M, A, tl.trans(M), tl.trans(A), q, k, e, i // b % 2 == 1, unit, OP, PREC)


@triton.jit(do_not_specialize=["B", "T", "N", "slots", "tiles"])
def gradients_kernel(
    q_p, k_p, g_p, A_log_p, dt_bias_p, cu_p, to_p, u_p, dd_p, s_p, ds_p, to_unit_p, u_unit_p, dd_unit_p, s_unit_p, ds_unit_p,
    log_p, decay_p, d_p, d_unit_p, sums_p, norm_p, rows_p, dq_p, dk_p, dz_p, ddt_p, dA_log_p,
    sqb, sqt, sqh, skb, skt, skh, sgb, sgt, sgh,
    B, T, N, slots, tiles, bound,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BU: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_DT: tl.constexpr, PACKED: tl.constexpr,
    L2NORM: tl.constexpr, HAS_DO: tl.constexpr, OP: tl.constexpr, WIDE: tl.constexpr, PREC: tl.constexpr,
    TERM: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a chunk of 64 tokens, value head and slice of BS channels.

    u, dd, to = scale do [B, T, HV, V]; s, ds [HV, slots, V, BK]; their units [HV, slots, V / BU]. From `prepare.py` the log2
    decays log [HV, tiles, 16, BK] and norm [HV, tiles, 3, 16]; decay [HV, slots, BK] of whole chunks from `join.py`. From
    `products.py` d [HV, slots, 2, 64, 64] with d_unit [HV, slots], rows [2, B, T, HV].
    Writes dq, dk, dz [B, T, HV, K], ddt and dA_log [slots, HV, K].
    """
    C: tl.constexpr = 64
    NS: tl.constexpr = BK // BS
    pid = tl.program_id(0).to(tl.int64)
    c = (pid % NS).to(tl.int32) * BS + tl.arange(0, BS)
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
    block = h * slots + slot
    p_q = q_p + batch * sqb + h // GROUP * sqh + row * sqt
    p_k = k_p + batch * skb + h // GROUP * skh + row * skt
    p_z = g_p + batch * sgb + h * sgh + row * sgt
    p_norm = norm_p + (h * tiles + tile0) * 48
    p_d = d_p + block * (2 * C * C)
    unit = tl.load(d_unit_p + block)
    rate = 1.0
    if HAS_A:
        rate = decay_rate(tl.load(A_log_p + h))
    bias = tl.zeros([BS], tl.float32)
    if HAS_DT:
        bias = tl.load(dt_bias_p + h * K + c, m_c, other=0.0)

    p_log = log_p + (h * tiles + tile0) * (16 * BK)
    # What the states say comes first: its three sums take the registers that q, k and the decay need later.
    t = tl.arange(0, C)
    real = t < left
    m = real[:, None] & m_c[None, :]
    at_norm = t // 16 * 48 + t % 16
    at = (batch * T + row) * HV + h
    dqd, dkd, dke, both = _from_states(
        to_p + at * V, u_p + at * V, dd_p + at * V, s_p + block * (V * BK), ds_p + block * (V * BK), to_unit_p, u_unit_p,
        dd_unit_p, s_unit_p, ds_unit_p, block, real, c, HV, HAS_DO, V, BV, BU, BK, BS, PREC, UNITS, STAGES,
    )  # fmt: skip
    q = tokens(p_q + (t[:, None] * sqt + c[None, :]), m)
    k = tokens(p_k + (t[:, None] * skt + c[None, :]), m)
    if L2NORM:
        q *= tl.load(p_norm + 16 + at_norm, real, other=0.0)[:, None]
        k *= tl.load(p_norm + at_norm, real, other=0.0)[:, None]
    g = tl.load(p_log + (t[:, None] * BK + c[None, :]), real[:, None], other=0.0)
    near = quick_exp2(level_sums(0, sums_p, g, PREC))
    dq = dqd * near
    dkd *= near
    dke *= quick_exp2(level_sums(1, sums_p, g, PREC))
    dk = dke - dkd
    dP = q * dq - k * (dkd + dke)
    carry = both * tl.load(decay_p + block * BK + c) + tl.sum(k * dke, axis=0)

    for level in tl.static_range(0, 2):
        tl.debug_barrier()
        q1, d, p = _between_tiles(p_d, 16 << level, sums_p, q, k, g, unit, OP, PREC)
        dq += q1
        dk += d
        dP += p

    tl.debug_barrier()
    t3 = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
    real3 = t3 < left
    at_norm3 = t3 // 16 * 48 + t3 % 16
    m3 = real3[:, :, None] & m_c[None, None, :]
    q = tokens(p_q + (t3[:, :, None] * sqt + c[None, None, :]), m3)
    k = tokens(p_k + (t3[:, :, None] * skt + c[None, None, :]), m3)
    if L2NORM:
        q *= tl.load(p_norm + 16 + at_norm3, real3, other=0.0)[:, :, None]
        k *= tl.load(p_norm + at_norm3, real3, other=0.0)[:, :, None]
    g = tl.load(p_log + (t3[:, :, None] * BK + c[None, None, :]), real3[:, :, None], other=0.0)
    q1, d, p = _inside_tiles(p_d, q, k, g, unit, bound, GATE, OP, WIDE, PREC)
    dq += tl.reshape(q1, [C, BS])
    dk += tl.reshape(d, [C, BS])
    dP += tl.reshape(p, [C, BS])
    tl.debug_barrier()
    dg = later(dP, sums_p, TERM) + carry[None, :]
    if L2NORM:
        p_rows = rows_p + at
        along_q = tl.load(p_rows + t * HV, real, other=0.0)
        along_k = tl.load(p_rows + B.to(tl.int64) * T * HV + t * HV, real, other=0.0)
        q_norm = tl.load(p_norm + 16 + at_norm, real, other=0.0)
        k_norm = tl.load(p_norm + at_norm, real, other=0.0)
        q = tokens(p_q + (t[:, None] * sqt + c[None, :]), m)
        k = tokens(p_k + (t[:, None] * skt + c[None, :]), m)
        dq = q_norm[:, None] * (dq - q * (q_norm * along_q)[:, None])
        dk = k_norm[:, None] * (dk - k * (k_norm * along_k)[:, None])
    out = t[:, None] * (HV * K) + c[None, :]
    tl.store(dq_p + at * K + out, dq.to(dq_p.dtype.element_ty), m)
    tl.store(dk_p + at * K + out, dk.to(dk_p.dtype.element_ty), m)
    z = tokens(p_z + (t[:, None] * sgt + c[None, :]), m) + bias[None, :]
    g2 = tl.where(m, log2_decay(z, rate, bound, GATE), 0.0)
    dz, dA_log = _gate_gradient(dg, z, g2, rate, bound, GATE)
    tl.store(dz_p + at * K + out, dz.to(dz_p.dtype.element_ty), m)
    if HAS_DT:
        tl.store(ddt_p + p_sum, tl.sum(tl.where(m, dz, 0.0), axis=0), m_c)
    if HAS_A:
        tl.store(dA_log_p + p_sum, tl.sum(tl.where(m, dA_log, 0.0), axis=0), m_c)

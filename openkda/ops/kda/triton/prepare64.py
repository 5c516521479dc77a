"""First kernel of the backward in chunks of 64: everything of one chunk that does not need the entering state.

What `prepare.py` computes for 16 tokens, for four tiles of 16 at once, a warp a tile: pairs inside tiles as products of
[4, 16, 16] and [4, 16, BC] (a bounded gate around the tile's middle, any other in levels), pairs between tiles as levels 16 and
32 of full [64, 64] products. No exponent is positive but the bounded tile's, and exponents come from products of the log
decays with matrices of zeros and ones (`gradients.sums`). A walk over chunks of 64 then takes a quarter of the steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.gate_math import (
    GATE_BOUNDED,
    LOG2E,
    decay_rate,
    find_sequence,
    log2_decay,
    round_mantissa,
    sigmoid,
)
from openkda.ops.kda.triton.gradients import across, level_sums, tokens
from openkda.ops.kda.triton.prepare import A_LIMIT, BETA_FLOOR, X_LIMIT


@triton.jit
def _inside_tiles(q, k, g, bound, BC: tl.constexpr, GATE: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr):
    """Scores of all pairs inside tiles, [4, 16, 16] from [4, 16, BC]: (k k, earlier tokens only; q k, the token itself too)."""
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    if GATE == GATE_BOUNDED:
        w = tl.broadcast_to((j <= i).to(g.dtype), [4, 16, 16])
        x = tl.dot(w, g, input_precision=PREC) - bound * (8.0 * LOG2E)
        up = tl.exp2(x)
        kt = tl.trans(round_mantissa(k * tl.exp2(-x), PREC), 0, 2, 1)
        A = tl.dot(round_mantissa(k * up, PREC), kt, input_precision=PREC)
        M = tl.dot(round_mantissa(q * up, PREC), kt, input_precision=PREC)
        return tl.where(i > j, A, 0.0), tl.where(i >= j, M, 0.0)
    else:
        A = tl.zeros([4, 16, 16], tl.float32)
        M = tl.where(i == j, tl.sum(q * k, axis=2)[:, :, None], 0.0)
        for level in tl.range(0, 4, num_stages=1):
            upper = (i >> level) % 2 == 1
            w = ((i >> level) == (j >> level)) & ((j > i) ^ upper)
            e = tl.exp2(tl.dot(tl.broadcast_to(w.to(g.dtype), [4, 16, 16]), g, input_precision=PREC))
            m = upper & ((j >> level) % 2 == 0) & ((i >> (level + 1)) == (j >> (level + 1)))
            ke = (k * e).to(OP)
            kt = tl.trans(ke, 0, 2, 1)
            A += tl.where(m, tl.dot(ke, kt, input_precision=PREC), 0.0)
            M += tl.where(m, tl.dot((q * e).to(OP), kt, input_precision=PREC), 0.0)
        return A, M


@triton.jit
def _invert_tiles(A, PREC: tl.constexpr):
    """(I + A)^-1 of four strictly lower triangular [16, 16], by block substitution as in `prepare.py`."""
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    W = tl.where(i == j, 1.0, 0.0) - tl.where((i % 2 == 1) & (j + 1 == i), A, 0.0)
    for level in tl.static_range(1, 4):
        inner = tl.dot(tl.where(across(i, j, 1 << level), A, 0.0), W, input_precision=PREC)
        W -= tl.dot(W, inner, input_precision=PREC)
        W = tl.clamp(W, -X_LIMIT, X_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return W


@triton.jit
def _on_the_diagonal(x):
    """[4, 16, 16] -> [64, 64] with zeros off the tiles."""
    i = tl.arange(0, 64)
    wide = tl.broadcast_to(tl.reshape(x, [64, 16])[:, None, :], [64, 4, 16])
    return tl.where(i[:, None] // 16 == i[None, :] // 16, tl.reshape(wide, [64, 64]), 0.0)


@triton.jit
def _norm(p, m, eps):
    x = tokens(p, m)
    return tl.rsqrt(tl.sum(x * x, axis=1) + eps)


@triton.jit(do_not_specialize=["sbb", "sbt", "sbh", "T", "N", "slots"])
def prepare64_kernel(
    q_p, k_p, g_p, beta_p, A_log_p, dt_bias_p, cu_p, sums_p,
    kd_p, qd_p, ke_p, tm_p, decay_p, norm_p,
    sqb, sqt, sqh, skb, skt, skh, sgb, sgt, sgh, sbb, sbt, sbh,
    T, N, slots, bound, eps,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_DT: tl.constexpr, PACKED: tl.constexpr,
    L2NORM: tl.constexpr, SIGMOID: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One program a chunk and value head. Writes kd, qd, ke [HV, slots, 64, BK], tm = T and M [HV, slots, 2, 64, 64], decay
    [HV, slots, BK], norm [HV, slots, 2, 64] = what k and q are multiplied by."""
    C: tl.constexpr = 64
    GT: tl.constexpr = tl.float32 if tl.float32 == OP else tl.float16
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
    row = start + first
    left = (length - first).to(tl.int32)
    block = h * slots + slot
    p_q = q_p + batch * sqb + h // GROUP * sqh + row * sqt
    p_k = k_p + batch * skb + h // GROUP * skh + row * skt
    p_z = g_p + batch * sgb + h * sgh + row * sgt
    t = tl.arange(0, C)
    t3 = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
    real = t < left
    rate = 1.0
    if HAS_A:
        rate = decay_rate(tl.load(A_log_p + h))
    p_norm = norm_p + block * (2 * C)
    if L2NORM:
        all_c = tl.arange(0, BK)
        whole = real[:, None] & (all_c < K)[None, :]
        tl.store(p_norm + t, _norm(p_k + (t[:, None] * skt + all_c[None, :]), whole, eps))
        tl.store(p_norm + C + t, _norm(p_q + (t[:, None] * sqt + all_c[None, :]), whole, eps))
        tl.debug_barrier()  # read below in another layout
    A3 = tl.zeros([4, 16, 16], tl.float32)
    M3 = tl.zeros([4, 16, 16], tl.float32)
    A = tl.zeros([C, C], tl.float32)
    M = tl.zeros([C, C], tl.float32)
    i = t[:, None]
    j = t[None, :]
    for c0 in tl.range(0, BK, BC, num_stages=1):
        c = c0 + tl.arange(0, BC)
        m_c = c < K
        bias = tl.zeros([BC], tl.float32)
        if HAS_DT:
            bias = tl.load(dt_bias_p + h * K + c, m_c, other=0.0)
        m3 = (t3 < left)[:, :, None] & m_c[None, None, :]
        q = tokens(p_q + (t3[:, :, None] * sqt + c[None, None, :]), m3)
        k = tokens(p_k + (t3[:, :, None] * skt + c[None, None, :]), m3)
        if L2NORM:
            k *= tl.load(p_norm + t3)[:, :, None]
            q *= tl.load(p_norm + C + t3)[:, :, None]
        z = tokens(p_z + (t3[:, :, None] * sgt + c[None, None, :]), m3) + bias[None, None, :]
        g = tl.where(m3, log2_decay(z, rate, bound, GATE), 0.0).to(GT)
        A1, M1 = _inside_tiles(q, k, g, bound, BC, GATE, OP, PREC)
        A3 += A1
        M3 += M1
        tl.debug_barrier()
        m = real[:, None] & m_c[None, :]
        q = tokens(p_q + (t[:, None] * sqt + c[None, :]), m)
        k = tokens(p_k + (t[:, None] * skt + c[None, :]), m)
        if L2NORM:
            k *= tl.load(p_norm + t)[:, None]
            q *= tl.load(p_norm + C + t)[:, None]
        z = tokens(p_z + (t[:, None] * sgt + c[None, :]), m) + bias[None, :]
        g = tl.where(m, log2_decay(z, rate, bound, GATE), 0.0)
        tl.store(decay_p + block * BK + c, tl.exp2(tl.sum(g, axis=0)))
        g = g.to(GT)
        for level in tl.static_range(0, 2):
            pair = across(i, j, 16 << level)
            e = tl.exp2(level_sums(3 - level, sums_p, g, PREC))
            ke = (k * e).to(OP)
            kt = tl.trans(ke)
            A += tl.where(pair, tl.dot(ke, kt, input_precision=PREC), 0.0)
            M += tl.where(pair, tl.dot((q * e).to(OP), kt, input_precision=PREC), 0.0)
        at = block * (C * BK) + (i * BK + c[None, :])
        near = tl.exp2(level_sums(0, sums_p, g, PREC))
        tl.store(kd_p + at, (k * near).to(OP))
        tl.store(qd_p + at, (q * near).to(OP))
        tl.store(ke_p + at, (k * tl.exp2(level_sums(1, sums_p, g, PREC))).to(OP))

    p_beta = beta_p + batch * sbb + h * sbh + row * sbt
    beta3 = tokens(p_beta + t3 * sbt, t3 < left)
    beta = tokens(p_beta + t * sbt, real)
    if SIGMOID:
        beta3 = sigmoid(beta3)
        beta = sigmoid(beta)
    beta3 = tl.where(t3 < left, tl.maximum(beta3, BETA_FLOOR), 0.0)  # the backward divides by beta (products.py)
    beta = tl.where(real, tl.maximum(beta, BETA_FLOOR), 0.0)
    A3 = tl.clamp(A3 * beta3[:, :, None], -A_LIMIT, A_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    A = tl.clamp(A * beta[:, None], -A_LIMIT, A_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    M += _on_the_diagonal(M3)
    square = tm_p + block * (2 * C * C) + (i * C + j)
    tl.store(square + C * C, M.to(tm_p.dtype.element_ty))
    X = _on_the_diagonal(_invert_tiles(A3, "tf32x3"))
    for level in tl.static_range(0, 2):
        pair = across(i, j, 16 << level)
        inner = tl.dot(round_mantissa(tl.where(pair, A, 0.0), PREC), round_mantissa(X, PREC), input_precision=PREC)
        X -= tl.dot(round_mantissa(X, PREC), round_mantissa(inner, PREC), input_precision=PREC)
        X = tl.clamp(X, -X_LIMIT, X_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    tl.store(square, (X * beta[None, :]).to(tm_p.dtype.element_ty))

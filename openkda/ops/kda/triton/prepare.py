"""First kernel of the chunkwise forward: everything of one chunk that does not need the entering state.

With P the log decay summed from the chunk's start to a token (inclusive) and Q from the token (exclusive) to its end:

    kd = k exp(P)    qd = q exp(P)    ke = k exp(Q)    decay = exp(P + Q)
    A[t, s] = beta_t k_t . (k_s exp(P_t - P_s)), s < t        M[t, s] = q_t . (k_s exp(P_t - P_s)), s <= t
    T = (I + A)^-1 Diag(beta)

P_t - P_s <= 0, but its factors exp(P_t) exp(-P_s) overflow for strong decay. So pairs are grouped in levels: level b holds the
pairs whose tokens lie in the two halves of one aligned run of 2b tokens; with the end of the first half as anchor
both exponents are <= 0, and one product of a tile with itself serves the whole level. Levels run down to 16
for a gate bounded at m >= -5 (16 tokens of it stay in float32 range), down to 1 otherwise. An anchor is never later than
the row token, so the future cannot touch the past by a bit. Source: Kimi Linear report, section 4 and appendix C.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import (
    GATE_BOUNDED,
    LOG2E,
    decay_rate,
    find_sequence,
    log2_decay,
    power_of_two,
    round_mantissa,
    sigmoid,
)

A_LIMIT = tl.constexpr(1e12)  # keeps tokens of absurd size finite, so that their zero weight in the past stays zero
X_LIMIT = tl.constexpr(1e24)
BETA_FLOOR = tl.constexpr(1e-12)
WALK_LIMIT = tl.constexpr(2.0**30)


@triton.jit
def _level(k, q, e, upper, same, OP: tl.constexpr, PREC: tl.constexpr):
    """Scores of one level: e = decay between each token and the anchor, upper = token lies in the second half."""
    ke = (k * e).to(OP)
    qe = (q * e).to(OP)
    kt = tl.trans(ke)
    s_k = tl.dot(ke, kt, input_precision=PREC)
    s_q = tl.dot(qe, kt, input_precision=PREC)
    m = (upper[:, None] & (upper[None, :] == 0)) & same
    return tl.where(m, s_k, 0.0), tl.where(m, s_q, 0.0)


@triton.jit
def _token_factor(p, real, eps, K: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr, SCALED: tl.constexpr):
    """(f, u) per token: the operand is x * f, and the true row is operand * u (u = 1 unless SCALED)."""
    c = tl.arange(0, BK)
    f = real.to(tl.float32)
    u = f
    if L2NORM:
        x = tl.load(p + c[None, :], real[:, None] & (c < K)[None, :], other=0.0).to(tl.float32)
        f = tl.rsqrt(tl.sum(x * x, axis=1) + eps)
    elif SCALED:  # tokens of any length: each carries its own power of two
        x = tl.load(p + c[None, :], real[:, None] & (c < K)[None, :], other=0.0).to(tl.float32)
        f, u = power_of_two(tl.max(tl.abs(x), axis=1), 0)
    return f, u


@triton.jit
def _bounded_level(k, q, P, bound, C: tl.constexpr, PREC: tl.constexpr, ROUND: tl.constexpr):
    """All pairs inside tiles of 16 at once: |P - middle| <= 40, so both factors fit float32. The middle is a constant."""
    t = tl.arange(0, C)
    middle = bound * (8.0 * LOG2E)
    up = tl.exp2(P - middle)
    down = tl.exp2(middle - P)
    kc = k * down
    ku = k * up
    qu = q * up
    if ROUND:  # the tensor core cuts off, which does not average out
        kc = round_mantissa(kc, PREC)
        ku = round_mantissa(ku, PREC)
        qu = round_mantissa(qu, PREC)
    kc = tl.trans(kc)
    tile = t[:, None] // 16 == t[None, :] // 16
    A = tl.where(tile & (t[:, None] > t[None, :]), tl.dot(ku, kc, input_precision=PREC), 0.0)
    M = tl.where(tile & (t[:, None] >= t[None, :]), tl.dot(qu, kc, input_precision=PREC), 0.0)
    return A, M, up * tl.exp2(middle), down, -middle


@triton.jit
def _first_levels(k, q, g, P, C: tl.constexpr, BK: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr):
    """All pairs inside tiles of 16, exact for any gate: the diagonal, level 1, and levels 2 to 8."""
    t = tl.arange(0, C)
    M = tl.where(t[:, None] == t[None, :], tl.sum(q * k, axis=1)[:, None], 0.0)
    odd = t % 2 == 1
    A, M1 = _level(k, q, tl.where(odd[:, None], tl.exp2(g), 1.0), odd, t[:, None] // 2 == t[None, :] // 2, OP, PREC)
    M += M1
    for j in tl.static_range(1, 4):
        A1, M1 = _fine_level(k, q, P, 1 << j, C, BK, OP, PREC)
        A += A1
        M += M1
    return A, M


@triton.jit
def _fine_level(k, q, P, b: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr):
    """Level b in {2, 4, 8}, from prefix sums P over tiles of 16."""
    t = tl.arange(0, C)
    upper = (t // b) % 2 == 1
    row = tl.arange(0, 2 * b)
    runs = tl.reshape(P, [C // (2 * b), 2 * b, BC])
    anchor = tl.sum(tl.where((row == b - 1)[None, :, None], runs, 0.0), axis=1)
    x = tl.where((row >= b)[None, :, None], runs - anchor[:, None, :], anchor[:, None, :] - runs)
    e = tl.exp2(tl.reshape(x, [C, BC]))
    return _level(k, q, e, upper, t[:, None] // (2 * b) == t[None, :] // (2 * b), OP, PREC)


@triton.jit
def _coarse_level(
    k, q, near, far, R, b: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr
):
    """Level b in {16, 32}, from the decays over runs of b tokens: near = from the run's start to the token (inclusive), far =
    from the token (exclusive) to its end, R = log2 decay of the whole run; and the same three over runs of 2b."""
    t = tl.arange(0, C)
    upper = (t // b) % 2 == 1
    e = tl.where(upper[:, None], near, far)
    A, M = _level(k, q, e, upper, t[:, None] // (2 * b) == t[None, :] // (2 * b), OP, PREC)
    NR: tl.constexpr = C // (2 * b)
    side = tl.arange(0, 2)
    pair = tl.reshape(R, [NR, 2, BC])
    before = tl.sum(tl.where(side[None, :, None] == 0, pair, 0.0), axis=1)
    after = tl.sum(tl.where(side[None, :, None] == 1, pair, 0.0), axis=1)
    second = side[None, :, None, None] == 1
    up = tl.where(second, tl.exp2(before)[:, None, None, :], 1.0)
    down = tl.where(second, 1.0, tl.exp2(after)[:, None, None, :])
    near = tl.reshape(tl.reshape(near, [NR, 2, b, BC]) * up, [C, BC])
    far = tl.reshape(tl.reshape(far, [NR, 2, b, BC]) * down, [C, BC])
    return A, M, near, far, before + after


@triton.jit
def _merge(A, W, b: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr):
    """From the inverses of the b x b diagonal blocks of I + A to those of the 2b x 2b ones."""
    t = tl.arange(0, C)
    upper = (t // b) % 2 == 1
    m = (upper[:, None] & (upper[None, :] == 0)) & (t[:, None] // (2 * b) == t[None, :] // (2 * b))
    inner = tl.dot(tl.where(m, A, 0.0), W, input_precision=PREC)
    W -= tl.dot(W, inner, input_precision=PREC)
    return tl.clamp(W, -X_LIMIT, X_LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _invert(A, C: tl.constexpr, PREC: tl.constexpr):
    """(I + A)^-1 for strictly lower triangular A, by block substitution: [[X, 0], [-Y A X, Y]] for blocks of 2, 4, ..

    No power of A is ever formed: for keys of nearly one direction those grow without bound before they cancel.
    """
    t = tl.arange(0, C)
    pair = (t[:, None] % 2 == 1) & (t[None, :] + 1 == t[:, None])
    W = tl.where(t[:, None] == t[None, :], 1.0, 0.0) - tl.where(pair, A, 0.0)
    for j in tl.static_range(1, 6):
        if 1 << j < C:
            W = _merge(A, W, 1 << j, C, PREC)
    return W


REST = tl.constexpr(2.0**11)


@triton.jit
def _through_T(X, x_p, out_p, block, C: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, OP: tl.constexpr):
    """X [C, C] times a chunk's kd or ke, neither rounded: for keys of nearly one direction the rows of X take differences of
    theirs (dv off by 3.7e-3 with rounded ones, 1.4e-3 so). In 16 bits x_p holds the rounded ones, and out_p, where the product
    goes, what rounding took from them, times REST."""
    t = tl.arange(0, C)
    high = X.to(OP)
    low = (X - high.to(tl.float32)).to(OP)
    for c0 in tl.range(0, BK, BC, num_stages=1):
        at = block * (C * BK) + t[:, None] * BK + (c0 + tl.arange(0, BC))[None, :]
        x = tl.load(x_p + at)
        if tl.float16 == OP:
            out = tl.dot(high, tl.load(out_p + at)) * (1.0 / REST)
            out = tl.dot(high, x, tl.dot(low, x, out))
        else:
            out = tl.dot(X, x, input_precision="tf32x3")
        tl.store(out_p + at, out.to(OP))


@triton.jit(do_not_specialize=["sqr", "skr", "sgr", "sbb", "sbt", "sbh", "T", "N", "slots"])
def prepare_kernel(
    q_p, k_p, g_p, beta_p, A_log_p, dt_bias_p, cu_p,
    kd_p, qd_p, ke_p, tm_p, decay_p, token_p, w_p, y_p, unit_p,
    sqr, sqt, sqh, skr, skt, skh, sgr, sgt, sgh, sbb, sbt, sbh,
    T, N, slots, bound, eps,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    C: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_DT: tl.constexpr, PACKED: tl.constexpr,
    L2NORM: tl.constexpr, SIGMOID: tl.constexpr, SCALED: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
    INNER_PREC: tl.constexpr, SMALL: tl.constexpr, WALK: tl.constexpr = False,
):  # fmt: skip
    """One program a chunk and value head. Writes kd, qd, ke [HV, slots, C, BK], tm = T and M [HV, slots, 2, C, C].

    WALK: for the backward (`walks.py`), M T in place of M; w = T kd and y = T^T ke [HV, slots, C, BK], each row with a power
    of two in unit [HV, slots, 2, C]; and with L2NORM or SCALED what k and q were multiplied by, as the first rows of token
    [HV, slots, 3, C]. Keys divided by u have the same states with values divided by u and beta times u^2: SCALED leaves T and M
    of those.
    """
    pid = tl.program_id(0)
    head = pid % HV
    slot = pid // HV
    if PACKED:
        n = find_sequence(slot, cu_p, N, C)
        start = tl.load(cu_p + n).to(tl.int64)
        first = (slot - (start // C + n)).to(tl.int32) * C
        length = (tl.load(cu_p + n + 1).to(tl.int64) - start).to(tl.int32)
        batch = (n * 0).to(tl.int64)
    else:
        per = tl.cdiv(T, C)
        batch = (slot // per).to(tl.int64)
        first = slot % per * C
        length = T
        start = batch * 0
    if first >= length:
        return
    h = head.to(tl.int64)
    t = tl.arange(0, C)
    real = t < length - first
    rows = start + first + t
    q_p += (head // GROUP).to(tl.int64) * sqh + (batch * sqr + rows)[:, None] * sqt
    k_p += (head // GROUP).to(tl.int64) * skh + (batch * skr + rows)[:, None] * skt
    g_p += h * sgh + (batch * sgr + rows)[:, None] * sgt
    beta = tl.load(beta_p + batch * sbb + h * sbh + rows * sbt, real, other=0.0).to(tl.float32)
    if SIGMOID:
        beta = tl.where(real, sigmoid(beta), 0.0)
    if WALK:  # the backward divides by beta (products.py)
        beta = tl.where(real, tl.where(tl.abs(beta) < BETA_FLOOR, BETA_FLOOR, beta), 0.0)
    rate = 1.0
    if HAS_A:
        rate = decay_rate(tl.load(A_log_p + h))
    block = h * slots + slot
    k_size, k_up = _token_factor(k_p, real, eps, K, BK, L2NORM, SCALED)
    q_size, q_up = _token_factor(q_p, real, eps, K, BK, L2NORM, SCALED)
    if WALK and SCALED:  # as far as operands need it: what is beyond stays an operand's own size
        k_size = tl.clamp(k_size, 1.0 / WALK_LIMIT, WALK_LIMIT)
        q_size = tl.clamp(q_size, 1.0 / WALK_LIMIT, WALK_LIMIT)
        k_up = 1.0 / k_size
    if WALK and (L2NORM or SCALED):
        tl.store(token_p + (block * 3 + 0) * C + t, k_size)
        tl.store(token_p + (block * 3 + 1) * C + t, q_size)

    A = tl.zeros([C, C], tl.float32)
    M = tl.zeros([C, C], tl.float32)
    NB: tl.constexpr = C // 16
    last = tl.arange(0, 16) == 15
    for c0 in tl.range(0, BK, BC, num_stages=1):
        c = c0 + tl.arange(0, BC)
        mask = real[:, None] & (c < K)[None, :]
        k = tl.load(k_p + c[None, :], mask, other=0.0).to(tl.float32) * k_size[:, None]
        q = tl.load(q_p + c[None, :], mask, other=0.0).to(tl.float32) * q_size[:, None]
        z = tl.load(g_p + c[None, :], mask, other=0.0).to(tl.float32)
        if HAS_DT:
            z += tl.load(dt_bias_p + h * K + c, c < K, other=0.0)[None, :]
        g = tl.where(mask, log2_decay(z, rate, bound, GATE), 0.0)
        P3 = tl.cumsum(tl.reshape(g, [NB, 16, BC]), axis=1)
        R = tl.sum(tl.where(last[None, :, None], P3, 0.0), axis=1)
        P = tl.reshape(P3, [C, BC])
        if GATE == GATE_BOUNDED:
            A1, M1, near, down, shift = _bounded_level(k, q, P, bound, C, INNER_PREC, WALK)
            far = tl.reshape(tl.reshape(down, [NB, 16, BC]) * tl.exp2(R + shift)[:, None, :], [C, BC])
        else:
            A1, M1 = _first_levels(k, q, g, P, C, BC, OP, PREC)
            near = tl.exp2(P)
            far = tl.exp2(tl.reshape(R[:, None, :] - P3, [C, BC]))
        A += A1
        M += M1
        for j in tl.static_range(0, 2):
            if 16 << j < C:
                A1, M1, near, far, R = _coarse_level(k, q, near, far, R, 16 << j, C, BC, OP, PREC)
                A += A1
                M += M1
        at = block * (C * BK) + t[:, None] * BK + c[None, :]
        kd = k * near
        ke = k * far
        tl.store(kd_p + at, kd.to(OP))
        tl.store(qd_p + at, (q * near).to(OP))
        tl.store(ke_p + at, ke.to(OP))
        if WALK and tl.float16 == OP:
            tl.store(w_p + at, ((kd - kd.to(OP).to(tl.float32)) * REST).to(OP))
            tl.store(y_p + at, ((ke - ke.to(OP).to(tl.float32)) * REST).to(OP))
        tl.store(decay_p + block * BK + c, tl.exp2(tl.sum(R, axis=0)))

    A = A * beta[:, None]
    if SCALED:
        A = A * k_up[:, None] * k_up[None, :]
    A = tl.clamp(A, -A_LIMIT, A_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    X = _invert(A, C, INNER_PREC if tl.float32 == OP else "tf32x3")
    if SCALED:
        # the limits keep absurd tokens finite: their weight in earlier tokens is 0, and 0 * inf would not be
        X = X * k_up[:, None] * tl.clamp(beta * k_up, -X_LIMIT, X_LIMIT, propagate_nan=tl.PropagateNan.ALL)[None, :]
        X = tl.clamp(X, -X_LIMIT, X_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        if not WALK:
            t_down, t_up = power_of_two(tl.max(tl.abs(X), axis=1), 0)
            X *= t_down[:, None]
            tl.store(token_p + (block * 3 + 0) * C + t, 1.0 / k_up)
            tl.store(token_p + (block * 3 + 1) * C + t, t_up)
            tl.store(token_p + (block * 3 + 2) * C + t, q_up)
    else:
        X = X * beta[None, :]
    square = tm_p + block * (2 * C * C) + t[:, None] * C + t[None, :]
    if WALK:
        M = tl.dot(M, X, input_precision="tf32x3")
    tl.store(square, round_mantissa(X, SMALL))
    tl.store(square + C * C, round_mantissa(M, SMALL))
    if WALK:
        w_up, w_down = power_of_two(tl.sum(tl.abs(X), axis=1), 10)
        y_up, y_down = power_of_two(tl.sum(tl.abs(X), axis=0), 10)
        tl.store(unit_p + block * (2 * C) + t, w_down)
        tl.store(unit_p + block * (2 * C) + C + t, y_down)
        tl.debug_barrier()  # kd and ke are read again by other threads than those that wrote them
        _through_T(X * w_up[:, None], kd_p, w_p, block, C, BK, BC, OP)
        _through_T(tl.trans(X) * y_up[:, None], ke_p, y_p, block, C, BK, BC, OP)

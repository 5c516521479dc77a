"""The fused decoding kernel for one token: a program owns one query head of one sequence.

    q, k, v = silu(conv)       D = v - S^T k       S <- S + k (beta D)^T       o = S^T q       y = norm(o) w sigmoid(gate)

The state tile is read once and written once; what a token adds is a few vectors. Convolutions of q, k and v are the rows of one
vector, each element in one thread: as vectors of their own, v's would be loaded and computed by every warp again, whose
scattered loads (windows of three, weights of four) then cost as much as the tile. q and k meet the state before their
lengths are known; the lengths are divided out of the results, and sums that can be taken together are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import decay_rate, log2_decay, sigmoid


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _rows(x, N: tl.constexpr):
    """x [4 N] -> its first three quarters."""
    x = tl.reshape(x, [4, N])
    r = tl.arange(0, 4)[:, None]
    return tl.reduce((tl.where(r == 0, x, 0.0), tl.where(r == 1, x, 0.0), tl.where(r == 2, x, 0.0)), 0, _add3)


@triton.jit
def _head(x, N: tl.constexpr, M: tl.constexpr):
    """The first N of the M entries of x."""
    if N < M:
        x = tl.reshape(x, [M // N, N])
        x = tl.sum(tl.where((tl.arange(0, M // N) == 0)[:, None], x, 0.0), axis=0)
    return x


@triton.jit
def _cut(x, BM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """q [BK], k [BK] and v [BV] of a vector [4 BM]."""
    q, k, v = _rows(x, BM)
    return _head(q, BK, BM), _head(k, BK, BM), _head(v, BV, BM)


@triton.jit
def _first(x, N: tl.constexpr):
    """x [2 N] -> its first half."""
    return tl.sum(tl.where((tl.arange(0, 2) == 0)[:, None], tl.reshape(x, [2, N]), 0.0), axis=0)


@triton.jit
def _window(p, step, mask, W: tl.constexpr):
    """The last three inputs, oldest first (zeros where W is smaller)."""
    c = tl.load(p + (W - 2) * step, mask, other=0.0).to(tl.float32)
    b = c * 0.0
    a = b
    if W >= 3:
        b = tl.load(p + (W - 3) * step, mask, other=0.0).to(tl.float32)
    if W == 4:
        a = tl.load(p, mask, other=0.0).to(tl.float32)
    return a, b, c


@triton.jit
def _conv(p, a, b, c, x, mask, W: tl.constexpr, OUT: tl.constexpr):
    """silu(convolution), rounded as the activations are; p: the channels' weights."""
    y = c * tl.load(p + W - 2, mask, other=0.0) + x * tl.load(p + W - 1, mask, other=0.0)
    if W >= 3:
        y += b * tl.load(p + W - 3, mask, other=0.0)
    if W == 4:
        y += a * tl.load(p, mask, other=0.0)
    return (y * sigmoid(y)).to(OUT).to(tl.float32)


@triton.jit
def _store_window(p, step, b, c, x, mask, W: tl.constexpr):
    """The window moved on by x."""
    if W == 4:
        tl.store(p, b.to(p.dtype.element_ty), mask)
    if W >= 3:
        tl.store(p + (W - 3) * step, c.to(p.dtype.element_ty), mask)
    tl.store(p + (W - 2) * step, x.to(p.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["sbb", "sbh"])
def one_kernel(
    q_p, k_p, v_p, g_p, beta_p, og_p, y_p,
    wq_p, wk_p, wv_p, norm_p, A_log_p, dt_bias_p, slots_p,
    s0_p, cq0_p, ck0_p, cv0_p, s1_p, cq1_p, ck1_p, cv1_p,
    sqn, skn, svn, sgn, sgh, sbb, sbh, son, soh,
    s0n, s0h, s0k, cq0n, cq0d, cq0w, ck0n, ck0d, ck0w, cv0n, cv0d, cv0w,
    s1n, s1h, s1k, cq1n, cq1d, cq1w, ck1n, ck1d, ck1w, cv1n, cv1d, cv1w,
    bound, eps, norm_eps, scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, W: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_DT: tl.constexpr,
    INDEXED: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """BM: the larger of BK and BV. DENSE: each sequence's state and windows are contiguous, so that their offsets are known
    when compiling."""
    if DENSE:
        s0h = K * V
        s1h = K * V
        s0k = V
        s1k = V
    pid = tl.program_id(0)
    hq = pid % H
    row = (pid // H).to(tl.int64)
    x = tl.arange(0, BV)
    m_v = x < V
    c = tl.arange(0, BK)
    m_s = (c < K)[:, None] & m_v[None, :]
    HV: tl.constexpr = H * GROUP
    OUT: tl.constexpr = y_p.dtype.element_ty
    place = row
    if INDEXED:
        place = tl.load(slots_p + row).to(tl.int64)
        if place < 0:
            for j in range(GROUP):
                tl.store(y_p + (row * HV + hq * GROUP + j) * V + x, tl.zeros([BV], OUT), m_v)
            return
    e = tl.arange(0, 4 * BM)
    is_q = e < BM
    is_k = (e >= BM) & (e < 2 * BM)
    is_v = (e >= 2 * BM) & (e < 3 * BM)
    at = e % BM
    m_e = tl.where(is_v, at < V, (at < K) & (e < 2 * BM))
    z_at = tl.arange(0, 2 * BK)
    for j in tl.static_range(GROUP):
        head = hq * GROUP + j
        h = head.to(tl.int64)
        p_s = s0_p + place * s0n + h * s0h + c[:, None] * s0k + x[None, :]
        S = tl.load(p_s, m_s, other=0.0).to(tl.float32)
        chan = tl.where(is_v, head * V, hq * K) + at
        p = tl.where(is_q, q_p + row * sqn, tl.where(is_k, k_p + row * skn, v_p + row * svn)) + chan
        new = tl.load(p, m_e, other=0.0).to(tl.float32)
        p0 = tl.where(is_q, cq0_p + place * cq0n, tl.where(is_k, ck0_p + place * ck0n, cv0_p + place * cv0n))
        p1 = tl.where(is_q, cq1_p + place * cq1n, tl.where(is_k, ck1_p + place * ck1n, cv1_p + place * cv1n))
        if DENSE:
            p0 += chan * (W - 1)
            p1 += chan * (W - 1)
            step0 = 1
            step1 = 1
        else:
            p0 += chan * tl.where(is_q, cq0d, tl.where(is_k, ck0d, cv0d))
            p1 += chan * tl.where(is_q, cq1d, tl.where(is_k, ck1d, cv1d))
            step0 = tl.where(is_q, cq0w, tl.where(is_k, ck0w, cv0w))
            step1 = tl.where(is_q, cq1w, tl.where(is_k, ck1w, cv1w))
        wa, wb, wc = _window(p0, step0, m_e, W)
        z = tl.load(g_p + row * sgn + h * sgh + z_at, z_at < K, other=0.0).to(tl.float32)
        if HAS_DT:
            z += tl.load(dt_bias_p + h * K + z_at, z_at < K, other=0.0)
        rate = 1.0
        if HAS_A:
            rate = decay_rate(tl.load(A_log_p + h))
        beta = sigmoid(tl.load(beta_p + row * sbb + h * sbh).to(tl.float32))
        og = tl.load(og_p + row * son + h * soh + x, m_v, other=0.0).to(tl.float32)
        norm = tl.load(norm_p + x, m_v, other=0.0).to(tl.float32)
        mixed = _conv(tl.where(is_q, wq_p, tl.where(is_k, wk_p, wv_p)) + chan * W, wa, wb, wc, new, m_e, W, OUT)
        _store_window(p1, step1, wb, wc, new, m_e & (is_v | (j == GROUP - 1)), W)
        q, k, v = _cut(mixed, BM, BK, BV)
        qq, kk, kq = tl.reduce((q * q, k * k, q * k), 0, _add3)
        rq = tl.rsqrt(qq + eps)
        rk = tl.rsqrt(kk + eps)
        S *= _first(tl.exp2(log2_decay(z, rate, bound, GATE)), BK)[:, None]
        sk, sq = tl.reduce((S * k[:, None], S * q[:, None]), 0, _add2)
        u = beta * (v - sk * rk)
        o = ((sq * rq + kq * (rq * rk) * u) * scale).to(OUT).to(tl.float32)
        S += k[:, None] * (u * rk)[None, :]
        p_s = s1_p + place * s1n + h * s1h + c[:, None] * s1k + x[None, :]
        tl.store(p_s, S.to(s1_p.dtype.element_ty), m_s)
        o *= tl.rsqrt(tl.sum(tl.where(m_v, o * o, 0.0), axis=0) / V + norm_eps)
        tl.store(y_p + (row * HV + h) * V + x, (o * norm * sigmoid(og)).to(OUT), m_v)

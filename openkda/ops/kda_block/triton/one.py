"""The fused decoding kernel for one token: a program owns one query head of one sequence.

    q, k, v = silu(conv)       D = v - S^T k       S <- S + k (beta D)^T       o = S^T q       y = norm(o) w sigmoid(gate)

The state tile is read once and written once; what a token adds is a few vectors. So the kernel is latency: waiting for the
state, then reductions in a row. Convolved q and k meet the state before their lengths are known (the lengths are divided
out of the results), q and k go through one tile [K, 2], and sums that can be taken together are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openkda.ops.triton.api import decay_rate, log2_decay, sigmoid


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _halves(x, N: tl.constexpr):
    """x [2 N] -> its two halves."""
    x = tl.reshape(x, [2, N])
    first = (tl.arange(0, 2) == 0)[:, None]
    return tl.reduce((tl.where(first, x, 0.0), tl.where(first, 0.0, x)), 0, _add2)


@triton.jit
def _first(x, N: tl.constexpr):
    """x [2 N] -> its first half."""
    return tl.sum(tl.where((tl.arange(0, 2) == 0)[:, None], tl.reshape(x, [2, N]), 0.0), axis=0)


@triton.jit
def _prefetch(p, BYTES: tl.constexpr):
    """Asks for BYTES bytes from p on in the L2 cache; a hint, whatever is written there meanwhile."""
    piece: tl.constexpr = BYTES // 8
    at = p.to(tl.int64) + tl.arange(0, 256) // 32 * piece  # one address a warp: the instruction goes lane by lane else
    size = tl.full([256], piece, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [at, size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
def _taps(p, mask, W: tl.constexpr):
    """Weights of the window and of the current token."""
    x = tl.load(p + W - 1, mask, other=0.0)
    c = tl.load(p + W - 2, mask, other=0.0)
    b = c * 0.0
    a = b
    if W >= 3:
        b = tl.load(p + W - 3, mask, other=0.0)
    if W == 4:
        a = tl.load(p, mask, other=0.0)
    return a, b, c, x


@triton.jit
def _conv(a, b, c, x, wa, wb, wc, wx, W: tl.constexpr, OUT: tl.constexpr):
    """silu(convolution), rounded as the activations are."""
    y = c * wc + x * wx
    if W >= 3:
        y += b * wb
    if W == 4:
        y += a * wa
    return (y * sigmoid(y)).to(OUT).to(tl.float32)


@triton.jit
def _store_window(p, step, b, c, x, mask, W: tl.constexpr):
    """The window moved on by x."""
    if W == 4:
        tl.store(p, b.to(p.dtype.element_ty), mask)
    if W >= 3:
        tl.store(p + (W - 3) * step, c.to(p.dtype.element_ty), mask)
    tl.store(p + (W - 2) * step, x.to(p.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["P", "sbb", "sbh"])
def one_kernel(
    q_p, k_p, v_p, g_p, beta_p, og_p, y_p,
    wq_p, wk_p, wv_p, norm_p, A_log_p, dt_bias_p, slots_p,
    s0_p, cq0_p, ck0_p, cv0_p, s1_p, cq1_p, ck1_p, cv1_p,
    sqn, skn, svn, sgn, sgh, sbb, sbh, son, soh,
    s0n, s0h, s0k, cq0n, cq0d, cq0w, ck0n, ck0d, ck0w, cv0n, cv0d, cv0w,
    s1n, s1h, s1k, cq1n, cq1d, cq1w, ck1n, ck1d, ck1w, cv1n, cv1d, cv1w,
    P, bound, eps, norm_eps, scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_DT: tl.constexpr, INDEXED: tl.constexpr,
    DENSE: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """DENSE: each sequence's state and windows are contiguous, so that their offsets are known when compiling."""
    if DENSE:
        s0h = K * V
        s1h = K * V
        s0k = V
        s1k = V
        cq0d = W - 1
        cq0w = 1
        ck0d = W - 1
        ck0w = 1
        cv0d = W - 1
        cv0w = 1
        cq1d = W - 1
        cq1w = 1
        ck1d = W - 1
        ck1w = 1
        cv1d = W - 1
        cv1w = 1
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
    if AHEAD:  # while the kernel in front still runs: a hint only, because that kernel may yet write this slot
        if INDEXED:
            place = tl.load(slots_p + row, cache_modifier=".cg").to(tl.int64)
            place = tl.minimum(tl.maximum(place, 0), P - 1)
        _prefetch(
            s0_p + place * s0n + hq * GROUP * s0h, GROUP * K * V * (s0_p.dtype.element_ty.primitive_bitwidth // 8)
        )
        place = row
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if INDEXED:
        place = tl.load(slots_p + row, cache_modifier=".cg").to(tl.int64)
        if place < 0:
            for j in range(GROUP):
                tl.store(y_p + (row * HV + hq * GROUP + j) * V + x, tl.zeros([BV], OUT), m_v)
            return
    # q and k as the halves of one vector: one of 128 alone would be computed sixteenfold by 8 warps, in the state's layout
    e = tl.arange(0, 2 * BK)
    is_q = e < BK
    chan = hq * K + e % BK
    m_k = e % BK < K
    xqk = tl.load(tl.where(is_q, q_p + row * sqn + chan, k_p + row * skn + chan), m_k, other=0.0).to(tl.float32)
    p0 = tl.where(is_q, cq0_p + place * cq0n + chan * cq0d, ck0_p + place * ck0n + chan * ck0d)
    qa, qb, qc = _window(p0, 1 if DENSE else tl.where(is_q, cq0w, ck0w), m_k, W)
    fa, fb, fc, fx = _taps(tl.where(is_q, wq_p, wk_p) + chan * W, m_k, W)
    for j in tl.static_range(GROUP):
        head = hq * GROUP + j
        h = head.to(tl.int64)
        p_s = s0_p + place * s0n + h * s0h + c[:, None] * s0k + x[None, :]
        if STREAM:
            S = tl.load(p_s, m_s, other=0.0, eviction_policy="evict_first").to(tl.float32)
        else:
            S = tl.load(p_s, m_s, other=0.0).to(tl.float32)
        z = tl.load(g_p + row * sgn + h * sgh + e, e < K, other=0.0).to(tl.float32)
        if HAS_DT:
            z += tl.load(dt_bias_p + h * K + e, e < K, other=0.0)
        rate = 1.0
        if HAS_A:
            rate = decay_rate(tl.load(A_log_p + h))
        beta = sigmoid(tl.load(beta_p + row * sbb + h * sbh).to(tl.float32))
        vchan = head * V + x
        pv0 = cv0_p + place * cv0n + vchan * cv0d
        va, vb, vc = _window(pv0, cv0w, m_v, W)
        xv = tl.load(v_p + row * svn + vchan, m_v, other=0.0).to(tl.float32)
        ga, gb, gc, gx = _taps(wv_p + vchan * W, m_v, W)
        og = tl.load(og_p + row * son + h * soh + x, m_v, other=0.0).to(tl.float32)
        norm = tl.load(norm_p + x, m_v, other=0.0).to(tl.float32)
        if j == 0:
            qk = _conv(qa, qb, qc, xqk, fa, fb, fc, fx, W, OUT)
            q, k = _halves(qk, BK)
            qq, kk, kq = tl.reduce((q * q, k * k, q * k), 0, _add3)
            rq = tl.rsqrt(qq + eps)
            rk = tl.rsqrt(kk + eps)
        v = _conv(va, vb, vc, xv, ga, gb, gc, gx, W, OUT)
        decay = _first(tl.exp2(log2_decay(z, rate, bound, GATE)), BK)
        S *= decay[:, None]
        sk, sq = tl.reduce((S * k[:, None], S * q[:, None]), 0, _add2)
        u = beta * (v - sk * rk)
        o = ((sq * rq + kq * (rq * rk) * u) * scale).to(OUT).to(tl.float32)
        S += k[:, None] * (u * rk)[None, :]
        p_s = s1_p + place * s1n + h * s1h + c[:, None] * s1k + x[None, :]
        if STREAM:
            tl.store(p_s, S.to(s1_p.dtype.element_ty), m_s, eviction_policy="evict_first")
        else:
            tl.store(p_s, S.to(s1_p.dtype.element_ty), m_s)
        o *= tl.rsqrt(tl.sum(tl.where(m_v, o * o, 0.0), axis=0) / V + norm_eps)
        tl.store(y_p + (row * HV + h) * V + x, (o * norm * sigmoid(og)).to(OUT), m_v)
        _store_window(cv1_p + place * cv1n + vchan * cv1d, cv1w, vb, vc, xv, m_v, W)
    p1 = tl.where(is_q, cq1_p + place * cq1n + chan * cq1d, ck1_p + place * ck1n + chan * ck1d)
    _store_window(p1, 1 if DENSE else tl.where(is_q, cq1w, ck1w), qb, qc, xqk, m_k, W)

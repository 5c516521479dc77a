"""The fused decoding kernel: a program owns one query head of one sequence, its convolution windows and its states.

The states of the head's value heads are read once and written once; everything else stays in registers. A state tile
[K, V] is whole, because the norm of the output needs all V channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import decay_rate, delta_step, log2_decay, sigmoid, unit_length


@triton.jit
def _window(p, stride_w, mask, W: tl.constexpr):
    """The last three inputs before the first token, oldest first (zeros where W is smaller)."""
    a = tl.zeros(mask.shape, tl.float32)  # two zeros: see the loop in short_conv/triton/gradient.py
    b = tl.zeros(mask.shape, tl.float32)
    if W == 4:
        a = tl.load(p, mask, other=0.0).to(tl.float32)
    if W >= 3:
        b = tl.load(p + (W - 3) * stride_w, mask, other=0.0).to(tl.float32)
    return a, b, tl.load(p + (W - 2) * stride_w, mask, other=0.0).to(tl.float32)


@triton.jit
def _taps(p, mask, W: tl.constexpr):
    """Weights of the window and of the current token."""
    a = tl.zeros(mask.shape, tl.float32)
    b = a
    if W == 4:
        a = tl.load(p, mask, other=0.0)
    if W >= 3:
        b = tl.load(p + W - 3, mask, other=0.0)
    return a, b, tl.load(p + W - 2, mask, other=0.0), tl.load(p + W - 1, mask, other=0.0)


@triton.jit
def _conv(a, b, c, x, wa, wb, wc, wx):
    y = a * wa + b * wb + c * wc + x * wx
    return y * sigmoid(y)


@triton.jit
def _store_window(p, stride_w, a, b, c, mask, W: tl.constexpr):
    if W == 4:
        tl.store(p, a.to(p.dtype.element_ty), mask)
    if W >= 3:
        tl.store(p + (W - 3) * stride_w, b.to(p.dtype.element_ty), mask)
    tl.store(p + (W - 2) * stride_w, c.to(p.dtype.element_ty), mask)


@triton.jit
def _head(
    S, q, k, v, z, beta, og, norm, rate, bound, eps, norm_eps, scale, m_v, V: tl.constexpr, GATE: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """One token of one value head, from the convolved q, k, v to the gated norm: (new S, y)."""
    S, o = delta_step(S, unit_length(q, eps), unit_length(k, eps), v, log2_decay(z, rate, bound, GATE), sigmoid(beta))
    o = (o * scale).to(OUT).to(tl.float32)
    o *= tl.rsqrt(tl.sum(tl.where(m_v, o * o, 0.0), axis=0) / V + norm_eps)
    return S, (o * norm * sigmoid(og)).to(OUT)


@triton.jit(do_not_specialize=["T", "sqr", "skr", "svr", "sgr", "sor", "sbb", "sbt", "sbh"])
def block_kernel(
    q_p, k_p, v_p, g_p, beta_p, og_p, y_p,
    wq_p, wk_p, wv_p, norm_p, A_log_p, dt_bias_p, slots_p,
    s0_p, cq0_p, ck0_p, cv0_p, s1_p, cq1_p, ck1_p, cv1_p, all_p,
    sqr, sqt, skr, skt, svr, svt, sgr, sgt, sgh, sbb, sbt, sbh, sor, sot, soh,
    s0n, s0h, s0k, cq0n, cq0d, cq0w, ck0n, ck0d, ck0w, cv0n, cv0d, cv0w,
    s1n, s1h, s1k, cq1n, cq1d, cq1w, ck1n, ck1d, ck1w, cv1n, cv1d, cv1w,
    T, bound, eps, norm_eps, scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_DT: tl.constexpr, INDEXED: tl.constexpr,
    KEEP_ALL: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, query head); T tokens, GROUP value heads one after the other."""
    pid = tl.program_id(0)
    hq = pid % H
    row = (pid // H).to(tl.int64)
    c = tl.arange(0, BK)
    x = tl.arange(0, BV)
    m_k = c < K
    m_v = x < V
    m_s = m_k[:, None] & m_v[None, :]
    HV: tl.constexpr = H * GROUP
    OUT: tl.constexpr = y_p.dtype.element_ty
    place = row
    if INDEXED:
        place = tl.load(slots_p + row).to(tl.int64)
        if place < 0:
            for i in range(T * GROUP):
                p = y_p + ((row * T + i // GROUP) * HV + hq * GROUP + i % GROUP) * V + x
                tl.store(p, tl.zeros([BV], y_p.dtype.element_ty), m_v)
            return
    chan = hq * K + c
    qa0, qb0, qc0 = _window(cq0_p + place * cq0n + chan * cq0d, cq0w, m_k, W)
    ka0, kb0, kc0 = _window(ck0_p + place * ck0n + chan * ck0d, ck0w, m_k, W)
    wqa, wqb, wqc, wqx = _taps(wq_p + chan * W, m_k, W)
    wka, wkb, wkc, wkx = _taps(wk_p + chan * W, m_k, W)
    norm = tl.load(norm_p + x, m_v, other=0.0).to(tl.float32)
    for j in tl.static_range(GROUP):
        head = hq * GROUP + j
        h = head.to(tl.int64)
        S = tl.load(s0_p + place * s0n + h * s0h + c[:, None] * s0k + x[None, :], m_s, other=0.0).to(tl.float32)
        vchan = head * V + x
        va, vb, vc = _window(cv0_p + place * cv0n + vchan * cv0d, cv0w, m_v, W)
        wva, wvb, wvc, wvx = _taps(wv_p + vchan * W, m_v, W)
        dt = tl.zeros([BK], tl.float32)
        if HAS_DT:
            dt = tl.load(dt_bias_p + h * K + c, m_k, other=0.0)
        rate = 1.0
        if HAS_A:
            rate = decay_rate(tl.load(A_log_p + h))
        qa, qb, qc = qa0, qb0, qc0
        ka, kb, kc = ka0, kb0, kc0
        if ONE:  # the common step without a loop: the loop's carried windows cost registers
            q = tl.load(q_p + row * sqr * sqt + chan, m_k, other=0.0).to(tl.float32)
            k = tl.load(k_p + row * skr * skt + chan, m_k, other=0.0).to(tl.float32)
            v = tl.load(v_p + row * svr * svt + vchan, m_v, other=0.0).to(tl.float32)
            z = tl.load(g_p + row * sgr * sgt + h * sgh + c, m_k, other=0.0).to(tl.float32) + dt
            beta = tl.load(beta_p + row * sbb + h * sbh).to(tl.float32)
            og = tl.load(og_p + row * sor * sot + h * soh + x, m_v, other=0.0).to(tl.float32)
            yq = _conv(qa, qb, qc, q, wqa, wqb, wqc, wqx).to(OUT).to(tl.float32)
            yk = _conv(ka, kb, kc, k, wka, wkb, wkc, wkx).to(OUT).to(tl.float32)
            yv = _conv(va, vb, vc, v, wva, wvb, wvc, wvx).to(OUT).to(tl.float32)
            qa, qb, qc = qb, qc, q
            ka, kb, kc = kb, kc, k
            va, vb, vc = vb, vc, v
            S, y = _head(S, yq, yk, yv, z, beta, og, norm, rate, bound, eps, norm_eps, scale, m_v, V, GATE, OUT)
            tl.store(y_p + (row * HV + h) * V + x, y, m_v)
            if KEEP_ALL:
                tl.store(all_p + (row * HV + h) * (K * V) + c[:, None] * V + x[None, :], S, m_s)
        else:
            for t in range(T):
                q = tl.load(q_p + (row * sqr + t) * sqt + chan, m_k, other=0.0).to(tl.float32)
                k = tl.load(k_p + (row * skr + t) * skt + chan, m_k, other=0.0).to(tl.float32)
                v = tl.load(v_p + (row * svr + t) * svt + vchan, m_v, other=0.0).to(tl.float32)
                z = tl.load(g_p + (row * sgr + t) * sgt + h * sgh + c, m_k, other=0.0).to(tl.float32) + dt
                beta = tl.load(beta_p + row * sbb + t * sbt + h * sbh).to(tl.float32)
                og = tl.load(og_p + (row * sor + t) * sot + h * soh + x, m_v, other=0.0).to(tl.float32)
                yq = _conv(qa, qb, qc, q, wqa, wqb, wqc, wqx).to(OUT).to(tl.float32)
                yk = _conv(ka, kb, kc, k, wka, wkb, wkc, wkx).to(OUT).to(tl.float32)
                yv = _conv(va, vb, vc, v, wva, wvb, wvc, wvx).to(OUT).to(tl.float32)
                qa, qb, qc = qb, qc, q
                ka, kb, kc = kb, kc, k
                va, vb, vc = vb, vc, v
                S, y = _head(S, yq, yk, yv, z, beta, og, norm, rate, bound, eps, norm_eps, scale, m_v, V, GATE, OUT)
                tl.store(y_p + ((row * T + t) * HV + h) * V + x, y, m_v)
                if KEEP_ALL:
                    tl.store(all_p + ((row * T + t) * HV + h) * (K * V) + c[:, None] * V + x[None, :], S, m_s)
        if not KEEP_ALL:
            p_s1 = s1_p + place * s1n + h * s1h + c[:, None] * s1k + x[None, :]
            tl.store(p_s1, S.to(s1_p.dtype.element_ty), m_s)
            _store_window(cv1_p + place * cv1n + vchan * cv1d, cv1w, va, vb, vc, m_v, W)
            if j == GROUP - 1:
                _store_window(cq1_p + place * cq1n + chan * cq1d, cq1w, qa, qb, qc, m_k, W)
                _store_window(ck1_p + place * ck1n + chan * ck1d, ck1w, ka, kb, kc, m_k, W)

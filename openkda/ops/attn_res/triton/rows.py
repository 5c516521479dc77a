"""The Attention Residuals mix of one token, its sources read once: an online softmax over them, with h in registers; and its
gradient, in two passes over the sources, of which the second finds them in the cache.

r = 1 / sqrt(mean v^2 + eps),  c = w . v,  s = r c;     m' = max(m, s),  h = h e^(m - m') + v e^(s - m'),  l likewise
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _take(v, w, h, m, l, D, eps):
    """h, m, l with one more source v [BD]; and its r and c."""
    r = tl.rsqrt(tl.sum(v * v, axis=0) / D + eps)
    c = tl.sum(v * w, axis=0)
    s = r * c
    top = tl.maximum(m, s)
    old, new = tl.exp(m - top), tl.exp(s - top)
    return h * old + v * new, top, l * old + new, r, c


@triton.jit
def _one(v_p, row, d, w, h, m, l, r_p, c_p, place, D, eps):
    v = tl.load(v_p + row * D + d, d < D, other=0.0).to(tl.float32)
    h, m, l, r, c = _take(v, w, h, m, l, D, eps)
    tl.store(r_p + place, r)
    tl.store(c_p + place, c)
    return h, m, l


@triton.jit(do_not_specialize=["rows"])
def mix_kernel(
    v0_p, v1_p, v2_p, v3_p, v4_p, v5_p, v6_p, v7_p, v8_p, w_p, h_p, r_p, c_p, D, rows, eps,
    N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Row by row: N of the nine sources [rows, D] -> h [rows, D], r and c [N, rows]."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    w = tl.load(w_p + d, d < D, other=0.0)
    h = tl.zeros([BD], tl.float32)
    m, l = float("-inf"), 0.0
    h, m, l = _one(v0_p, row, d, w, h, m, l, r_p, c_p, row, D, eps)
    if N > 1:
        h, m, l = _one(v1_p, row, d, w, h, m, l, r_p, c_p, row + rows, D, eps)
    if N > 2:
        h, m, l = _one(v2_p, row, d, w, h, m, l, r_p, c_p, row + 2 * rows, D, eps)
    if N > 3:
        h, m, l = _one(v3_p, row, d, w, h, m, l, r_p, c_p, row + 3 * rows, D, eps)
    if N > 4:
        h, m, l = _one(v4_p, row, d, w, h, m, l, r_p, c_p, row + 4 * rows, D, eps)
    if N > 5:
        h, m, l = _one(v5_p, row, d, w, h, m, l, r_p, c_p, row + 5 * rows, D, eps)
    if N > 6:
        h, m, l = _one(v6_p, row, d, w, h, m, l, r_p, c_p, row + 6 * rows, D, eps)
    if N > 7:
        h, m, l = _one(v7_p, row, d, w, h, m, l, r_p, c_p, row + 7 * rows, D, eps)
    if N > 8:
        h, m, l = _one(v8_p, row, d, w, h, m, l, r_p, c_p, row + 8 * rows, D, eps)
    tl.store(h_p + row * D + d, (h / l).to(h_p.dtype.element_ty), d < D)


@triton.jit
def merge_kernel(m_p, l_p, o_p, v_p, w_p, h_p, D, eps, BD: tl.constexpr):
    """Row by row: open softmax m, l [rows], o [rows, D], closed with v [rows, D] -> h."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    w = tl.load(w_p + d, d < D, other=0.0)
    o = tl.load(o_p + row * D + d, d < D, other=0.0)
    v = tl.load(v_p + row * D + d, d < D, other=0.0).to(tl.float32)
    h, _m, l, _r, _c = _take(v, w, o, tl.load(m_p + row), tl.load(l_p + row), D, eps)
    tl.store(h_p + row * D + d, (h / l).to(h_p.dtype.element_ty), d < D)


@triton.jit
def _pick(J: tl.constexpr, p0, p1, p2, p3, p4, p5, p6, p7, p8):
    p = p0
    if J == 1:
        p = p1
    if J == 2:
        p = p2
    if J == 3:
        p = p3
    if J == 4:
        p = p4
    if J == 5:
        p = p5
    if J == 6:
        p = p6
    if J == 7:
        p = p7
    if J == 8:
        p = p8
    return p


@triton.jit(do_not_specialize=["rows"])
def bank_kernel(
    v0_p, v1_p, v2_p, v3_p, v4_p, v5_p, v6_p, v7_p, v8_p, w_p, m_p, l_p, o_p, D, rows, eps,
    N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Program s * rows + t: the softmax of query s and row t over N sources, left open. w [S, D]; m, l [S, rows]; o with D."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid % rows
    d = tl.arange(0, BD)
    w = tl.load(w_p + pid // rows * D + d, d < D, other=0.0)
    h = tl.zeros([BD], tl.float32)
    m, l = float("-inf"), 0.0
    for j in tl.static_range(N):
        v_p = _pick(j, v0_p, v1_p, v2_p, v3_p, v4_p, v5_p, v6_p, v7_p, v8_p)
        v = tl.load(v_p + row * D + d, d < D, other=0.0).to(tl.float32)
        h, m, l, _r, _c = _take(v, w, h, m, l, D, eps)
    tl.store(m_p + pid, m)
    tl.store(l_p + pid, l)
    tl.store(o_p + pid * D + d, h, d < D)


@triton.jit(do_not_specialize=["rows", "each"])
def mix_gradient_kernel(
    v0_p, v1_p, v2_p, v3_p, v4_p, v5_p, v6_p, v7_p, v8_p, g_p, w_p, r_p, c_p, dv_p, dw_p, D, rows, each,
    N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A program is `each` rows: dv [N, rows, D], and its own part of dw [programs, D]; formulas in reference.Mix."""
    pid = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    i = tl.arange(0, 16)
    w = tl.load(w_p + d, d < D, other=0.0)
    dw = tl.zeros([BD], tl.float32)
    for row in range(pid * each, tl.minimum(pid * each + each, rows)):
        r = tl.load(r_p + i * rows + row, i < N, other=0.0)
        c = tl.load(c_p + i * rows + row, i < N, other=0.0)
        s = tl.where(i < N, r * c, float("-inf"))
        a = tl.exp(s - tl.max(s, 0))
        a = a / tl.sum(a, 0)
        g = tl.load(g_p + row * D + d, d < D, other=0.0).to(tl.float32)
        da = tl.zeros([16], tl.float32)
        for j in tl.static_range(N):
            v_p = _pick(j, v0_p, v1_p, v2_p, v3_p, v4_p, v5_p, v6_p, v7_p, v8_p)
            v = tl.load(v_p + row * D + d, d < D, other=0.0).to(tl.float32)
            da = tl.where(i == j, tl.sum(g * v, 0), da)
        ds = a * (da - tl.sum(a * da, 0))
        along_w = ds * r
        along_v = -ds * c * r * r * r / D
        for j in tl.static_range(N):
            v_p = _pick(j, v0_p, v1_p, v2_p, v3_p, v4_p, v5_p, v6_p, v7_p, v8_p)
            v = tl.load(v_p + row * D + d, d < D, other=0.0).to(tl.float32)
            here = i == j
            to_w = tl.sum(tl.where(here, along_w, 0.0), 0)
            dv = tl.sum(tl.where(here, a, 0.0), 0) * g + to_w * w + tl.sum(tl.where(here, along_v, 0.0), 0) * v
            tl.store(dv_p + (j * rows + row) * D + d, dv.to(dv_p.dtype.element_ty), d < D)
            dw += to_w * v
    tl.store(dw_p + pid * D + d, dw, d < D)

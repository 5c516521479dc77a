"""The Attention Residuals mix of one token, its sources read once: an online softmax over them, with h in registers.

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

"""Causal depthwise convolution + SiLU over batches and packs, its final window, and the one-token step.

Up to three tensors (q, k and v of a layer) share a launch: they differ in channels and memory, not in tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import find_sequence, quick_sigmoid, sigmoid


@triton.jit
def locate(slot, cu_p, T, N, BT: tl.constexpr, PACKED: tl.constexpr):
    """(sequence, batch row, its first token, its length, first token of the block `slot` within it)."""
    if PACKED:
        n = find_sequence(slot, cu_p, N, BT)
        start = tl.load(cu_p + n).to(tl.int64)
        length = (tl.load(cu_p + n + 1).to(tl.int64) - start).to(tl.int32)
        first = (slot - (start // BT + n)).to(tl.int32) * BT
        batch = start * 0
    else:
        per = tl.maximum(tl.cdiv(T, BT), 1)  # an empty sequence has one block too, which writes its window
        n = slot // per
        batch = n.to(tl.int64)
        start = batch * 0
        length = T
        first = slot % per * BT
    return n.to(tl.int64), batch, start, length, first


@triton.jit
def _before(x_p, s_p, sxt, ssw, at, mask, W: tl.constexpr, HAS_S: tl.constexpr):
    """Input `at` of a sequence for at >= -(W - 1): from the initial window below 0, else from x."""
    x = tl.load(x_p + at.to(tl.int64) * sxt, mask & (at >= 0), other=0.0).to(tl.float32)
    if HAS_S:
        x += tl.load(s_p + (at + W - 1) * ssw, mask & (at < 0) & (at >= 1 - W), other=0.0).to(tl.float32)
    return x


@triton.jit
def window(x_p, s_p, sxt, ssw, first, mask, BD: tl.constexpr, W: tl.constexpr, HAS_S: tl.constexpr):
    """The three inputs in front of token `first`, oldest first; zeros for what W lacks."""
    a = tl.zeros([BD], tl.float32)  # two zeros: see the loop in gradient.py
    b = tl.zeros([BD], tl.float32)
    if W == 4:
        a = _before(x_p, s_p, sxt, ssw, first - 3, mask, W, HAS_S)
    if W >= 3:
        b = _before(x_p, s_p, sxt, ssw, first - 2, mask, W, HAS_S)
    c = _before(x_p, s_p, sxt, ssw, first - 1, mask, W, HAS_S)
    return a, b, c


@triton.jit
def tensor_blocks(DA, DB, DC, BD: tl.constexpr, COUNT: tl.constexpr):
    """Blocks of BD channels in the first, in the second and in all of COUNT tensors."""
    NA = tl.cdiv(DA, BD)
    NB = 0
    blocks = NA
    if COUNT > 1:
        NB = tl.cdiv(DB, BD)
        blocks += NB
    if COUNT > 2:
        blocks += tl.cdiv(DC, BD)
    return NA, NB, blocks


@triton.jit
def taps(w_p, d, m, W: tl.constexpr):
    """Weights [D, W] of channels d as four vectors, oldest token first, zeros for what W lacks.

    Loaded one by one: as a tile to be split they would come sooner, but behind barriers, which hold up the first tokens.
    """
    p = w_p + d.to(tl.int64) * W
    wx = tl.load(p + W - 1, m, other=0.0).to(tl.float32)
    wc = tl.load(p + W - 2, m, other=0.0).to(tl.float32)
    wb = wc * 0.0
    wa = wb
    if W >= 3:
        wb = tl.load(p + W - 3, m, other=0.0).to(tl.float32)
    if W == 4:
        wa = tl.load(p, m, other=0.0).to(tl.float32)
    return wa, wb, wc, wx


@triton.jit
def silu_slope(y, QUICK: tl.constexpr):
    """(silu, its derivative) of y."""
    s = quick_sigmoid(y) if QUICK else sigmoid(y)
    return y * s, s * (1.0 + y * (1.0 - s))


@triton.jit
def mix(a, b, c, x, wa, wb, wc, wx, W: tl.constexpr):
    """The convolution of one token. What lies before the window is not multiplied by 0: it may be infinite."""
    if W == 4:
        y = a * wa + b * wb + c * wc + x * wx
    elif W == 3:
        y = b * wb + c * wc + x * wx
    else:
        y = c * wc + x * wx
    return y


@triton.jit
def _forward(
    x_p, w_p, s_p, y_p, o_p, sxr, sxt, ssn, ssd, ssw, D, block, n, batch, start, length, first, T,
    BT: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, HAS_S: tl.constexpr, SILU: tl.constexpr,
    QUICK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows first .. first + BT of one sequence, BD channels of one tensor; behind its last row also its final window."""
    d = block * BD + tl.arange(0, BD)
    m = d < D
    x_p += (batch * sxr + start) * sxt + d
    y_p += (batch * T + start + first) * D + d
    old = x_p
    if HAS_S:
        old = s_p + n * ssn + d * ssd
    wa, wb, wc, wx = taps(w_p, d, m, W)
    a, b, c = window(x_p, old, sxt, ssw, first, m, BD, W, HAS_S)
    p = x_p + first.to(tl.int64) * sxt
    for t in tl.range(first, tl.minimum(first + BT, length), STEP, num_stages=STAGES):
        for j in tl.static_range(STEP):
            live = m & (t + j < length)
            x = tl.load(p, live, other=0.0).to(tl.float32)
            y = mix(a, b, c, x, wa, wb, wc, wx, W)
            if SILU:
                y, _ = silu_slope(y, QUICK)
            tl.store(y_p, y.to(y_p.dtype.element_ty), live)
            p += sxt
            y_p += D
            a, b, c = b, c, x
    if first + BT >= length:
        for j in tl.static_range(W - 1):
            at = length - (W - 1) + j
            value = tl.load(x_p + at.to(tl.int64) * sxt, m & (at >= 0), other=0.0)
            if HAS_S:
                value = tl.where(at < 0, tl.load(old + (at + W - 1) * ssw, m & (at < 0), other=0.0), value)
            tl.store(o_p + (n * D + d) * (W - 1) + j, value, m)


@triton.jit(do_not_specialize=["xar", "xbr", "xcr", "T", "N"])
def conv_kernel(
    xa_p, wa_p, sa_p, ya_p, oa_p, xb_p, wb_p, sb_p, yb_p, ob_p, xc_p, wc_p, sc_p, yc_p, oc_p, cu_p,
    xar, xat, san, sad, saw, DA, xbr, xbt, sbn, sbd, sbw, DB, xcr, xct, scn, scd, scw, DC, T, N,
    BT: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr,
    PACKED: tl.constexpr, HAS_S: tl.constexpr, SILU: tl.constexpr, QUICK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a block of BT tokens of one sequence and BD channels of one of COUNT tensors: row after row, the window
    in registers, so that an input is read once. y [B, T, D] and windows o [N, D, W - 1] are contiguous."""
    pid = tl.program_id(0)
    NA, NB, blocks = tensor_blocks(DA, DB, DC, BD, COUNT)
    block = pid % blocks
    n, batch, start, length, first = locate(pid // blocks, cu_p, T, N, BT, PACKED)
    if (first >= length) & (first > 0):
        return
    if block < NA:
        _forward(xa_p, wa_p, sa_p, ya_p, oa_p, xar, xat, san, sad, saw, DA, block, n, batch, start, length, first, T,
                 BT, BD, STEP, W, HAS_S, SILU, QUICK, STAGES)  # fmt: skip
    elif COUNT > 1:
        if block < NA + NB:
            _forward(xb_p, wb_p, sb_p, yb_p, ob_p, xbr, xbt, sbn, sbd, sbw, DB, block - NA, n, batch, start, length,
                     first, T, BT, BD, STEP, W, HAS_S, SILU, QUICK, STAGES)  # fmt: skip
        elif COUNT > 2:
            _forward(xc_p, wc_p, sc_p, yc_p, oc_p, xcr, xct, scn, scd, scw, DC, block - NA - NB, n, batch, start,
                     length, first, T, BT, BD, STEP, W, HAS_S, SILU, QUICK, STAGES)  # fmt: skip


@triton.jit
def step_kernel(
    x_p, w_p, s_p, y_p, out_p, sxn, ssn, ssd, ssw, D, BD: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    """One token: y [N, D] and the window moved on by one."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(D, BD)
    n = (pid // blocks).to(tl.int64)
    d = (pid % blocks) * BD + tl.arange(0, BD)
    m = d < D
    y = tl.zeros([BD], tl.float32)
    for j in tl.static_range(W):
        if j < W - 1:  # noqa: SIM108 (a conditional expression would load both)
            x = tl.load(s_p + n * ssn + d * ssd + j * ssw, m, other=0.0)
        else:
            x = tl.load(x_p + n * sxn + d, m, other=0.0)
        y += x.to(tl.float32) * tl.load(w_p + d * W + j, m, other=0.0).to(tl.float32)
        if j > 0:
            tl.store(out_p + (n * D + d) * (W - 1) + j - 1, x, m)
    if SILU:
        y *= sigmoid(y)
    tl.store(y_p + n * D + d, y.to(y_p.dtype.element_ty), m)

"""Causal depthwise convolution + SiLU over batches and packs, its final window, and the one-token step."""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import find_sequence, sigmoid


@triton.jit
def _locate(slot, cu_p, T, N, BT: tl.constexpr, PACKED: tl.constexpr):
    """(sequence, batch row, its first token, its length, first token of the block `slot` within it)."""
    if PACKED:
        n = find_sequence(slot, cu_p, N, BT)
        start = tl.load(cu_p + n).to(tl.int64)
        length = (tl.load(cu_p + n + 1).to(tl.int64) - start).to(tl.int32)
        first = (slot - (start // BT + n)).to(tl.int32) * BT
        batch = start * 0
    else:
        per = tl.cdiv(T, BT)
        n = slot // per
        batch = n.to(tl.int64)
        start = batch * 0
        length = T
        first = slot % per * BT
    return n, batch, start, length, first


@triton.jit
def _before(x_p, s_p, sxt, ssw, at, mask, W: tl.constexpr, HAS_S: tl.constexpr):
    """Input `at` of a sequence for at >= -(W - 1): from the initial window below 0, else from x."""
    x = tl.load(x_p + at.to(tl.int64) * sxt, mask & (at >= 0), other=0.0).to(tl.float32)
    if HAS_S:
        x += tl.load(s_p + (at + W - 1) * ssw, mask & (at < 0) & (at >= 1 - W), other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["T", "N"])
def conv_kernel(
    x_p, w_p, s_p, cu_p, y_p, sxb, sxt, syb, syt, ssn, ssd, ssw, D, T, N,
    BT: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr, HAS_S: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """One program a block of BT tokens of one sequence and BD channels: row after row, the window in registers, so that an
    input is read once (four shifted loads of a tile took 0.157 ms where a copy takes 0.099)."""
    STEP: tl.constexpr = 8
    pid = tl.program_id(0)
    blocks = tl.cdiv(D, BD)
    n, batch, start, length, first = _locate(pid // blocks, cu_p, T, N, BT, PACKED)
    if first >= length:
        return
    d = (pid % blocks) * BD + tl.arange(0, BD)
    m = d < D
    x_p += batch * sxb + start * sxt + d
    y_p += batch * syb + start * syt + d
    old = x_p
    if HAS_S:
        old = s_p + n.to(tl.int64) * ssn + d * ssd
    a = tl.zeros([BD], tl.float32)
    b = a
    wa = a
    wb = a
    if W == 4:
        a = _before(x_p, old, sxt, ssw, first - 3, m, W, HAS_S)
        wa = tl.load(w_p + d * W, m, other=0.0).to(tl.float32)
    if W >= 3:
        b = _before(x_p, old, sxt, ssw, first - 2, m, W, HAS_S)
        wb = tl.load(w_p + d * W + W - 3, m, other=0.0).to(tl.float32)
    c = _before(x_p, old, sxt, ssw, first - 1, m, W, HAS_S)
    wc = tl.load(w_p + d * W + W - 2, m, other=0.0).to(tl.float32)
    wx = tl.load(w_p + d * W + W - 1, m, other=0.0).to(tl.float32)
    x_p += first.to(tl.int64) * sxt
    y_p += first.to(tl.int64) * syt
    for t in range(first, tl.minimum(first + BT, length), STEP):
        for j in tl.static_range(STEP):
            live = m & (t + j < length)
            x = tl.load(x_p, live, other=0.0).to(tl.float32)
            y = a * wa + b * wb + c * wc + x * wx
            if SILU:
                y *= sigmoid(y)
            tl.store(y_p, y.to(y_p.dtype.element_ty), live)
            x_p += sxt
            y_p += syt
            a, b, c = b, c, x


@triton.jit(do_not_specialize=["T"])
def window_kernel(
    x_p, s_p, cu_p, out_p, sxb, sxt, ssn, ssd, ssw, D, T,
    BD: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr, HAS_S: tl.constexpr,
):  # fmt: skip
    """The last W - 1 inputs of a sequence, older ones from its own initial window: out [N, D, W - 1], contiguous."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(D, BD)
    n = (pid // blocks).to(tl.int64)
    d = (pid % blocks) * BD + tl.arange(0, BD)
    start = n * 0
    length = T.to(tl.int64)
    batch = n
    if PACKED:
        start = tl.load(cu_p + n).to(tl.int64)
        length = tl.load(cu_p + n + 1).to(tl.int64) - start
        batch = n * 0
    for j in tl.static_range(W - 1):
        at = length - (W - 1) + j
        value = tl.load(x_p + batch * sxb + (start + at) * sxt + d, (d < D) & (at >= 0), other=0.0)
        if HAS_S:
            old = tl.load(s_p + n * ssn + d * ssd + (at + W - 1) * ssw, (d < D) & (at < 0), other=0.0)
            value = tl.where(at < 0, old, value)
        tl.store(out_p + (n * D + d) * (W - 1) + j, value, d < D)


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

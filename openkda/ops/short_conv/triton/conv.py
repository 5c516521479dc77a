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


@triton.jit(do_not_specialize=["T", "N"])
def conv_kernel(
    x_p, w_p, s_p, cu_p, y_p, sxb, sxt, syb, syt, ssn, ssd, ssw, D, T, N,
    BT: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr, HAS_S: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """One program a block of BT tokens of one sequence and BD channels."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(D, BD)
    n, batch, start, length, first = _locate(pid // blocks, cu_p, T, N, BT, PACKED)
    if first >= length:
        return
    t = first + tl.arange(0, BT)
    d = (pid % blocks) * BD + tl.arange(0, BD)
    m_d = (d < D)[None, :]
    x_p += batch * sxb + d[None, :]
    y = tl.zeros([BT, BD], tl.float32)
    for j in tl.static_range(W):
        at = t + (j - W + 1)
        m = ((at >= 0) & (at < length))[:, None] & m_d
        x = tl.load(x_p + (start + at)[:, None] * sxt, m, other=0.0).to(tl.float32)
        if HAS_S and j < W - 1:  # noqa: SIM102 (the first is known when compiling)
            if first == 0:
                old = s_p + n.to(tl.int64) * ssn + d[None, :] * ssd + (at + W - 1)[:, None] * ssw
                x += tl.load(old, (at < 0)[:, None] & m_d, other=0.0).to(tl.float32)
        y += x * tl.load(w_p + d * W + j, d < D, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y *= sigmoid(y)
    tl.store(
        y_p + batch * syb + (start + t)[:, None] * syt + d[None, :],
        y.to(y_p.dtype.element_ty),
        (t < length)[:, None] & m_d,
    )


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

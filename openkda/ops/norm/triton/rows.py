"""Root-mean-square norm of rows, with the roundings of the contract, and its backward; R rows at once in registers.

With r = 1 / sqrt(mean x^2 + eps), n = x r and s = sigmoid(gate):

    plain   y = cast(n) w      dn = dy w       dw = sum dy cast(n)
    gated   y = n w s          dn = dy w s     dw = sum dy n s        dgate = dy n w s (1 - s)
    both    dx = r (dn - n mean(dn n))

ADDED: x is x + a first, rounded to x's dtype and stored; its own upstream gradient is added to dx, which is a's gradient too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import sigmoid


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x_p, gate_p, w_p, y_p, sum_p, sx, sg, D, rows, eps,
    R: tl.constexpr, BD: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """gate_p: gate, or what is added."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, BD)
    m = (r < rows)[:, None] & (d < D)[None, :]
    raw = tl.load(x_p + r[:, None] * sx + d[None, :], m, other=0.0)
    if ADDED:
        a = tl.load(gate_p + r[:, None] * sg + d[None, :], m, other=0.0)
        raw = (raw.to(tl.float32) + a.to(tl.float32)).to(raw.dtype)
        tl.store(sum_p + r[:, None] * D + d[None, :], raw, m)
    x = raw.to(tl.float32)
    w = tl.load(w_p + d, d < D, other=0.0).to(tl.float32)[None, :]
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    if GATED:
        y = y * w * sigmoid(tl.load(gate_p + r[:, None] * sg + d[None, :], m, other=0.0).to(tl.float32))
    else:
        y = y.to(raw.dtype).to(tl.float32) * w
    tl.store(y_p + r[:, None] * D + d[None, :], y.to(y_p.dtype.element_ty), m)


@triton.jit(do_not_specialize=["rows", "TURNS"])
def norm_gradient_kernel(
    x_p, gate_p, w_p, dy_p, dx_p, dgate_p, dw_p, sx, sg, sy, D, rows, TURNS, eps,
    R: tl.constexpr, BD: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """TURNS times R rows a program. Its sum of dw goes to row pid of dw_p [programs, D]; a second stage adds those.

    ADDED: gate_p holds the upstream gradient of the sum. TWICE: dx once more, in a's dtype, to dgate_p.
    """
    pid = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    w = tl.load(w_p + d, d < D, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([R, BD], tl.float32)
    for i in range(TURNS):
        r = (pid * TURNS + i) * R + tl.arange(0, R)
        m = (r < rows)[:, None] & (d < D)[None, :]
        raw = tl.load(x_p + r[:, None] * sx + d[None, :], m, other=0.0)
        dy = tl.load(dy_p + r[:, None] * sy + d[None, :], m, other=0.0).to(tl.float32)
        x = raw.to(tl.float32)
        rate = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        n = x * rate
        if GATED:
            s = sigmoid(tl.load(gate_p + r[:, None] * sg + d[None, :], m, other=0.0).to(tl.float32))
            t = dy * s
            dw += t * n
            dn = t * w
            dgate = dn * n * (1.0 - s)
            tl.store(dgate_p + r[:, None] * D + d[None, :], dgate.to(dgate_p.dtype.element_ty), m)
        else:
            dw += dy * n.to(raw.dtype).to(tl.float32)
            dn = dy * w
        dx = rate * (dn - n * (tl.sum(dn * n, axis=1) / D)[:, None])
        if ADDED:
            dx += tl.load(gate_p + r[:, None] * sg + d[None, :], m, other=0.0).to(tl.float32)
        if TWICE:
            tl.store(dgate_p + r[:, None] * D + d[None, :], dx.to(dgate_p.dtype.element_ty), m)
        tl.store(dx_p + r[:, None] * D + d[None, :], dx.to(dx_p.dtype.element_ty), m)
    tl.store(dw_p + pid * D + d, tl.sum(dw, axis=0), d < D)

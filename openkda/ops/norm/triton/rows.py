"""Root-mean-square norm of rows, with the roundings of the contract; R rows a program, a whole row in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import sigmoid


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x_p, gate_p, w_p, y_p, sx, sg, D, rows, eps, R: tl.constexpr, BD: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, BD)
    m = (r < rows)[:, None] & (d < D)[None, :]
    raw = tl.load(x_p + r[:, None] * sx + d[None, :], m, other=0.0)
    x = raw.to(tl.float32)
    w = tl.load(w_p + d, d < D, other=0.0).to(tl.float32)[None, :]
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    if GATED:
        y = y * w * sigmoid(tl.load(gate_p + r[:, None] * sg + d[None, :], m, other=0.0).to(tl.float32))
    else:
        y = y.to(raw.dtype).to(tl.float32) * w
    tl.store(y_p + r[:, None] * D + d[None, :], y.to(y_p.dtype.element_ty), m)

"""SwiGLU, SiTU-GLU and a plain gate of flat arrays, float32 inside, and their gradients from gate and up alone."""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import LOG2E, sigmoid

SWIGLU = tl.constexpr(0)
BOUNDED = tl.constexpr(1)
SIGMOID = tl.constexpr(3)


@triton.jit
def tanh(x):
    """To 1e-6 of itself: a quotient of exponentials, near 0 its series (the quotient cancels there)."""
    e = tl.exp2(-2.0 * LOG2E * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 - s * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0.0, -far, far))


@triton.jit
def gated(g, u, b1, b2, KIND: tl.constexpr):
    """The activation of gate and up, float32."""
    left = sigmoid(g)
    if KIND != SIGMOID:
        left *= g if KIND == SWIGLU else b1 * tanh(g / b1)
    return left * (b2 * tanh(u / b2) if KIND == BOUNDED else u)


@triton.jit
def glu_kernel(gate_p, up_p, out_p, n, b1, b2, BLOCK: tl.constexpr, KIND: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    g = tl.load(gate_p + i, m, other=0.0).to(tl.float32)
    u = tl.load(up_p + i, m, other=0.0).to(tl.float32)
    tl.store(out_p + i, gated(g, u, b1, b2, KIND).to(out_p.dtype.element_ty), m)


@triton.jit
def glu_gradient_kernel(
    gate_p, up_p, d_p, dgate_p, dup_p, n, b1, b2, BLOCK: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    g = tl.load(gate_p + i, m, other=0.0).to(tl.float32)
    u = tl.load(up_p + i, m, other=0.0).to(tl.float32)
    d = tl.load(d_p + i, m, other=0.0).to(tl.float32)
    s = sigmoid(g)
    if KIND == SWIGLU:
        left = g * s
        slope = s + left * (1.0 - s)
        right = u
        right_slope = 1.0
    elif KIND == SIGMOID:
        left = s
        slope = s * (1.0 - s)
        right = u
        right_slope = 1.0
    else:
        t = tanh(g / b1)
        left = b1 * t * s
        slope = s * (1.0 - t * t) + left * (1.0 - s)
        if KIND == BOUNDED:
            t2 = tanh(u / b2)
            right = b2 * t2
            right_slope = 1.0 - t2 * t2
        else:
            right = u
            right_slope = 1.0
    tl.store(dgate_p + i, (d * right * slope).to(dgate_p.dtype.element_ty), m)
    tl.store(dup_p + i, (d * left * right_slope).to(dup_p.dtype.element_ty), m)

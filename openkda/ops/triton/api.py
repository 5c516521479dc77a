"""Device functions that the Triton kernels of several ops share: the gates in log2 units, one step of the delta rule,
block scales, and where a chunk of a pack lives. Importing this file imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.ahead import compile_ahead, first_of_kind, plan, planning
from openkda.ops.triton.launch import (
    QUICK,
    Tape,
    as_taken,
    ceil_div,
    dense,
    launch,
    note,
    padded,
    record,
    rows_of,
    steps_of,
    unit_stride,
    walkable,
)
from openkda.ops.triton.parameters import enter
from openkda.ops.triton.stages import empty, record_stages

__all__ = [
    "FORGOTTEN",
    "GATE_BOUNDED",
    "GATE_NONE",
    "GATE_SOFTPLUS",
    "LN2",
    "LOG2E",
    "QUICK",
    "Tape",
    "as_taken",
    "ceil_div",
    "compile_ahead",
    "decay_rate",
    "delta_step",
    "dense",
    "empty",
    "enter",
    "find_sequence",
    "first_of_kind",
    "forget",
    "launch",
    "log2_decay",
    "note",
    "padded",
    "plan",
    "planning",
    "power_of_two",
    "quick_sigmoid",
    "record",
    "record_stages",
    "round_mantissa",
    "rows_of",
    "sigmoid",
    "steps_of",
    "unit_length",
    "unit_stride",
    "walkable",
]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

GATE_NONE = tl.constexpr(0)  # g is the natural log of the decay
GATE_SOFTPLUS = tl.constexpr(1)
GATE_BOUNDED = tl.constexpr(2)

FORGOTTEN = tl.constexpr(-57.7)
"""Smallest log2 decay per token that is told apart from total forgetting (e^-40): a longer sum would cost the small
decays beside it their bits (an fp32 sum past 1000 has none below 6e-5)."""


@triton.jit
def decay_rate(A_log):
    """exp(A_log), at most 2^115: an infinite rate times a raw gate input or a slope of 0 would be NaN."""
    return tl.exp2(tl.minimum(A_log * LOG2E, 115.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def log2_decay(z, rate, bound, GATE: tl.constexpr):
    """Raw gate input (dt_bias added) or log decay -> log2 of the decay per token. rate = exp(A_log)."""
    if GATE == GATE_SOFTPLUS:
        e = tl.exp2(-tl.abs(z) * LOG2E)
        w = 1.0 + e
        # log1p(e) by Kahan's quotient: w - 1 is what the rounding of 1 + e kept. A plain log loses the slow decays.
        log1p = tl.where(w == 1.0, e, tl.log2(w) * LN2 * (e / tl.where(w == 1.0, 1.0, w - 1.0)))
        g = -(rate * LOG2E) * (tl.maximum(z, 0.0) + log1p)
    elif GATE == GATE_BOUNDED:
        g = (bound * LOG2E) / (1.0 + tl.exp2(-(rate * LOG2E) * z))
    else:
        g = z * LOG2E
    return tl.maximum(g, FORGOTTEN, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def quick_sigmoid(x):
    """`sigmoid` to 3 units in the last place in four instructions (the division alone takes eight). Not for the interpreter."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, e; }",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def power_of_two(x, TOP: tl.constexpr):
    """For x >= 0: (s, 1/s), s a power of two with x * s in [2^TOP, 2^(TOP+1)); bounded for x = 0, inf or NaN."""
    e = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 2 * TOP + 2)
    s = ((254 + TOP - e) << 23).to(tl.float32, bitcast=True)
    return s, ((e - TOP) << 23).to(tl.float32, bitcast=True)


@triton.jit
def find_sequence(slot, cu, N, C: tl.constexpr):
    """The pack member that owns chunk slot `slot`: member i owns the slots from cu[i] // C + i on.

    Those ranges never overlap, because floor(a / C) + ceil((b - a) / C) <= floor(b / C) + 1; a range may end in unused
    slots. So a pack of any number of members needs no table of chunks and no wait for the device.
    """
    low = slot * 0
    high = low + N
    while high - low > 1:
        middle = (low + high) // 2
        first = (tl.load(cu + middle) // C + middle).to(tl.int32)
        if first <= slot:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def round_mantissa(x, PRECISION: tl.constexpr):
    """For "tf32" x rounded to ten mantissa bits (the tensor core would cut the others off); else x.

    NaN is left alone: a GPU makes it of ones alone (0x7fffffff), and the rounding's carry would turn that into -0.
    """
    if PRECISION == "tf32":
        rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    return x


@triton.jit
def unit_length(x, eps):
    """x / sqrt(sum x^2 + eps) of a vector."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + eps)


@triton.jit
def forget(S, g):
    """Rows of S [BK, BV] times 2^g. Slow decays as S + S (2^g - 1): a factor near 1 has no bits for what it takes away, and
    what it lacks is the same at every step."""
    slow = g > -0.5
    y = g * LN2
    less = y * (1.0 + y * (1 / 2 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * (1 / 720 + y * (1 / 5040)))))))
    return tl.where(slow[:, None], S, 0.0) + S * tl.where(slow, less, tl.exp2(g))[:, None]


@triton.jit
def delta_step(S, q, k, v, g, beta):
    """One token: S [BK, BV], log2 decay g [BK] -> (new S, S_new^T q)."""
    S = forget(S, g)
    u = beta * (v - tl.sum(S * k[:, None], axis=0))
    o = tl.sum(S * q[:, None], axis=0) + tl.sum(k * q, axis=0) * u
    return S + k[:, None] * u[None, :], o

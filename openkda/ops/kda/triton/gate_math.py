"""The shared device functions by the name under which the KDA kernels import them, and what these kernels alone share."""

import triton
import triton.language as tl

from openkda.ops.triton.api import (
    FORGOTTEN,
    GATE_BOUNDED,
    GATE_NONE,
    GATE_SOFTPLUS,
    LN2,
    LOG2E,
    QUICK,
    decay_rate,
    find_sequence,
    log2_decay,
    power_of_two,
    round_mantissa,
    sigmoid,
)

__all__ = [
    "FORGOTTEN",
    "GATE_BOUNDED",
    "GATE_NONE",
    "GATE_SOFTPLUS",
    "LN2",
    "LOG2E",
    "decay_rate",
    "find_sequence",
    "log2_decay",
    "power_of_two",
    "quick_exp2",
    "round_mantissa",
    "sigmoid",
]

_QUICK = tl.constexpr(QUICK)


@triton.jit
def quick_exp2(x):
    """2^x in one instruction where that exists: tl.exp2 spends three more on results below 2^-126, which are 0 here."""
    if _QUICK:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)

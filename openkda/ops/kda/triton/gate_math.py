"""The shared device functions by the name under which the KDA kernels import them."""

from openkda.ops.triton.api import (
    FORGOTTEN,
    GATE_BOUNDED,
    GATE_NONE,
    GATE_SOFTPLUS,
    LN2,
    LOG2E,
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
    "round_mantissa",
    "sigmoid",
]

"""The two decay gates: from a raw gate input z to the log decay log(alpha) <= 0 of every key channel.

    SoftplusGate   log alpha = -exp(A_log) * softplus(z + dt_bias)          in (-inf, 0)   Kimi Linear
    BoundedGate    log alpha = m * sigmoid(exp(A_log) * (z + dt_bias))      in (m, 0)      Kimi K3, m = -5

The bounded form is a scaled sigmoid, not a clamp of the softplus form. Its reason to exist: over a tile of
16 tokens the summed log decay stays above 16 * m = -80, so exp(+80) still fits float32 and the tile's
scores are two plain matmuls. An unbounded gate has no such tile and must take pairwise differences.
Source: Kimi K3 report, section 2.1.1, eq. 5; Kimi Linear report, appendix C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

LOWER_BOUND_RANGE = (-5.0, 0.0)  # half open: -5 is allowed, 0 is not


def is_number(x: object) -> bool:
    """A Python or numpy number. A tensor is none: its gradient would be lost, and on a GPU its value would be waited for."""
    if torch.compiler.is_compiling():  # there a number may be a symbol, which has no attributes
        return not isinstance(x, Tensor | str | complex)
    return not isinstance(x, Tensor) and hasattr(x, "__float__")


def bias_fits(dt_bias: Tensor, heads: int, channels: int) -> bool:
    """Whether dt_bias is [HV, K] or [HV * K], axes of one in front allowed. [K, HV] has as many values in another order."""
    shapes = ((heads, channels), (heads * channels,))
    if tuple(dt_bias.shape) in shapes:
        return True
    return _without_leading_ones(tuple(dt_bias.shape)) in [_without_leading_ones(s) for s in shapes]


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


def shifted(z: Tensor, dt_bias: Tensor | None) -> Tensor:
    """z + dt_bias, in at least float32."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return z if dt_bias is None else z + dt_bias.reshape(z.shape[-2:])


def rate(A_log: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(A_log) [HV, 1] from [HV] or the published [1, 1, HV, 1]. Capped (at e^79 in float32) before it is infinite: infinity
    times a raw input of 0, or times the slope 0 of a saturated gate, would be NaN."""
    cap = 0.9 * math.log(torch.finfo(dtype).max)
    return A_log.reshape(-1, 1).to(dtype).clamp(max=cap).exp()


@dataclass(frozen=True, eq=False)
class SoftplusGate:
    """Unbounded gate of Kimi Linear: natural log decay per token -exp(A_log) * softplus(z + dt_bias), below 0.

    A_log: [HV] (any shape with HV elements), float32. dt_bias: [HV, K] (or [HV * K]) float32, or None for 0.
    Source: Kimi Linear report (arXiv 2510.26692), appendix C.
    """

    A_log: Tensor
    dt_bias: Tensor | None = None

    @property
    def lower_bound(self) -> float | None:
        """Smallest log decay per token that this gate can give; None: unbounded."""
        return None

    def __call__(self, z: Float[Tensor, "... HV K"]) -> Float[Tensor, "... HV K"]:
        """Raw gate input (any float dtype) -> natural log decay, float32 (float64 for float64 input)."""
        z = shifted(z, self.dt_bias)
        return -rate(self.A_log, z.dtype) * F.softplus(z)


@dataclass(frozen=True, eq=False)
class BoundedGate:
    """Bounded gate of Kimi K3: natural log decay per token lower_bound * sigmoid(exp(A_log) * (z + dt_bias)).

    lower_bound: in [-5, 0); the log decay lies between it and 0, which every path uses to save time.
    A_log: [HV] (any shape with HV elements) float32, or None for 0. dt_bias: as in `SoftplusGate`.
    Source: Kimi K3 report, section 2.1.1, eq. 5.
    """

    lower_bound: float = -5.0
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None

    def __post_init__(self) -> None:
        low, high = LOWER_BOUND_RANGE
        if not is_number(self.lower_bound):
            raise TypeError(f"BoundedGate.lower_bound: expected a number, received {type(self.lower_bound).__name__}")
        if not low <= self.lower_bound < high:
            raise ValueError(
                f"BoundedGate.lower_bound: expected a value in [{low}, {high}) (16 tokens of it must stay "
                f"above -80 so that exp(80) fits float32), received {self.lower_bound}"
            )

    def __call__(self, z: Float[Tensor, "... HV K"]) -> Float[Tensor, "... HV K"]:
        """Raw gate input (any float dtype) -> natural log decay, float32 (float64 for float64 input)."""
        z = shifted(z, self.dt_bias)
        if self.A_log is not None:
            z = rate(self.A_log, z.dtype) * z
        return self.lower_bound * torch.sigmoid(z)


Gate = SoftplusGate | BoundedGate

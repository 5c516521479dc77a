"""RMSNorm of the residual stream and of the low-rank projections, and the gated norm behind KDA."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openkda.layers.parameters import Float32Parameters, fill_constant
from openkda.ops.device.api import autocast_dtype
from openkda.ops.norm.api import add_rms_norm, gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """y = cast(x / sqrt(mean(x^2) + eps)) * weight over the last axis; float32 inside.

    The weight follows the model's dtype: published checkpoints store every norm of this kind in bfloat16 (of the norms, o_norm
    alone is float32), and it multiplies what is already cast to that dtype.
    Under autocast the result has autocast's dtype: matrices read it, and each of the six of a KDA layer would make
    a copy of its own, and a float32 gradient for the sum of six.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def init_parameters(self, generator: torch.Generator | None) -> None:
        fill_constant(self.weight, 1.0)

    def forward(self, x: Tensor, a: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x; with a, what the last sublayer adds to a residual stream: (x + a, the norm of that)."""
        if a is None:
            return rms_norm(x, self.weight, self.eps, dtype=autocast_dtype(x))
        return add_rms_norm(x, a, self.weight, self.eps, dtype=autocast_dtype(x))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedRMSNorm(Float32Parameters):
    """y = cast(x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)), all float32 before the cast; the weight stays float32
    and is shared by all heads. Source: Kimi Linear report, section 3."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))

    def init_parameters(self, generator: torch.Generator | None) -> None:
        fill_constant(self.weight, 1.0)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"

"""The gated activations: SwiGLU of Kimi Linear and SiTU-GLU of Kimi K3, and the output gate of Gated MLA.

    gate(g, u)    = sigmoid(g) * u
    SwiGLU(g, u)  = g sigmoid(g) * u
    SiTU(g, u)    = b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2)          |out| <= b1 b2 = 100 at b1 = 4, b2 = 25

The sigmoid takes the raw g. SiTU is float32 inside with one cast, so that its bound is exact in 16 bits. On a GPU all are one
kernel, float32 inside (openkda/ops/moe/triton).
Source: Kimi K3 report, eq. 12.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from openkda.ops.moe import triton as kernels


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up, in the inputs' dtype."""

    def __call__(self, gate: Float[Tensor, "... I"], up: Float[Tensor, "... I"]) -> Float[Tensor, "... I"]:
        if gate.is_cuda and kernels.takes(gate, up):
            return kernels.glu(gate, up, *kernel_form(self))
        return F.silu(gate) * up


@dataclass(frozen=True)
class SiTUGLU:
    """SiTU-GLU. `linear_beta` None leaves `up` unbounded. Raises ValueError for a bound that is not positive."""

    beta: float = 4.0
    linear_beta: float | None = 25.0

    def __post_init__(self) -> None:
        for name in ("beta", "linear_beta"):
            value = getattr(self, name)
            if not (value is None and name == "linear_beta") and not value > 0:
                raise ValueError(f"SiTUGLU.{name}: expected a positive number, received {value}")

    def __call__(self, gate: Float[Tensor, "... I"], up: Float[Tensor, "... I"]) -> Float[Tensor, "... I"]:
        """gate, up: same shape and float dtype -> that dtype. Differentiable once; keeps only gate and up for it."""
        if gate.shape != up.shape:
            raise ValueError(f"up.shape: expected {list(gate.shape)} (that of gate), received {list(up.shape)}")
        if gate.is_cuda and kernels.takes(gate, up):
            return kernels.glu(gate, up, *kernel_form(self))
        return _SiTU.apply(gate, up, self.beta, self.linear_beta)


@dataclass(frozen=True)
class SigmoidGLU:
    """sigmoid(gate) * up in float32 (float64 for float64), cast to gate's dtype; up may be wider."""

    def __call__(self, gate: Float[Tensor, "... I"], up: Float[Tensor, "... I"]) -> Float[Tensor, "... I"]:
        if gate.is_cuda and kernels.takes(gate, up):
            return kernels.glu(gate, up, *kernel_form(self))
        return (_wide(up) * torch.sigmoid(_wide(gate))).to(gate.dtype)


GLU = SwiGLU | SiTUGLU | SigmoidGLU


def kernel_form(activation: GLU) -> tuple[str, float, float]:
    """Its name in `openkda/ops/moe/triton` and its two bounds (1 where it has none)."""
    if isinstance(activation, SwiGLU):
        return "swiglu", 1.0, 1.0
    if isinstance(activation, SigmoidGLU):
        return "sigmoid", 1.0, 1.0
    if activation.linear_beta is None:
        return "situ-unbounded", activation.beta, 1.0
    return "situ", activation.beta, activation.linear_beta


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _SiTU(torch.autograd.Function):
    """By hand because autograd would keep six float32 tensors of this size."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, b1: float, b2: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.bounds = b1, b2
        g, u = _wide(gate), _wide(up)
        out = torch.tanh(g / b1).mul_(b1).mul_(torch.sigmoid(g))
        out *= u if b2 is None else torch.tanh(u / b2).mul_(b2)
        return out.to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = ctx.saved_tensors
        b1, b2 = ctx.bounds
        g, u, d = _wide(gate), _wide(up), _wide(grads[0])
        t, s = torch.tanh(g / b1), torch.sigmoid(g)
        left = b1 * t * s
        left_slope = s * (1 - t * t) + left * (1 - s)
        if b2 is None:
            return (d * u * left_slope).to(gate.dtype), (d * left).to(up.dtype), None, None
        t2 = torch.tanh(u / b2)
        return (d * (b2 * t2) * left_slope).to(gate.dtype), (d * left * (1 - t2 * t2)).to(up.dtype), None, None

"""The norms in plain torch with torch's own autograd: the truth on any device, and the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor


def refusals(x: Tensor) -> list[str]:
    """Runs everything."""
    return []


def _normalised(x: Tensor, eps: float) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, key: object) -> Tensor:
    """See `api.rms_norm`."""
    return (_normalised(x, eps).to(x.dtype) * weight).to(x.dtype).to(dtype)


def add_rms_norm(x: Tensor, a: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `api.add_rms_norm`."""
    total = x + a
    return total, rms_norm(total, weight, eps, dtype, None)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, key: object) -> Tensor:
    """See `api.gated_rms_norm`."""
    y = _normalised(x, eps)
    return (y * weight.to(y.dtype) * torch.sigmoid(gate.to(y.dtype))).to(x.dtype)

"""Triton norms: forward only. Refuses whenever autograd is recording, because a weight may want a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import triton_refusals

MAX_WIDTH = 32768


def refusals(x: Tensor) -> list[str]:
    reasons = triton_refusals(x)
    if x.shape[-1] > MAX_WIDTH:
        reasons.append(f"rows of at most {MAX_WIDTH}, received {x.shape[-1]}")
    if torch.is_grad_enabled():
        reasons.append("the backward is not implemented, and gradients are enabled")
    return reasons


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `api.rms_norm`."""
    from openkda.ops.norm.triton.launch import norm_op

    return norm_op(x, None, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `api.gated_rms_norm`."""
    from openkda.ops.norm.triton.launch import norm_op

    return norm_op(x, gate, weight, eps)

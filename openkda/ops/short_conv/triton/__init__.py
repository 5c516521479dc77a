"""Triton convolution: forward only. Refuses whenever autograd is recording, because a weight may want a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import triton_refusals


def refusals(x: Tensor) -> list[str]:
    reasons = triton_refusals(x)
    if torch.is_grad_enabled():
        reasons.append("the backward is not implemented, and gradients are enabled")
    return reasons


def run(
    x: Tensor, weight: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """(y, final state); arguments as in `api.short_conv`."""
    from openkda.ops.short_conv.triton.launch import conv_op

    return conv_op(x, weight, initial_state, cu_seqlens, activation == "silu")


def step(x: Tensor, weight: Tensor, state: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    """(y, new state); arguments as in `api.short_conv_step`."""
    from openkda.ops.short_conv.triton.launch import step_op

    return step_op(x, weight, state, activation == "silu")

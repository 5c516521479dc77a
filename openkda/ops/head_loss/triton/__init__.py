"""The head's loss with a Triton kernel between torch's matmuls: logits for some thousand rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import triton_refusals


def refusals(x: Tensor) -> list[str]:
    return triton_refusals(x)


def run(h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """See `api.head_loss`; dtype: of the product."""
    from openkda.ops.head_loss.triton.launch import head_loss_op

    needs = torch.is_grad_enabled() and (h.requires_grad or weight.requires_grad)
    return head_loss_op(h, weight, targets, dtype, needs)[0]

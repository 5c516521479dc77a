"""The head's loss as one torch operator: loss and, where it will be needed, both gradients for an upstream gradient of one.

The gradients are computed in the forward pass, because only there do the logits exist; the backward pass scales them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import define, derive, refuse_derivative
from openkda.ops.head_loss.triton.rows import loss_kernel
from openkda.ops.triton.api import launch, padded

LOGITS = 1 << 28
"""Logits that exist at a time: half a gigabyte in 16 bits, and 8,192 rows of a vocabulary of 32,768."""


def _head_loss(
    h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dh in h's dtype, dweight in weight's), the last two empty without `gradient`."""
    N, V = h.shape[0], weight.shape[0]
    H, W = h.to(dtype), weight.to(dtype)
    losses = torch.empty(N, dtype=torch.float32, device=h.device)
    dh = torch.empty_like(H) if gradient else h.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=torch.float32) if gradient else weight.new_empty(0)
    rows = max(1, LOGITS // max(1, V))
    block = min(4096, padded(V))
    for a in range(0, N, rows):
        part = H[a : a + rows]
        logits = part @ W.T
        tensors = (logits, targets[a : a + rows], losses[a : a + rows])
        launch(loss_kernel, logits.shape[0], tensors, (V,), (), (block, gradient), 8 if block > 1024 else 4, h.device)
        if gradient:
            torch.mm(logits, W, out=dh[a : a + rows])
            dweight += logits.T @ part
    return losses.sum(), dh.to(h.dtype) if gradient else dh, dweight.to(weight.dtype) if gradient else dweight


def _fake(h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, gradient: bool) -> tuple[Tensor, ...]:
    grads = (torch.empty_like(h), torch.empty_like(weight)) if gradient else (h.new_empty(0), weight.new_empty(0))
    return h.new_empty((), dtype=torch.float32), *grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if d is None:
        return None, None, None, None, None
    found = head_loss_backward_op(d, *ctx.saved_tensors)
    dh, dweight = (g if need else None for g, need in zip(found, ctx.needs_input_grad, strict=False))
    return dh, dweight, None, None, None


def _scale(d: Tensor, dh: Tensor, dweight: Tensor) -> tuple[Tensor, Tensor]:
    return dh * d.to(dh.dtype), dweight * d.to(dweight.dtype)


head_loss_op = define(
    "head_loss(Tensor h, Tensor weight, Tensor targets, ScalarType dtype, bool gradient) -> (Tensor, Tensor, Tensor)",
    _head_loss,
    _fake,
)
head_loss_backward_op = define(
    "head_loss_backward(Tensor d, Tensor dh, Tensor dweight) -> (Tensor, Tensor)", _scale, _scale
)
derive(head_loss_op, _backward, _save)
refuse_derivative(
    head_loss_backward_op, "head_loss: second derivatives are not implemented; use impl='reference' for them"
)

"""Launch and registration of the activation kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import define, derive, refuse_derivative
from openkda.ops.moe.triton.gated import glu_gradient_kernel, glu_kernel
from openkda.ops.triton.api import ceil_div, launch

BLOCK = 2048


def glu(gate: Tensor, up: Tensor, kind: int, b1: float, b2: float) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    n = gate.numel()
    if n:
        launch(glu_kernel, ceil_div(n, BLOCK), (gate, up, out), (n,), (b1, b2), (BLOCK, kind), 8, gate.device)
    return out


def _gradient(d: Tensor, gate: Tensor, up: Tensor, kind: int, b1: float, b2: float) -> tuple[Tensor, Tensor]:
    d, gate, up = d.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    n = gate.numel()
    if n:
        tensors = (gate, up, d, dgate, dup)
        launch(glu_gradient_kernel, ceil_div(n, BLOCK), tensors, (n,), (b1, b2), (BLOCK, kind), 8, gate.device)
    return dgate, dup


def _fake(gate: Tensor, up: Tensor, kind: int, b1: float, b2: float) -> Tensor:
    return gate.new_empty(gate.shape)


def _fake_gradient(d: Tensor, gate: Tensor, up: Tensor, kind: int, b1: float, b2: float) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.options = inputs[2:]


def _backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    found = glu_backward_op(d, *ctx.saved_tensors, *ctx.options)
    dgate, dup = (g if need else None for g, need in zip(found, ctx.needs_input_grad, strict=False))
    return dgate, dup, None, None, None


glu_op = define("glu(Tensor gate, Tensor up, int kind, float b1, float b2) -> Tensor", glu, _fake)
glu_backward_op = define(
    "glu_backward(Tensor d, Tensor gate, Tensor up, int kind, float b1, float b2) -> (Tensor, Tensor)",
    _gradient,
    _fake_gradient,
)
derive(glu_op, _backward, _save)
refuse_derivative(
    glu_backward_op,
    "gated activation: second derivatives are not implemented on a GPU; use float64 for them",
)

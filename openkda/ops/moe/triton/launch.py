"""Launch and registration of the kernels of activations and packed experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import define, derive, refuse_derivative
from openkda.ops.moe.triton.gated import glu_gradient_kernel, glu_kernel
from openkda.ops.moe.triton.packed import packed_kernel
from openkda.ops.triton.api import ceil_div, launch, padded

BLOCK = 2048
STEP_BYTES = 64
"""Of codes in one step of a packed product, 128 columns. Half of them go into each of two products, and those of 64 rows need
operands of at least 64 columns: narrower ones are read wrongly on Hopper (Triton 3.6)."""


def tile_of(rows: int, experts: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile and its warps, for packed experts: by rows an expert, evenly spread."""
    if rows <= 32 * experts:
        return 16, 64, 4
    return 128, 64, 8


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


def packed_linear(x: Tensor, codes: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """x [M, D], rows sorted by expert, times the transposed MXFP4 matrices [E, O, D]; ends [E] int32 -> [M, O]."""
    M, (E, O, W) = x.shape[0], codes.shape
    out = x.new_empty(M, O)
    if M == 0:
        return out
    bm, bn, warps = tile_of(M, E)
    columns = ceil_div(O, bn)
    tiles = min(E, M) + M // bm  # no more, wherever the tokens go
    tensors = (x.contiguous(), codes.contiguous(), scale.contiguous(), ends, out)
    constants = (bm, bn, STEP_BYTES, padded(E))
    launch(packed_kernel, columns * tiles, tensors, (W, O), (columns, E), constants, warps, x.device)
    return out


def _fake_packed_linear(x: Tensor, codes: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[1])


packed_linear_op = define(
    "packed_linear(Tensor x, Tensor codes, Tensor scale, Tensor ends) -> Tensor", packed_linear, _fake_packed_linear
)
refuse_derivative(packed_linear_op, "packed experts: their kernel has no derivative")

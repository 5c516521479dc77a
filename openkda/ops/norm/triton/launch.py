"""Launch and registration of the norm kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import define, derive, refuse_derivative
from openkda.ops.norm.api import CALLS
from openkda.ops.norm.triton.rows import norm_gradient_kernel, norm_kernel
from openkda.ops.triton.api import ceil_div, launch, padded, record, unit_stride

PROGRAMS = 1024
"""Partial sums of the weight's gradient: enough programs to fill any card, few enough to add in no time."""


def norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """y in `dtype`; see `openkda/ops/norm/api.py`."""
    D = x.shape[-1]
    flat = _rows(x)
    gates = flat if gate is None else _rows(gate)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows = flat.shape[0]
    if rows and D:
        BD, R, warps = _tile(D)
        tensors, steps = (flat, gates, weight.contiguous(), y), (flat.stride(0), gates.stride(0), D)
        launch(norm_kernel, ceil_div(rows, R), tensors, steps, (rows, eps), (R, BD, gate is not None), warps, y.device)
    return y


def norm_recorded(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, key: Any) -> Tensor:
    """`norm`; from now on calls of this key repeat its launch."""
    made, tape = record(lambda: (norm(x, gate, weight, eps, dtype),), (x, gate, weight), x.device)
    if tape is not None:

        def again(tensors: tuple[Tensor | None, ...]) -> Tensor | None:
            made = tape.run(tensors)
            return None if made is None else made[0]

        CALLS.replays[key] = again
    return made[0]


def norm_gradient(
    dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dgate or an empty tensor, dweight), each in the dtype of what it belongs to."""
    D = x.shape[-1]
    flat, up = _rows(x), _rows(dy)
    gates = flat if gate is None else _rows(gate)
    new = lambda t: torch.empty(t.shape, dtype=t.dtype, device=t.device)  # noqa: E731
    dx = new(x)
    dgate = x.new_empty(0) if gate is None else new(gate)
    rows = flat.shape[0]
    if not (rows and D):
        return dx, dgate, torch.zeros_like(weight)
    BD, R, warps = _tile(D)
    turns = ceil_div(ceil_div(rows, R), PROGRAMS)
    programs = ceil_div(rows, R * turns)
    partial = torch.empty((programs, D), dtype=torch.float32, device=x.device)
    launch(
        norm_gradient_kernel, programs, (flat, gates, weight.contiguous(), up, dx, dgate, partial),
        (flat.stride(0), gates.stride(0), up.stride(0), D), (rows, turns, eps), (R, BD, gate is not None), warps, x.device,
    )  # fmt: skip
    return dx, dgate, partial.sum(0).to(weight.dtype)


def _rows(x: Tensor) -> Tensor:
    return unit_stride(x.reshape(-1, x.shape[-1]))


def _tile(D: int) -> tuple[int, int, int]:
    """(columns, rows, warps) of a program."""
    BD = padded(D)
    return BD, max(1, 2048 // BD), 4 if BD <= 4096 else 8


def _fake_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _fake_gradient(dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    return (
        x.new_empty(x.shape),
        x.new_empty(0) if gate is None else gate.new_empty(gate.shape),
        torch.empty_like(weight),
    )


norm_op = define(
    "rms_norm(Tensor x, Tensor? gate, Tensor weight, float eps, ScalarType dtype) -> Tensor", norm, _fake_norm
)
backward_op = define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? gate, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    norm_gradient,
    _fake_gradient,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gate, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x, gate, weight)


def _derive(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, gate, weight = ctx.saved_tensors
    dx, dgate, dw = backward_op(dy, x, gate, weight, ctx.eps)
    return dx, None if gate is None else dgate, dw, None, None


derive(norm_op, _derive, _save)
refuse_derivative(backward_op, "rms_norm: second derivatives need impl='reference'")

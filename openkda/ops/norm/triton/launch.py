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
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch_norm(x, gate, weight, y, y, eps, (gate is not None, False))
    return y


def add_norm(x: Tensor, a: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x + a in x's dtype, its norm in `dtype`)."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, a, weight, y, total, eps, (False, True))
    return total, y


def _launch_norm(
    x: Tensor, other: Tensor | None, weight: Tensor, y: Tensor, total: Tensor, eps: float, form: tuple[bool, bool]
) -> None:
    """other: gate or what is added; form: (GATED, ADDED)."""
    D, flat = x.shape[-1], _rows(x)
    others = flat if other is None else _rows(other)
    rows = flat.shape[0]
    if rows and D:
        BD, R, warps = _tile(D)
        tensors, steps = (flat, others, weight.contiguous(), y, total), (flat.stride(0), others.stride(0), D)
        launch(norm_kernel, ceil_div(rows, R), tensors, steps, (rows, eps), (R, BD, *form), warps, y.device)


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
    dgate = x.new_empty(0) if gate is None else _new(gate)
    dx, dw = _launch_gradient(dy, x, gate, dgate, weight, eps, (gate is not None, False, False))
    return dx, dgate, dw


def add_norm_gradient(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, da in `dtype` or an empty tensor where that is dx's, dweight). dtotal: upstream gradient of the sum itself."""
    twice = dtype != total.dtype
    da = torch.empty(total.shape if twice else (0,), dtype=dtype, device=total.device)
    dx, dw = _launch_gradient(dy, total, dtotal, da, weight, eps, (False, dtotal is not None, twice))
    return dx, da, dw


def _launch_gradient(
    dy: Tensor,
    x: Tensor,
    other: Tensor | None,
    second: Tensor,
    weight: Tensor,
    eps: float,
    form: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor]:
    """(dx, dweight), and `second` filled. other: gate or the sum's upstream gradient; form: (GATED, ADDED, TWICE)."""
    D, flat, up = x.shape[-1], _rows(x), _rows(dy)
    others = flat if other is None else _rows(other)
    dx = _new(x)
    rows = flat.shape[0]
    if not (rows and D):
        return dx, torch.zeros_like(weight)
    BD, R, warps = _tile(D)
    turns = ceil_div(ceil_div(rows, R), PROGRAMS)
    programs = ceil_div(rows, R * turns)
    partial = torch.empty((programs, D), dtype=torch.float32, device=x.device)
    launch(
        norm_gradient_kernel, programs, (flat, others, weight.contiguous(), up, dx, second, partial),
        (flat.stride(0), others.stride(0), up.stride(0), D), (rows, turns, eps), (R, BD, *form), warps, x.device,
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


def _new(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _rows(x: Tensor) -> Tensor:
    return unit_stride(x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(0, 0))


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


def _fake_add(x: Tensor, a: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty(x.shape, dtype=dtype, device=x.device)


def _fake_add_gradient(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    shape = total.shape if dtype != total.dtype else (0,)
    return total.new_empty(total.shape), total.new_empty(shape, dtype=dtype), torch.empty_like(weight)


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


add_norm_op = define(
    "add_rms_norm(Tensor x, Tensor a, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    add_norm,
    _fake_add,
)
add_backward_op = define(
    "add_rms_norm_backward(Tensor dy, Tensor? dtotal, Tensor total, Tensor weight, float eps, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    add_norm_gradient,
    _fake_add_gradient,
)


def _save_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, a, weight, ctx.eps, _ = inputs
    ctx.dtype = a.dtype
    ctx.save_for_backward(output[0], weight)
    ctx.set_materialize_grads(False)


def _derive_add(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Any, ...]:
    total, weight = ctx.saved_tensors
    if dy is None:
        return dtotal, None if dtotal is None else dtotal.to(ctx.dtype), None, None, None
    dx, da, dw = add_backward_op(dy, dtotal, total, weight, ctx.eps, ctx.dtype)
    return dx, dx if ctx.dtype == total.dtype else da, dw, None, None


derive(add_norm_op, _derive_add, _save_add)
refuse_derivative(add_backward_op, "add_rms_norm: second derivatives need impl='reference'")

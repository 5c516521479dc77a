"""The convolution as torch operators, for torch.compile, autograd, and whatever else must see one opaque call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from openkda.ops.device.api import define, derive, refuse_derivative
from openkda.ops.short_conv.triton import launch


def _conv(x: list[Tensor], weight: list[Tensor], state: list[Tensor], cu: Tensor | None, silu: bool) -> list[Tensor]:
    ys, windows = launch.conv(x, weight, state, cu, silu)
    return [*ys, *windows]


def _fake_conv(
    x: list[Tensor], weight: list[Tensor], state: list[Tensor], cu: Tensor | None, silu: bool
) -> list[Tensor]:
    N = x[0].shape[0] if cu is None else cu.numel() - 1
    windows = [t.new_empty(N, t.shape[2], w.shape[1] - 1) for t, w in zip(x, weight, strict=True)]
    return [*(t.new_empty(t.shape) for t in x), *windows]


def _backward(
    x: list[Tensor], weight: list[Tensor], state: list[Tensor], cu: Tensor | None, dy: list[Tensor | None],
    dfinal: list[Tensor | None], silu: bool,
) -> list[Tensor]:  # fmt: skip
    dxs, dws, dstates = launch.conv_gradient(x, weight, state, cu, dy, dfinal, silu)
    return [*dxs, *(d.to(w.dtype) for d, w in zip(dws, weight, strict=True)), *dstates]


def _fake_backward(
    x: list[Tensor], weight: list[Tensor], state: list[Tensor], cu: Tensor | None, dy: list[Tensor | None],
    dfinal: list[Tensor | None], silu: bool,
) -> list[Tensor]:  # fmt: skip
    return [t.new_empty(t.shape) for t in (*x, *weight, *state)]


def _fake_step(x: Tensor, weight: Tensor, state: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(state.shape)


conv_op = define(
    "short_conv(Tensor[] x, Tensor[] weight, Tensor[] state, Tensor? cu, bool silu) -> Tensor[]", _conv, _fake_conv
)
backward_op = define(
    "short_conv_backward(Tensor[] x, Tensor[] weight, Tensor[] state, Tensor? cu, Tensor?[] dy, Tensor?[] dfinal, bool silu)"
    " -> Tensor[]",
    _backward,
    _fake_backward,
)
step_op = define(
    "short_conv_step(Tensor x, Tensor weight, Tensor state, bool silu) -> (Tensor, Tensor)", launch.step, _fake_step
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, state, cu, silu = inputs
    ctx.save_for_backward(*x, *weight, *state, cu)
    ctx.counts, ctx.silu = (len(x), len(state)), silu
    ctx.set_materialize_grads(False)


def _derive(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    *tensors, cu = ctx.saved_tensors
    n, states = ctx.counts
    dy, dfinal = list(grads[:n]), list(grads[n:])
    if all(g is None for g in grads):
        return [None] * n, [None] * n, [None] * states, None, None
    found = backward_op(tensors[:n], tensors[n : 2 * n], tensors[2 * n :], cu, dy, dfinal, ctx.silu)
    return found[:n], found[n : 2 * n], found[2 * n :], None, None


derive(conv_op, _derive, _save)
refuse_derivative(backward_op, "short_conv: second derivatives need impl='reference'")
refuse_derivative(step_op, "short_conv_step: the kernel has no derivative; impl='reference' has one")

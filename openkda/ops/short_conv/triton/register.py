"""The convolution as torch operators, for torch.compile, autograd, and whatever else must see one opaque call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.short_conv.triton import launch

_LIBRARY = torch.library.Library("openkda", "FRAGMENT")
_LIBRARY.define("short_conv(Tensor[] x, Tensor[] weight, Tensor[] state, Tensor? cu, bool silu) -> Tensor[]")
_LIBRARY.define(
    "short_conv_backward(Tensor[] x, Tensor[] weight, Tensor[] state, Tensor? cu, Tensor?[] dy, Tensor?[] dfinal, bool silu)"
    " -> Tensor[]"
)
_LIBRARY.define("short_conv_step(Tensor x, Tensor weight, Tensor state, bool silu) -> (Tensor, Tensor)")


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


for _name, _run, _fake in (
    ("short_conv", _conv, _fake_conv),
    ("short_conv_backward", _backward, _fake_backward),
    ("short_conv_step", launch.step, _fake_step),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"openkda::{_name}", _fake, lib=_LIBRARY)

conv_op = torch.ops.openkda.short_conv.default
backward_op = torch.ops.openkda.short_conv_backward.default
step_op = torch.ops.openkda.short_conv_step.default


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


def _refuse_second(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError("short_conv: second derivatives need impl='reference'")


def _refuse_step(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError("short_conv_step: the kernel has no derivative; impl='reference' has one")


torch.library.register_autograd("openkda::short_conv", _derive, setup_context=_save, lib=_LIBRARY)
for _name, _rule in (("short_conv_backward", _refuse_second), ("short_conv_step", _refuse_step)):
    torch.library.register_autograd(
        f"openkda::{_name}", _rule, setup_context=lambda ctx, inputs, output: None, lib=_LIBRARY
    )

"""Launch and registration of the activation kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.moe.triton.gated import glu_gradient_kernel, glu_kernel
from openkda.ops.triton.api import ceil_div, launch

BLOCK = 2048

_LIBRARY = torch.library.Library("openkda", "FRAGMENT")
_LIBRARY.define("glu(Tensor gate, Tensor up, int kind, float b1, float b2) -> Tensor")
_LIBRARY.define("glu_backward(Tensor d, Tensor gate, Tensor up, int kind, float b1, float b2) -> (Tensor, Tensor)")


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


def _refuse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("gated activation: second derivatives are not implemented on a GPU; use float64 for them")


for _name, _run, _shape in (("glu", glu, _fake), ("glu_backward", _gradient, _fake_gradient)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"openkda::{_name}", _shape, lib=_LIBRARY)
torch.library.register_autograd("openkda::glu", _backward, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd(
    "openkda::glu_backward", _refuse, setup_context=lambda ctx, inputs, output: None, lib=_LIBRARY
)

glu_op = torch.ops.openkda.glu.default
glu_backward_op = torch.ops.openkda.glu_backward.default

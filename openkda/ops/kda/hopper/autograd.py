"""The Hopper forward's derivative: the Triton backward, which needs nothing of a forward but its inputs and its output.

It computes the chunks again, so which forward ran makes no difference to it but the last bits of o; or it finds them kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import are_plain, derive
from openkda.ops.kda.call import KDACall
from openkda.ops.kda.hopper.keep import can_keep
from openkda.ops.kda.hopper.keep import forward as keep
from openkda.ops.kda.hopper.register import _forward, kda_hopper_op
from openkda.ops.kda.triton.autograd import attach, differentiate
from openkda.ops.kda.triton.launch import readable


def _options(scale: float, bound: float, gate: int, want_state: bool) -> tuple[Any, ...]:
    return gate, bound, scale, True, True, want_state, False, torch.float32, False


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:9], None, output[0], None)  # as `triton.autograd` does, without positions
    ctx.options = _options(*inputs[9:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, ds: Tensor | None) -> tuple[Any, ...]:
    return (*differentiate(ctx, 0, do, ds, None), None, None, None, None)


def run(call: KDACall, *arguments: Any) -> tuple[Any, ...]:
    """`kda_hopper_op` on these arguments of it, nine tensors first, with its derivative: (o, final)."""
    tensors, options = arguments[:9], arguments[9:]
    if not are_plain(*tensors):
        return kda_hopper_op(*arguments)  # type: ignore[no-any-return]

    keeps, flags = call.keeps, _options(*options)

    def forward(workspaces: list[Tensor], *given: Any) -> tuple[Any, ...]:
        if keeps:
            a = readable(*given[:9], None, None, *flags, False)
            if can_keep(a):
                o, final, *kept = keep(a, workspaces)
                return o, final, None, *kept
        return (*_forward(workspaces, *given[:9], *options), None)

    return attach(call, forward, flags, (*tensors, None))[:2]


derive(kda_hopper_op, _backward, _save)

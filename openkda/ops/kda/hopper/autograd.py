"""The Hopper forward's derivative: the Triton backward, which needs nothing of a forward but its inputs and its output.

It computes the chunks again, so which forward ran makes no difference to it but the last bits of o.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.kda.hopper.register import _LIBRARY
from openkda.ops.kda.triton.autograd import differentiate

BOUNDED = 2
"""The gate's number in `triton.launch.Args`."""


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:9], None, output[0], None)  # as `triton.autograd` does, without positions
    scale, bound, want_state = inputs[9:]
    ctx.options = (BOUNDED, bound, scale, True, True, want_state, False, torch.float32, False)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, ds: Tensor | None) -> tuple[Any, ...]:
    return (*differentiate(ctx, do, ds, None), None, None, None)


torch.library.register_autograd("openkda::kda_hopper", _backward, setup_context=_save, lib=_LIBRARY)

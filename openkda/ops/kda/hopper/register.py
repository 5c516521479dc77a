"""The forward as a torch operator, so that torch.compile, CUDA graphs and inference mode see one opaque call."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.kda.hopper.launch import forward

_LIBRARY = torch.library.Library("openkda", "FRAGMENT")
_LIBRARY.define(
    "kda_hopper(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu,"
    " Tensor? state, float scale, float bound, bool want_state) -> (Tensor, Tensor)"
)


def _flat(x: Tensor | None, like: Tensor, size: int) -> Tensor:
    """A gate tensor as contiguous float32 [size]; None is zeros."""
    if x is None:
        return torch.zeros(size, dtype=torch.float32, device=like.device)
    return x.detach().reshape(-1).to(torch.float32).contiguous()


def _kda_hopper(q, k, v, g, beta, A_log, dt_bias, cu, state, scale, bound, want_state):
    HV = v.shape[2]
    o, final = forward(
        q, k, v, g, beta.contiguous(), _flat(A_log, q, HV), _flat(dt_bias, q, HV * 128),
        scale=scale, lower_bound=bound, initial_state=None if state is None else state.contiguous(),
        final_state=want_state, cu_seqlens=cu,
    )  # fmt: skip
    return o, o.new_empty(0) if final is None else final


def _fake(q, k, v, g, beta, A_log, dt_bias, cu, state, scale, bound, want_state):
    N = q.shape[0] if cu is None else cu.shape[0] - 1
    final = q.new_empty((N, v.shape[2], 128, 128), dtype=torch.float32) if want_state else q.new_empty(0)
    return v.new_empty(v.shape), final


_LIBRARY.impl("kda_hopper", _kda_hopper, "CompositeExplicitAutograd")
torch.library.register_fake("openkda::kda_hopper", _fake, lib=_LIBRARY)

kda_hopper_op = torch.ops.openkda.kda_hopper.default

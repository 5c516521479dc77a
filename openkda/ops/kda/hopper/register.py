"""The forward as a torch operator, so that torch.compile, CUDA graphs and inference mode see one opaque call."""

from __future__ import annotations

import torch

from openkda.ops.device.api import define
from openkda.ops.kda.hopper.launch import forward
from openkda.ops.kda.triton.launch import packed
from openkda.ops.kda.triton.register import as_tensor_pair

__all__ = ["as_tensor_pair", "kda_hopper_op"]


def _kda_hopper(q, k, v, g, beta, A_log, dt_bias, cu, state, scale, bound, want_state):
    HV = v.shape[2]
    if A_log is None:
        A_log = torch.zeros(HV, dtype=torch.float32, device=v.device)
    if dt_bias is None:
        dt_bias = torch.zeros(HV * 128, dtype=torch.float32, device=v.device)
    o, final = forward(
        q, k, v, g, beta.contiguous(), A_log, dt_bias, scale=scale, lower_bound=bound, initial_state=packed(state),
        final_state=want_state, cu_seqlens=packed(cu),
    )  # fmt: skip
    return o, o.new_empty(0) if final is None else final


def _fake(q, k, v, g, beta, A_log, dt_bias, cu, state, scale, bound, want_state):
    N = q.shape[0] if cu is None else cu.shape[0] - 1
    final = q.new_empty((N, v.shape[2], 128, 128), dtype=torch.float32) if want_state else q.new_empty(0)
    return v.new_empty(v.shape), final


kda_hopper_op = define(
    "kda_hopper(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu,"
    " Tensor? state, float scale, float bound, bool want_state) -> (Tensor, Tensor)",
    _kda_hopper,
    _fake,
)

"""The forward as a torch operator, so that torch.compile, CUDA graphs and inference mode see one opaque call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import define
from openkda.ops.kda.call import CALLS, KDACall, KDAOutput
from openkda.ops.kda.hopper.launch import forward
from openkda.ops.kda.triton.launch import packed
from openkda.ops.kda.triton.register import as_tensor_pair, replay_of
from openkda.ops.triton.api import dense, record

__all__ = ["as_tensor_pair", "kda_hopper_op", "run_recorded"]


def run_recorded(call: KDACall, arguments: tuple[Any, ...]) -> KDAOutput:
    """The forward without the operator; from now on calls of this key repeat its launches."""

    def run() -> list[Tensor]:
        workspaces: list[Tensor] = []
        o, final = _forward(workspaces, *arguments)
        return [o, *(() if final is None else (final,)), *workspaces]

    gate = call.gate
    assert call.key is not None  # for the type checker
    A_log, dt_bias = (None, None) if gate is None else (gate.A_log, gate.dt_bias)
    own = (
        call.q, call.k, call.v, call.g, call.beta, A_log, dt_bias, call.initial_state, call.cu_seqlens, None, None,
    )  # fmt: skip
    made, tape = record(run, own, call.q.device)
    if tape is not None:
        CALLS.replays[call.key] = replay_of(tape, call.output_final_state, False)
    return KDAOutput(made[0], made[1] if call.output_final_state else None)


def _kda_hopper(q, k, v, g, beta, A_log, dt_bias, cu, state, scale, bound, gate, want_state):
    o, final = _forward(None, q, k, v, g, beta, A_log, dt_bias, cu, state, scale, bound, gate, want_state)
    return o, o.new_empty(0) if final is None else final


def _forward(workspaces, q, k, v, g, beta, A_log, dt_bias, cu, state, scale, bound, gate, want_state):
    HV = v.shape[2]
    if A_log is None:
        A_log = torch.zeros(HV, dtype=torch.float32, device=v.device)
    if dt_bias is None:
        dt_bias = torch.zeros(HV * 128, dtype=torch.float32, device=v.device)
    return forward(
        q, k, v, g, dense(beta), A_log, dt_bias, scale=scale, lower_bound=bound, initial_state=packed(state),
        final_state=want_state, cu_seqlens=packed(cu), gate=gate, workspaces=workspaces,
    )  # fmt: skip


def _fake(q, k, v, g, beta, A_log, dt_bias, cu, state, scale, bound, gate, want_state):
    N = q.shape[0] if cu is None else cu.shape[0] - 1
    final = q.new_empty((N, v.shape[2], 128, 128), dtype=torch.float32) if want_state else q.new_empty(0)
    return v.new_empty(v.shape), final


kda_hopper_op = define(
    "kda_hopper(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu,"
    " Tensor? state, float scale, float bound, int gate, bool want_state) -> (Tensor, Tensor)",
    _kda_hopper,
    _fake,
)

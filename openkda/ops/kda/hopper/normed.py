"""`kda_normed` on Hopper: the two passes, whose scan norms its output (`scan_norm.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import goes_direct, is_watched
from openkda.ops.kda import hopper
from openkda.ops.kda.call import KDAOutput
from openkda.ops.kda.gate import BoundedGate
from openkda.ops.kda.hopper.schedule import fits_workspace, norm_pays, slots
from openkda.ops.kda.normed import CALLS, NormedCall


def refusals(call: NormedCall) -> list[str]:
    """Why one op cannot run the call; empty when it can."""
    c = call.kda
    reasons = hopper.refusals(c)
    if is_watched():
        return [*reasons, "not under torch.compile, torch.func or a dispatch mode"]
    if call.out_gate.dtype != torch.bfloat16:
        reasons.append(f"out_gate in bfloat16, received {call.out_gate.dtype}")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in call.tensors):
        reasons.append("no gradients: call it under torch.no_grad()")
    elif not goes_direct(*call.tensors):
        reasons.append("plain tensors")
    work = c.v.shape[2] * slots(c.v.shape[1], c.num_sequences, c.cu_seqlens is not None)
    if (c.q.shape[0] > 1 or c.cu_seqlens is not None) and not fits_workspace(work):
        reasons.append(f"one sequence or at most 2 GB of prepared chunks, received {work} chunks")
    return reasons


def declines(call: NormedCall) -> list[str]:
    """Why two ops are faster; empty when they are not."""
    c = call.kda
    sms = torch.cuda.get_device_properties(c.q.device).multi_processor_count
    sizes = (c.q.shape[1], c.num_sequences, c.v.shape[2], c.cu_seqlens is not None, sms)
    return [] if norm_pays(*sizes, isinstance(c.gate, BoundedGate)) else ["faster by sizes"]


def run(call: NormedCall, key: tuple[object, ...] | None) -> KDAOutput:
    """key: of a call that looks like an earlier one."""
    from openkda.ops.kda.hopper.launch import Norm
    from openkda.ops.kda.hopper.register import _forward, as_tensor_pair
    from openkda.ops.triton.api import dense, record

    c = call.kda
    norm = Norm(call.out_gate, dense(call.weight.detach().float()), call.eps)
    A_log, dt_bias = as_tensor_pair(c.gate)
    bound = c.gate.lower_bound if isinstance(c.gate, BoundedGate) else 0.0
    tensors = (c.q, c.k, c.v, c.g, c.beta, A_log, dt_bias, c.cu_seqlens, c.initial_state)

    def forward(workspaces: list[Tensor] | None) -> tuple[Tensor, Tensor | None]:
        made: tuple[Tensor, Tensor | None] = _forward(
            workspaces, *tensors, c.scale, bound, hopper.kind_of(c.gate), c.output_final_state, norm
        )
        return made

    if key is None:
        return KDAOutput(*forward(None))

    def once() -> list[Tensor]:
        workspaces: list[Tensor] = []
        y, final = forward(workspaces)
        return [y, *(() if final is None else (final,)), *workspaces]

    made, tape = record(once, call.tensors, c.q.device)
    wanted = c.output_final_state
    if tape is not None:

        def again(tensors: tuple[Tensor | None, ...]) -> KDAOutput | None:
            made = tape.run(tensors)
            return None if made is None else KDAOutput(made[0], made[1] if wanted else None)

        CALLS.replays[key] = again
    return KDAOutput(made[0], made[1] if wanted else None)

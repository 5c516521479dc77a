"""The fused Triton step; see `step.py`. Host side and operator registration (see `openkda/ops/kda/triton/register.py`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from openkda.ops.device.api import counts_in_32_bits, goes_direct, triton_refusals
from openkda.ops.kda.api import BoundedGate
from openkda.ops.kda_block.call import BlockCall, BlockOutput, BlockState

MAX_TILE = 128 * 256


def refusals(call: BlockCall) -> list[str]:
    reasons = triton_refusals(call.q)
    K, V = call.g.shape[-1], call.out_gate.shape[-1]
    if K > 256 or V > 256 or K * V > MAX_TILE:
        reasons.append(f"a state tile of at most {MAX_TILE} entries, received K={K} V={V}")
    s = call.state
    if not (counts_in_32_bits(s.recurrent, 2) and all(counts_in_32_bits(t, 1) for t in s.tensors()[1:])):
        reasons.append("states whose heads and windows span less than 2^31 elements")
    if call.needs_grad:
        reasons.append("the block is not differentiable")
    return reasons


def run(call: BlockCall) -> BlockOutput:
    from openkda.ops.kda_block.triton import launch as module

    launch: Any = module
    w, gate = call.weights, call.gate
    bounded = isinstance(gate, BoundedGate)
    A_log, dt_bias = (None if t is None else _flat(t) for t in (gate.A_log, gate.dt_bias))
    convs = tuple(t.detach().float().contiguous() for t in (w.conv_q, w.conv_k, w.conv_v))
    tokens = (call.q, call.k, call.v, call.g, call.beta, call.out_gate, *convs, w.norm.detach(), A_log, dt_bias)
    numbers = (2 if bounded else 1, gate.lower_bound or 0.0, w.norm_eps, call.scale)
    old = call.state.tensors()
    direct = goes_direct(*tokens, *old)
    if call.keep_all:
        y, states = (launch.all_direct if direct else launch.all_op)(*tokens, *old, call.slots, *numbers)
        return BlockOutput(y, None, states)
    if direct and call.key is not None:
        return launch.run_recorded(call, tokens, numbers)
    if call.slots is None:
        y, *new = (launch.step_direct if direct else launch.step_op)(*tokens, *old, *numbers)
        return BlockOutput(y, BlockState(*new), None)
    y = (launch.pool_direct if direct else launch.pool_op)(*tokens, *old, call.slots, *numbers)
    return BlockOutput(y, call.state, None)


def _flat(t: Tensor) -> Tensor:
    return t.detach().reshape(-1).float().contiguous()

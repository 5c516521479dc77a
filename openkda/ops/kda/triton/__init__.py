"""Portable Triton kernels for whole sequences and single tokens, and their backward.

Operands are float16 with a power of two per block, sums and states float32 (error 1.9e-3 of the output, of which bfloat16's
own rounding is 1.7e-3, and 5e-4 of the state on bfloat16 inputs). 16-bit inputs under `impl="triton_exact"` take two bfloat16
terms (1e-4 of the state), float32 inputs tf32 in three products (1e-6 of both, six times slower).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import counts_in_32_bits, goes_direct, triton_refusals
from openkda.ops.kda.call import KDACall, KDAOutput
from openkda.ops.kda.gate import BoundedGate

__all__ = ["refusals", "run", "step"]

MAX_SIZE = 256


def refusals(call: KDACall) -> list[str]:
    """Why these kernels cannot run the call; empty when they can."""
    K = call.q.shape[-1]
    reasons = triton_refusals(call.q)
    if max(K, call.v.shape[-1]) > MAX_SIZE:
        reasons.append(f"head sizes up to {MAX_SIZE}, received K={K} V={call.v.shape[-1]}")
    state = call.initial_state
    if state is not None and not counts_in_32_bits(state, 2):
        reasons.append(f"states whose heads span less than 2^31 elements, received strides {state.stride()}")
    return reasons


def run(call: KDACall) -> KDAOutput:
    return forward(call, exact=call.q.dtype == torch.float32, skip=False)


def step(call: KDACall) -> tuple[Tensor, Tensor]:
    o, state, _ = forward(call, exact=call.q.dtype == torch.float32, skip=True)
    assert state is not None  # for the type checker: the step call always asks for it
    return o[:, 0], state


def forward(call: KDACall, *, exact: bool, skip: bool) -> KDAOutput:
    """skip: rows without a slot give zeros (the step) instead of starting from a zero state."""
    from openkda.ops.kda.triton import register

    A_log, dt_bias = register.as_tensor_pair(call.gate)
    kind = 0 if call.gate is None else 2 if isinstance(call.gate, BoundedGate) else 1
    bound = call.gate.lower_bound if isinstance(call.gate, BoundedGate) else 0.0
    tokens = (call.q, call.k, call.v, call.g, call.beta, A_log, dt_bias, call.cu_seqlens)
    flags = (
        kind, bound, call.scale, call.use_qk_l2norm, call.use_beta_sigmoid, call.output_final_state, call.state_v_first,
    )  # fmt: skip
    if goes_direct(*tokens, call.initial_state):
        o, final, kept = register.run_direct(
            call, *tokens, call.initial_state, call.state_indices, call.state_positions, *flags, call.state_dtype, exact, skip
        )  # fmt: skip
        return KDAOutput(o, final if call.output_final_state else None, kept)
    if call.state_indices is None:
        arguments: Any = (*tokens, call.initial_state, call.state_positions, *flags, call.state_dtype, exact)
        if call.needs_grad:
            from openkda.ops.kda.triton import autograd  # hangs the backward on the op

            o, final, kept = autograd.run(None if skip else call, *arguments)
        else:
            o, final, kept = register.kda_op(*arguments)
    else:
        o, kept = register.kda_pool_op(
            *tokens, call.initial_state, call.state_indices, call.state_positions, *flags, exact, skip
        )
        final = call.initial_state
    return KDAOutput(o, final if call.output_final_state else None, None if call.state_positions is None else kept)

"""How states enter and leave a call: layout, dtype, pool slots. Shared by the implementations written in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.kda.call import KDACall


def compute_dtype(call: KDACall) -> torch.dtype:
    """float32, or float64 for float64 inputs: 16-bit inputs are computed in float32 inside."""
    return torch.promote_types(call.q.dtype, torch.float32)


def load_states(call: KDACall) -> Tensor:
    """As `read_states`, in memory of its own and contiguous."""
    return read_states(call).to(memory_format=torch.contiguous_format, copy=True)


def read_states(call: KDACall) -> Tensor:
    """[N, HV, K, V] in the compute dtype: zeros, the initial states themselves, or the pool's slots (-1: zeros)."""
    HV, K = call.g.shape[2:]
    S, slots = call.initial_state, call.state_indices
    if S is None:
        shape = (call.num_sequences, HV, K, call.v.shape[3])
        return torch.zeros(shape, dtype=compute_dtype(call), device=call.q.device)
    if slots is not None:
        S = S.index_select(0, slots.clamp(min=0))
        S = torch.where((slots >= 0).view(-1, 1, 1, 1), S, 0)  # not a product: an unused slot may hold NaN
    if call.state_v_first:
        S = S.transpose(-1, -2)
    return S.to(compute_dtype(call))


def store_states(call: KDACall, S: Tensor) -> Tensor | None:
    """What the caller gets for the final states S [N, HV, K, V]: the pool (written in place), a tensor, or None."""
    slots = call.state_indices
    if slots is not None:
        assert call.initial_state is not None  # for the type checker: validation made sure of it
        used = slots >= 0
        call.initial_state[slots[used].long()] = outgoing(call, S)[used]
        return call.initial_state if call.output_final_state else None
    return outgoing(call, S) if call.output_final_state else None


def outgoing(call: KDACall, S: Tensor) -> Tensor:
    """States [.., K, V] in the layout and dtype asked for."""
    S = S.transpose(-1, -2) if call.state_v_first else S
    return S.to(call.state_dtype).contiguous()

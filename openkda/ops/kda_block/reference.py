"""The block as the composition of its ops: the meaning, and the path on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import no_autocast
from openkda.ops.kda.api import kda
from openkda.ops.kda_block import single
from openkda.ops.kda_block.call import BlockCall, BlockOutput, BlockState
from openkda.ops.norm.api import gated_rms_norm
from openkda.ops.short_conv.api import short_conv


def refusals(call: BlockCall) -> list[str]:
    return ["the block is not differentiable: use short_conv, kda and gated_rms_norm"] if call.needs_grad else []


def run(call: BlockCall) -> BlockOutput:
    with no_autocast(call.q):
        done = single.step(call) if single.takes(call) else None
        return _compose(call) if done is None else done


def _compose(call: BlockCall) -> BlockOutput:
    w, slots = call.weights, call.slots
    N, T, HV, K = call.g.shape
    old = call.state.tensors() if slots is None else tuple(_gather(t, slots) for t in call.state.tensors())
    q, conv_q = short_conv(call.q, w.conv_q, initial_state=old[1], output_final_state=True)
    k, conv_k = short_conv(call.k, w.conv_k, initial_state=old[2], output_final_state=True)
    v, conv_v = short_conv(call.v, w.conv_v, initial_state=old[3], output_final_state=True)
    o, final, states = kda(
        q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (HV, -1)), call.g, call.beta,
        gate=call.gate, scale=call.scale, initial_state=old[0], output_final_state=True, use_qk_l2norm=True,
        use_beta_sigmoid=True, state_dtype=old[0].dtype,
        state_positions=torch.arange(N * T, device=q.device) if call.keep_all else None,
    )  # fmt: skip
    y = gated_rms_norm(o, call.out_gate, w.norm, w.norm_eps)
    if slots is not None:
        y = torch.where((slots >= 0).view(-1, 1, 1, 1), y, 0)
    if call.keep_all:
        assert states is not None  # for the type checker: positions were asked for
        return BlockOutput(y, None, states.unflatten(0, (N, T)).float() if final is not None else states)
    assert final is not None and conv_q is not None and conv_k is not None and conv_v is not None
    new = (final, conv_q, conv_k, conv_v)
    if slots is None:
        return BlockOutput(y, BlockState(*new), None)
    used = slots >= 0
    for pool, rows in zip(call.state.tensors(), new, strict=True):
        pool[slots[used].long()] = rows[used]
    return BlockOutput(y, call.state, None)


def _gather(pool: Tensor, slots: Tensor) -> Tensor:
    rows = pool.index_select(0, slots.clamp(min=0))
    return torch.where((slots >= 0).view(-1, *(1,) * (pool.dim() - 1)), rows, 0)  # an unused slot may hold NaN

"""One token a sequence in plain torch: the composition of `reference.run` written out, for decoding on a CPU.

There a call of torch costs one to three microseconds and the front door of an op ten, so that for a block of 4 heads of 128
they cost more than the work behind them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.ops.device.api import has_values, is_watched
from openkda.ops.kda_block.call import BlockCall, BlockOutput, BlockState
from openkda.ops.norm.api import L2NORM_EPS

LONGEST = 1e18
"""Rows of q and k up to which a sum of squares in float32 stays in its range."""


def takes(call: BlockCall) -> bool:
    """Whether `step` does this call: one token, new states out, and nobody who traces it (there is a branch on values)."""
    N, T = call.q.shape[:2]
    plain = T == 1 and N > 0 and call.slots is None and not call.keep_all
    return plain and not is_watched() and has_values(call.q)


def step(call: BlockCall) -> BlockOutput | None:
    """See `api.kda_block`; None for rows of q or k so long that their squares overflow: the ops themselves know what to do."""
    N, _, HV, K = call.g.shape
    dtype, S = call.q.dtype, call.state.recurrent
    wide = torch.promote_types(dtype, torch.float32)
    x, windows = _convolved(call, wide)
    V = call.v.shape[2]
    qk, v = x.split([x.shape[1] - V, V], 1)
    qk = qk.view(N, 2, -1, K)
    length = torch.linalg.vector_norm(qk, dim=-1, keepdim=True)
    if not length.amax().item() <= LONGEST:
        return None
    eps = length.new_full((), L2NORM_EPS)  # a tensor: to add a number costs three times as much
    qk = qk * torch.addcmul(eps, length, length).rsqrt_()
    if call.q.shape[2] != HV * K:
        qk = qk.repeat_interleave(HV // qk.shape[2], 2)
    q, k = qk.view(N, 2, HV, 1, K).unbind(1)
    decay = call.gate(call.g.squeeze(1)).expm1()  # as in openkda/ops/kda/chunkwise/entry.py: no decay near 1 is rounded
    write = call.beta.to(wide).sigmoid().view(-1, 1, 1)
    # [N * HV, ...] from here on: torch.bmm on three axes is one call where @ on four makes six.
    old = S.to(wide).flatten(0, 1)
    q, k = q.reshape(-1, 1, K), k.reshape(-1, 1, K)
    new = torch.addcmul(old, old, decay.view(-1, K, 1))
    new.addcmul_(k.transpose(1, 2), (v.reshape(N * HV, 1, -1) - torch.bmm(k, new)).mul_(write))
    o = torch.bmm(q * call.scale, new)
    y = _gated_norm(o.view(N, 1, HV, -1).to(dtype), call, wide)
    return BlockOutput(y, BlockState(new.view(S.shape).to(S.dtype), *windows), None)


def _convolved(call: BlockCall, wide: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    """silu(conv) of q | k | v, rounded to their dtype, as `wide` [N, C]; and the three new windows (views of one tensor)."""
    w, s, dtype = call.weights, call.state, call.q.dtype
    channels = [call.q.shape[2], call.k.shape[2], call.v.shape[2]]
    # [N, W, C], taps as whole rows; the windows of an earlier step lie in memory like that already.
    before = torch.cat([s.conv_q, s.conv_k, s.conv_v], 1).transpose(1, 2)
    window = torch.cat([before, torch.cat([call.q, call.k, call.v], 2)], 1)
    taps = torch.cat([w.conv_q, w.conv_k, w.conv_v]).t().to(wide)
    y = F.silu((window * taps).sum(1)).to(dtype).to(wide)
    return y, window[:, 1:].transpose(1, 2).split(channels, 1)


def _gated_norm(o: Tensor, call: BlockCall, wide: torch.dtype) -> Tensor:
    """As `gated_rms_norm`: o, out_gate [N, 1, HV, V]."""
    x, w = o.to(wide), call.weights
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_square = torch.addcmul(length.new_full((), w.norm_eps), length, length, value=1 / x.shape[-1])
    return (x * mean_square.rsqrt_()).mul_(w.norm.to(wide)).mul_(call.out_gate.to(wide).sigmoid()).to(o.dtype)

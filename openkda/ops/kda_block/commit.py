"""Keeping one of the states that `kda_block(..., keep="all")` returned: the end of a verification of drafted tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import triton_refusals
from openkda.ops.kda_block.call import BlockState
from openkda.ops.kda_block.checks import check_accepted


def kda_block_commit(
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    accepted: Tensor,
    *,
    state: BlockState,
    slots: Tensor | None = None,
) -> BlockState:
    """Continue each sequence after its accepted tokens: the state there, and the convolution windows that end there.

    Args:
        states: [N, T, HV, K, V], the states after each of T tokens. q, k, v: [N, T, channels], the same projections before the
            convolutions that the verifying call was given.
        accepted: [N] int32 or int64, tokens to keep of each sequence, 0 .. T (more counts as T, fewer as 0); 0 leaves a
            sequence where it was.
        state: what the verifying call read. slots: as given to it; the pool is then written IN PLACE (-1: nothing is), and
            returned. Without slots `state` is left untouched and a new one is returned.

    Nothing here waits for the device: a CUDA graph may hold the verification, the comparison and the commit.
    Raises: ValueError or TypeError, showing expected and received, before anything is written. Not differentiable.
    """
    check_accepted(states, q, k, v, accepted, state, slots)
    with torch.no_grad():
        if slots is not None and not triton_refusals(q):
            from openkda.ops.kda_block.triton.keep import keep_in_pool

            keep_in_pool(states, (q, k, v), accepted, state, slots)
            return state
        if slots is None:
            return BlockState(*_chosen(states, (q, k, v), accepted, state.tensors()))
        used = (slots >= 0) & (accepted > 0)  # on a GPU without Triton the next line waits for the device
        rows = slots[used].long()
        old = tuple(t[rows] for t in state.tensors())
        new = _chosen(states[used], tuple(x[used] for x in (q, k, v)), accepted[used], old)
        for pool, t in zip(state.tensors(), new, strict=True):
            pool[rows] = t
        return state


def _chosen(
    states: Tensor, inputs: tuple[Tensor, ...], accepted: Tensor, old: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The rows of a state after `accepted` tokens, from the rows before them."""
    N, T = states.shape[:2]
    count = accepted.long().clamp(0, T)
    row = torch.arange(N, device=states.device)
    last = states[row, (count - 1).clamp(min=0)].to(old[0].dtype) if T else old[0]
    kept = torch.where((count > 0).view(-1, 1, 1, 1), last, old[0])
    windows = []
    for x, window in zip(inputs, old[1:], strict=True):
        tokens = torch.cat([window, x.transpose(1, 2)], 2)  # [N, channels, W - 1 + T], newest last
        at = count.view(-1, 1, 1) + torch.arange(window.shape[2], device=x.device)
        windows.append(tokens.gather(2, at.expand(-1, tokens.shape[1], -1)))
    return (kept, *windows)

"""Appending tokens to the latent cache of an MLA layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.layers.state import MLAState
from openkda.ops.device.api import is_watched


def start(latent: Tensor, cu_seqlens: Tensor | None) -> MLAState:
    """The state of sequences that have only these tokens: latent [B, T, R], or a pack [1, T, R] with cu_seqlens."""
    if cu_seqlens is None:
        B, T = latent.shape[:2]
        return MLAState(latent, torch.full((B,), T, device=latent.device), T)
    lengths = cu_seqlens.diff().long()
    longest = int(lengths.max())
    row, place = _where(lengths, cu_seqlens)
    empty = latent.new_zeros(lengths.shape[0], longest, latent.shape[-1])
    return MLAState(empty.index_put((row, place), latent[0]), lengths, longest)


def append(state: MLAState, new: Tensor, cu_seqlens: Tensor | None, keep: bool) -> MLAState:
    """`state` followed by new [N, T, R], or by a pack [1, T, R] with cu_seqlens [N + 1]; `state` stays what it was.

    Writes in place behind the newest state of a buffer, so a token costs one row, not a copy of the cache. Under autograd
    everything is copied, and so it is without `keep`: the result will be continued (it becomes the buffer's newest state).
    """
    longest = int(state.length.max()) if state.longest is None else state.longest
    recorded = torch.is_grad_enabled() and (new.requires_grad or state.latent.requires_grad)
    if cu_seqlens is None and keep and not recorded and new.is_cpu and new.shape[:2] == (1, 1) and not is_watched():
        return _append_one(state, new[0, 0], longest + 1)
    if cu_seqlens is None:
        N, T = new.shape[:2]
        added: Tensor | int = T
        row = torch.arange(N, device=new.device).repeat_interleave(T)
        place = (state.length.unsqueeze(1) + torch.arange(T, device=new.device)).flatten()
        longest += T
    else:
        added = cu_seqlens.diff()
        row, offset = _where(added, cu_seqlens)
        place = state.length[row] + offset
        longest = int((state.length + added).max())
    length, flat = state.length + added, new.flatten(0, 1).to(state.latent.dtype)
    held = state.latent[:, :longest]
    if recorded or not keep:
        wide = F.pad(held, (0, 0, 0, longest - held.shape[1]))
        return MLAState(wide.index_put((row, place), flat), length, longest)
    buffer, tail = _room(state, longest)
    buffer[row, place] = flat
    tail.append(length)
    return MLAState(buffer, length, longest, tail)


def _append_one(state: MLAState, new: Tensor, longest: int) -> MLAState:
    """One token [R] of one sequence on a CPU, where its place is a number and the write one copy: 20 us instead of 75."""
    place, length = int(state.length), state.length + 1
    buffer, tail = _room(state, longest)
    buffer[0, place].copy_(new)
    tail.append(length)
    return MLAState(buffer, length, longest, tail)


def _room(state: MLAState, longest: int) -> tuple[Tensor, list[Tensor]]:
    """A buffer with the tokens of `state` and room for `longest`, and its `tail`, empty until the caller has written."""
    if not _claimed(state, longest):
        return _grown(state.latent[:, :longest], longest), []
    assert state.tail is not None  # for the type checker: what is claimed has one
    return state.latent, state.tail


def _claimed(state: MLAState, longest: int) -> bool:
    """Whether this call may write behind the end of `state`. Then nobody else can until the new length stands in `tail`:
    taking out its element is one step even where several threads continue one state."""
    fits = longest <= state.latent.shape[1]
    if not fits or state.tail is None or state.latent.is_inference() != torch.is_inference_mode_enabled():
        return False
    try:
        newest = state.tail.pop()
    except IndexError:  # another thread is writing
        return False
    if newest is not state.length:
        state.tail.append(newest)
        return False
    return True


def _grown(held: Tensor, longest: int) -> Tensor:
    """A copy of `held` with room for half as many tokens again, so that n appended tokens copy O(n) in all."""
    capacity = (longest + longest // 2 + 64) // 64 * 64
    buffer = held.new_zeros(held.shape[0], capacity, held.shape[2])
    buffer[:, : held.shape[1]] = held
    return buffer


def _where(lengths: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence of every packed token, and its place within it."""
    row = torch.arange(lengths.shape[0], device=lengths.device).repeat_interleave(lengths)
    return row, torch.arange(row.shape[0], device=row.device) - cu_seqlens.long()[row]

"""A block of sequences, segment by segment: forwards with the states, backwards with their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openkda.ops.kda.chunkwise.backward import segment_backward
from openkda.ops.kda.chunkwise.forward import Settings, Tokens, factors, prologue, walk
from openkda.ops.kda.chunkwise.plan import Block, Segment

Saved = list[tuple[Tensor, Tensor]]  # of every segment: its errors E and the states that entered its chunks


def block_forward(block: Block, t: Tokens, opts: Settings, S: Tensor, o: Tensor, keep: bool) -> Saved:
    """Writes this block's states S [N, HV, K, V] and outputs o [R, HV, V]; returns what its backward needs."""
    members = torch.tensor(block.sequences, device=S.device)
    state = S[members].flatten(0, 1)
    saved: Saved = []
    for seg in block.segments():
        rows = _rows(seg, t)
        q, k, log_a, b = prologue(rows, opts)
        O, E, states = walk(factors(rows, opts, q, k, seg.clear_padding(log_a), b), state, seg.count)
        seg.put(O.unflatten(1, (len(members), -1)).transpose(2, 3), o)
        state = states[-1]
        if keep:
            saved.append((E, states[:-1]))
    S[members] = state.view(len(members), *S.shape[1:])
    return saved


def block_backward(
    block: Block, t: Tokens, opts: Settings, saved: Saved, do: Tensor, dS: Tensor, grads: Sequence[Tensor | None]
) -> None:
    """Writes this block's rows of the gradients of `Tokens`, adds its share to those of the gate's tensors, and turns its
    rows of dS [N, HV, K, V] from the leaving states' gradient into the entering ones'."""
    members = torch.tensor(block.sequences, device=dS.device)
    dstate = dS[members].flatten(0, 1)
    for seg, (E, states) in zip(reversed(list(block.segments())), reversed(saved), strict=True):
        found, dstate = segment_backward(seg, _rows(seg, t), opts, E, states, seg.take(do), dstate)
        for i, (into, g) in enumerate(zip(grads, found, strict=True)):
            if into is None or g is None:
                continue
            if i < 5:
                seg.put(g, into)
            else:
                into += g
    dS[members] = dstate.view(len(members), *dS.shape[1:])


def _rows(seg: Segment, t: Tokens) -> Tokens:
    q, k, v, g, beta = (seg.take(x) for x in t[:5])
    return Tokens(q, k, v, g, beta, t.A_log, t.dt_bias)

"""Gradients through states at chosen positions: every position cuts its sequence in two, so that its state is the last state of
one member of a pack and the first of the next.

Cuts and members are found on the device, without waiting for it: P positions in N sequences make N + P members, of which
those between two equal cuts are empty. First states are the forward's own results; the reverse walk alone has to pass from
member to member (`walks.py`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from openkda.ops.kda.triton.backward import Gradients, backward
from openkda.ops.kda.triton.launch import Args


def backward_at_positions(
    a: Args, o: Tensor, do: Tensor | None, ds1: Tensor | None, want_ds0: bool, kept: Tensor, dkept: Tensor
) -> Gradients:
    """As `backward.backward`, for a call with positions, of which `kept` came back and `dkept` is the gradient."""
    assert a.positions is not None
    B, T, *_ = a.sizes
    P, N = kept.shape[0], a.num_sequences
    cu = torch.arange(B + 1, device=o.device) * T if a.cu is None else a.cu.long()
    # A cut at the end of a sequence belongs to it, not to the next one: positions first, and a stable sort.
    members, source = torch.sort(torch.cat([a.positions.long() + 1, cu]), stable=True)
    place = torch.empty_like(source)
    place[source] = torch.arange(P + N + 1, device=o.device)
    nothing = kept.new_zeros((N, *kept.shape[1:]), dtype=torch.float32)
    before = torch.cat([kept.float(), nothing if a.state is None else a.state.float()])
    after = torch.cat([dkept.float(), nothing[:1], nothing if ds1 is None else ds1.float()])
    q, k, v, g, beta = (_one_row(x) for x in (a.q, a.k, a.v, a.g, a.beta))
    pack = replace(a, q=q, k=k, v=v, g=g, beta=beta, cu=members, state=before[source[:-1]], positions=None)
    do = None if do is None else _one_row(do)
    found = backward(pack, _one_row(o), do, after[source[1:]], want_ds0, place[P:])
    tokens = [x.view(y.shape) for x, y in zip(found[:5], (a.q, a.k, a.v, a.g, a.beta), strict=True)]
    return (*tokens, *found[5:])  # type: ignore[return-value]


def _one_row(x: Tensor) -> Tensor:
    return x if x.shape[0] == 1 else x.reshape(1, -1, *x.shape[2:])

"""The Hopper forward that keeps its prepared chunks, 3.9 times a 16-bit input, for the backward (`recompute=False`).

The chunks are those that the backward's walks prepare otherwise, so the walks of both directions read the same operands: T, M
and Kh of the tokens' own U, not those of apart.py, whose U' = A U the gradients' products would have to turn back without
knowing A. So of keys of nearly one direction output and state are less accurate here (docs/capabilities.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.kda.hopper.backward import fits_walks
from openkda.ops.kda.hopper.launch import _Problem, _rows, _scan
from openkda.ops.kda.hopper.schedule import fits_workspace
from openkda.ops.kda.hopper.walks import prepared
from openkda.ops.kda.triton.backward import walk_of
from openkda.ops.kda.triton.launch import CHUNK, Args, aligned
from openkda.ops.triton.api import dense


def can_keep(a: Args) -> bool:
    """Whether `forward` takes this call, and the backward what it keeps."""
    return fits_walks(a, a.v, None) and fits_workspace(walk_of(a).slots * a.v.shape[2])


def forward(a: Args, workspaces: list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(output, final states or None, the workspace of chunks, what keys and queries were multiplied by)."""
    HV, walk, device = a.v.shape[2], walk_of(a), a.v.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return forward(a, workspaces)
    norms = torch.empty(aligned(HV * walk.tiles * 3 * CHUNK), dtype=torch.float32, device=device)
    w = prepared(a, walk.slots, walk.tiles, norms)
    o = torch.empty(a.v.shape, dtype=a.v.dtype, device=device)
    N = a.num_sequences
    final = torch.empty((N, HV, 128, 128), dtype=torch.float32, device=device) if a.want_state else None
    p = _Problem(a.q, a.k, _rows(a.v), a.g, a.beta, a.beta, a.beta, a.scale, a.bound, a.cu)
    s0 = None if a.state is None else dense(a.state)
    _scan(p, w, s0, final, o, n=N, length=a.q.shape[1])
    return o, final, w.workspace, norms

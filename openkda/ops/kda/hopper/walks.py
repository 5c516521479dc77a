"""Host side of the backward's first stages on Hopper: factors of chunks of 64 as the forward has them, then both walks."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.kda.hopper import BOUNDED, HEAD
from openkda.ops.kda.hopper.backward import REGISTERS
from openkda.ops.kda.hopper.launch import (
    _HALF,
    _ROWS,
    _descriptor,
    _launch,
    _Operands,
    _rows,
    _sm_count,
    _tiles,
    operands_in,
)
from openkda.ops.kda.hopper.levels import kda_prepare_levels_kernel
from openkda.ops.kda.hopper.prepare import kda_prepare_backward_kernel
from openkda.ops.kda.hopper.replay import kda_replay_kernel
from openkda.ops.kda.hopper.reverse import kda_reverse_kernel
from openkda.ops.kda.hopper.schedule import CHUNK, SLOT_BYTES, is_split, padded_count
from openkda.ops.kda.triton.launch import Args
from openkda.ops.triton.api import dense, empty


def walk(
    a: Args, do: Tensor, ds1: Tensor | None, slots: int, tiles: int, token: Tensor, u: Tensor, dd: Tensor, s: Tensor,
    ds: Tensor, u_unit: Tensor, dd_unit: Tensor, s_unit: Tensor, ds_unit: Tensor, ds0: Tensor | None,
    w: _Operands | None = None,
) -> None:  # fmt: skip
    """Fills what `triton/walks.py` fills, for two blocks of 64 value channels, and the norms of keys and queries in `token`.
    w: the chunks, where they are prepared already, `token` with them."""
    B, T, _, HV, *_ = a.sizes
    N, packed, index = a.num_sequences, a.cu is not None, do.device.index
    w = prepared(a, slots, tiles, token) if w is None else w
    split = is_split(N * HV, _sm_count(index))
    grid = (N * HV * (2 if split else 1), 1)
    rows, sizes = [CHUNK, 64], (T, B * T, slots, tiles)
    states = HV * slots * HEAD
    ds1, s0 = (None if x is None else dense(x.float()) for x in (ds1, a.state))
    some = w.decay  # read by nobody
    tokens = lambda x: _descriptor(x, B * T, HV * HEAD, HV * HEAD, rows, _HALF)  # noqa: E731
    _launch(
        kda_reverse_kernel, grid,
        (*w.descriptors, _tiles(_rows(do), rows, _HALF), tokens(dd),
         _descriptor(ds, states, HEAD, HEAD, [CHUNK, HEAD], _HALF)),
        (w.decay, w.ranks, dd, dd_unit, ds_unit, some if ds1 is None else ds1, some if ds0 is None else ds0),
        (HV,), (*sizes, max(a.scale, 1.0)), (ds1 is not None, ds0 is not None, packed, split), index,
    )  # fmt: skip
    _launch(
        kda_replay_kernel, grid,
        (*w.descriptors, _tiles(_rows(a.v), rows, _HALF), tokens(u),
         _descriptor(s, states, HEAD, HEAD, [CHUNK, HEAD], _HALF)),
        (w.decay, w.ranks, u, u_unit, s_unit, some if s0 is None else s0),
        (HV,), sizes, (s0 is not None, packed, split), index,
    )  # fmt: skip


def workspace_bytes(a: Args, slots: int) -> int:
    """Of the chunks of all heads and a pack's ranks."""
    padded = padded_count(a.num_sequences) if a.cu is not None else 16
    return slots * a.v.shape[2] * SLOT_BYTES + 16 * padded


def operands_of(a: Args, slots: int, workspace: Tensor) -> _Operands:
    """Where everything lies in a workspace of that size."""
    return operands_in(workspace, slots * a.v.shape[2])


def prepared(a: Args, slots: int, tiles: int, token: Tensor) -> _Operands:
    """All chunks, in a workspace of their own; what keys and queries were multiplied by goes to `token`."""
    _, T, H, HV, *_ = a.sizes
    N, packed, device = a.num_sequences, a.cu is not None, a.q.device
    padded = padded_count(N) if packed else 16
    w = operands_of(a, slots, empty((workspace_bytes(a, slots),), torch.uint8, device))
    block = [CHUNK, HEAD]
    A_log, dt_bias = (torch.zeros(HV * HEAD, device=device) if x is None else x for x in (a.A_log, a.dt_bias))
    beta = dense(a.beta)
    numbers, constants = (T, N, tiles, a.scale), (packed, padded)
    bounded = a.gate == BOUNDED
    _launch(
        kda_prepare_backward_kernel if bounded else kda_prepare_levels_kernel, (slots * HV, 1),
        (*(_tiles(_rows(x), block, _ROWS) for x in (a.q, a.k, a.g)), *w.descriptors),
        (w.decay, w.ranks, beta, A_log, dt_bias, beta if a.cu is None else a.cu, token),
        (HV, HV // H), (*numbers, a.bound) if bounded else numbers,
        constants if bounded else (*constants, False, True, a.gate), device.index,
        **({} if bounded else {"maxnreg": REGISTERS}),
    )  # fmt: skip
    return w

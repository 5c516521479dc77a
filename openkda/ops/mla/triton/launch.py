"""Launch and registration of the decoding attention."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import define, refuse_derivative
from openkda.ops.mla.triton.decode import part_kernel, sum_kernel
from openkda.ops.triton.api import ceil_div, launch, padded

HEADS = 16
PROGRAMS = 264
"""Two for each multiprocessor of a Hopper card."""
MOST = 64
LOG2E = 1.4426950408889634


def attend(queries: Tensor, latent: Tensor, lengths: Tensor | None, scale: float, rank: int) -> Tensor:
    (N, H, R), S = queries.shape, latent.shape[1]
    out = queries.new_empty(N, H, rank)
    if out.numel() == 0:
        return out
    blocks = ceil_div(H, HEADS)
    keys = 32 if queries.element_size() == 2 else 16
    splits = max(1, min(MOST, ceil_div(PROGRAMS, N * blocks), ceil_div(S, 2 * keys)))
    o, m, total = (
        torch.empty(N, splits, H, *last, dtype=torch.float32, device=queries.device) for last in ((rank,), (), ())
    )
    wide = padded(rank)
    constants = (rank, R - rank, HEADS, keys, wide, padded(R - rank), lengths is not None)
    tensors = (queries.contiguous(), latent, None if lengths is None else lengths.contiguous(), o, m, total)
    steps, numbers = (latent.stride(0), latent.stride(1)), (S, H, splits, scale * LOG2E)
    launch(part_kernel, N * blocks * splits, tensors, steps, numbers, constants, 4, queries.device)
    launch(sum_kernel, N * H, (o, m, total, out), (), (H, splits), (rank, wide, MOST), 4, queries.device)
    return out


def _fake(queries: Tensor, latent: Tensor, lengths: Tensor | None, scale: float, rank: int) -> Tensor:
    return queries.new_empty(*queries.shape[:2], rank)


attend_op = define(
    "mla_attend(Tensor queries, Tensor latent, Tensor? lengths, float scale, int rank) -> Tensor", attend, _fake
)
refuse_derivative(attend_op, "mla: the kernel of a decoding step has no derivative")

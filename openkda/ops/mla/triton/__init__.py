"""One query a sequence against a cache of latents on a GPU: the cache is read once, by as many programs as fill the card."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import goes_direct, triton_refusals


def takes(queries: Tensor, latent: Tensor) -> bool:
    """Whether `attend` runs this call: it has no derivative."""
    if triton_refusals(queries) or queries.dtype != latent.dtype or latent.stride(-1) != 1:
        return False
    return not (torch.is_grad_enabled() and (queries.requires_grad or latent.requires_grad))


def attend(queries: Tensor, latent: Tensor, lengths: Tensor | None, scale: float, rank: int) -> Tensor:
    """queries [N, H, R], latent [N, S, R], of which the first lengths[n] count (None: all) -> their mean value [N, H, rank]."""
    from openkda.ops.mla.triton import launch

    run = launch.attend if goes_direct(queries, latent, lengths) else launch.attend_op
    result: Tensor = run(queries, latent, lengths, scale, rank)
    return result

"""The largest attention score of every head: what QK-clip watches, and no attention kernel gives away.

Costs the q k^T of the attention once more, a block of rows at a time.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openkda.ops.mla.call import MLACall
from openkda.ops.mla.expanded import keys_values

SCORES = 1 << 24
"""Most scores of one block, over all heads."""


@torch.no_grad()
def max_logits(
    q: Float[Tensor, "B T H D"],
    latent: Float[Tensor, "B T R"],
    kv_b: Float[Tensor, "HD rank"],
    *,
    cu_seqlens: Int[Tensor, " _n1"] | None = None,
) -> Float[Tensor, " H"]:
    """Largest scaled score q . k of each head over all pairs that causal attention sees, float32 or wider.

    Args: as in `openkda.ops.mla.api.mla` without a cache. No gradient. A head that saw nothing has -inf.
    """
    with torch.autocast(q.device.type, enabled=False):
        call = MLACall(q, latent, kv_b, q.shape[-1] ** -0.5, None, cu_seqlens).in_float32()
        k, _ = keys_values(call, call.latent)
        return _largest((call.q * call.scale).transpose(1, 2), k.transpose(1, 2), cu_seqlens)


def _largest(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """q, k [B, H, T, D]."""
    B, H, T, _ = q.shape
    best = q.new_full((H,), float("-inf"))
    for begin, end in pairwise([0, T] if cu_seqlens is None else cu_seqlens.tolist()):
        rows = max(1, SCORES // max(1, B * H * (end - begin)))
        for a in range(begin, end, rows):
            b = min(a + rows, end)
            scores = q[:, :, a:b] @ k[:, :, begin:b].transpose(-1, -2)
            later = torch.ones(b - a, b - begin, dtype=torch.bool, device=q.device).triu(a - begin + 1)
            best = torch.maximum(best, scores.masked_fill_(later, float("-inf")).amax((0, 2, 3)))
    return best

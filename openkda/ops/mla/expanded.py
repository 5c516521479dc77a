"""Latent attention with keys and values of every head built from the latents: the cheaper form for many queries.

    [k_nope | v] = W_UK, W_UV applied to the latent;   k = [k_nope | shared key];   softmax attention as usual.

All softmax arithmetic is torch's scaled_dot_product_attention. Its fast CPU kernel wants keys and values of one width:
the narrower is padded with zeros, which changes no result (192/128 at T = 2048, 4 heads, one thread: 459 -> 134 ms).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.ops.mla.call import MLACall

MASK_ENTRIES = 1 << 24
"""Largest [queries, keys] mask that is built at once when a chunk of queries continues a cache."""


def keys_values(call: MLACall, latent: Tensor) -> tuple[Tensor, Tensor]:
    """[..., S, rank + shared] -> keys [..., S, H, nope + shared] and values [..., S, H, V]."""
    H = call.q.shape[2]
    kv = F.linear(latent[..., : call.rank], call.kv_b).unflatten(-1, (H, -1))
    k_nope, v = kv.split([call.nope_dim, call.v_dim], dim=-1)
    shared = latent[..., call.rank :].unsqueeze(-2).expand(*k_nope.shape[:-1], -1)
    return torch.cat([k_nope, shared.to(k_nope.dtype)], dim=-1), v


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [N, T, H, D], k [N, S, H, D], v [N, S, H, V] with T <= S: the queries are the LAST T of the S tokens.

    Returns [N, T, H, V]. No mask when T = S or T = 1; otherwise one of at most MASK_ENTRIES at a time.
    """
    T, S, V = q.shape[1], k.shape[1], v.shape[-1]
    q, k, v = (t.transpose(1, 2) for t in _one_width(q, k, v))
    if T == 1:
        o = F.scaled_dot_product_attention(q, k, v, scale=scale)
    elif T == S:  # a branch, not `is_causal=T == S`: in a graph that is a symbol, which is no flag
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        rows = max(1, MASK_ENTRIES // S)
        o = torch.cat([_continuing(q, k, v, a, min(a + rows, T), scale) for a in range(0, T, rows)], dim=2)
    return o.transpose(1, 2)[..., :V]


def dense(call: MLACall, q: Tensor, latent: Tensor) -> Tensor:
    """q [N, T, H, D] are the last T tokens of latent [N, S, R], every entry of which is valid."""
    return causal_attention(q, *keys_values(call, latent), call.scale)


def _continuing(q: Tensor, k: Tensor, v: Tensor, start: int, end: int, scale: float) -> Tensor:
    """Queries start..end of T, heads first: query i sees keys 0 .. S - T + i, and no later key is read at all."""
    visible = k.shape[2] - q.shape[2] + end
    mask = torch.ones(end - start, visible, dtype=torch.bool, device=q.device).tril(visible - (end - start))
    return F.scaled_dot_product_attention(
        q[:, :, start:end], k[:, :, :visible], v[:, :, :visible], attn_mask=mask, scale=scale
    )


def _one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = k.shape[-1] - v.shape[-1]
    if wide > 0:
        return q, k, F.pad(v, (0, wide))
    return (F.pad(q, (0, -wide)), F.pad(k, (0, -wide)), v) if wide < 0 else (q, k, v)

"""Latent attention without building keys and values: the cheaper form when few queries meet a long cache.

The up-projections move to the other side of the two products,

    q_nope . (W_UK c) = (W_UK^T q_nope) . c        sum_s p_s (W_UV c_s) = W_UV (sum_s p_s c_s)

so all heads attend to the latents themselves: multi-query attention with one key of rank + shared values (576) and
the first `rank` (512) of it as value. The scale stays that of the original head dim. Source: Kimi Linear report,
section on MLA without position encoding; DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.ops.mla import triton as kernels
from openkda.ops.mla.call import MLACall


def is_cheaper(call: MLACall, queries: int, keys: int) -> bool:
    """Whether absorbing costs fewer multiplications than expanding `keys` latents for `queries` new tokens."""
    up = call.rank * (call.nope_dim + call.v_dim)
    expanded = keys * up + queries * keys * (call.nope_dim + call.shared_dim + call.v_dim)
    absorbed = queries * up + queries * keys * (2 * call.rank + call.shared_dim)
    return absorbed < expanded


def dense(call: MLACall, q: Tensor, latent: Tensor, lengths: Tensor | None = None) -> Tensor:
    """q [N, T, H, D] are the last T of the lengths[n] (None: all S) tokens of latent [N, S, R] -> [N, T, H, V]."""
    N, T, H, _ = q.shape
    S = latent.shape[1]
    W_UK, W_UV = call.up_projections()
    q_nope, q_shared = q.split([call.nope_dim, call.shared_dim], dim=-1)
    queries = torch.cat([_per_head(q_nope, W_UK), q_shared], dim=-1)
    if T == 1 and q.is_cuda and kernels.takes(queries, latent):
        o = kernels.attend(queries[:, 0], latent, lengths, call.scale, call.rank)
        return _per_head(o.unsqueeze(1), W_UV.transpose(1, 2))
    if lengths is not None:
        # A weight of zero does not silence a NaN: what lies behind the end of a shorter row must not be multiplied.
        unused = torch.arange(S, device=q.device) >= lengths.view(N, 1)
        latent = latent.masked_fill(unused.unsqueeze(-1), 0.0)
    kv = latent.unsqueeze(1)  # key and value are one tensor; the shared part of the result is cut off below
    if T == 1:  # the heads take the place of the queries: the cache is read once, not once a head
        mask = None if lengths is None else ~unused.view(N, 1, 1, S)
        o = F.scaled_dot_product_attention(queries.transpose(1, 2).reshape(N, 1, H, -1), kv, kv, mask, scale=call.scale)
        o = o.view(N, H, 1, -1)
    else:
        last = (S if lengths is None else lengths.view(-1, 1, 1, 1)) - T + torch.arange(T, device=q.device).view(T, 1)
        kv = kv.expand(-1, H, -1, -1)
        o = F.scaled_dot_product_attention(
            queries.transpose(1, 2), kv, kv, torch.arange(S, device=q.device) <= last, scale=call.scale
        )
    return _per_head(o[..., : call.rank].transpose(1, 2), W_UV.transpose(1, 2))


def _per_head(x: Tensor, w: Tensor) -> Tensor:
    """x [N, T, H, D] times a matrix of every head, w [H, D, R] -> [N, T, H, R]. For one token the rows of a head lie in one
    product already, which einsum finds out in 17 us instead of 7."""
    if x.shape[1] == 1:
        return torch.bmm(x.squeeze(1).transpose(0, 1), w).transpose(0, 1).unsqueeze(1)
    return torch.einsum("nthd,hdr->nthr", x, w)

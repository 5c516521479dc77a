"""Latent attention over sequences of different lengths, one call for each, or torch's own varlen kernel on a GPU.

No [T, T] mask is ever built: document boundaries are slices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.ops.mla import expanded
from openkda.ops.mla.call import MLACall
from openkda.ops.packing.api import longest_sequence

Dense = Callable[[MLACall, Tensor, Tensor], Tensor]


def by_sequence(call: MLACall, dense: Dense) -> Tensor:
    """q [1, T, H, D] under cu_seqlens (or [N, T, H, D], one row a sequence). Without lengths the latents are packed
    like q; with them, row n of the cache belongs to sequence n."""
    q, latent, lengths = call.q, call.latent, call.lengths
    if call.cu_seqlens is None:
        assert lengths is not None  # the caller sends plain batches elsewhere
        rows = [dense(call, q[n : n + 1], latent[n : n + 1, :end]) for n, end in enumerate(lengths.tolist())]
        return torch.cat(rows)
    spans = [(n, a, b) for n, (a, b) in enumerate(pairwise(call.cu_seqlens.tolist())) if b > a]
    if lengths is None:
        k, v = expanded.keys_values(call, latent)
        outputs = [expanded.causal_attention(q[:, a:b], k[:, a:b], v[:, a:b], call.scale) for _, a, b in spans]
    else:
        ends = lengths.tolist()
        outputs = [dense(call, q[:, a:b], latent[n : n + 1, : ends[n]]) for n, a, b in spans]
    return torch.cat(outputs, dim=1) if outputs else q.new_zeros(*q.shape[:3], call.v_dim)


def varlen_refusals(call: MLACall) -> list[str]:
    """Why torch's varlen attention cannot take this call (empty: it can)."""
    reasons = ["it is a CUDA kernel"] if not call.q.is_cuda else []
    return reasons + form_refusals(call.q.dtype, call.q.shape[-1], call.v_dim)


def form_refusals(dtype: torch.dtype, q_dim: int, v_dim: int) -> list[str]:
    """What speaks against it on a GPU."""
    reasons = []
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"it wants 16-bit inputs, not {dtype}")
    if max(q_dim, v_dim) > 256:
        reasons.append("head dims above 256")
    if _varlen_attn() is None:
        reasons.append(f"torch {torch.__version__} has no torch.nn.attention.varlen (2.10 has)")
    return reasons


def varlen(call: MLACall) -> Tensor:
    """All sequences in one fused kernel; queries are the last tokens of their sequence (bottom-right causal)."""
    q, latent, lengths, cu_q = call.q, call.latent, call.lengths, call.cu_seqlens
    B, T, H, D = q.shape
    if cu_q is None:
        cu_q = torch.arange(0, B * T + 1, T, device=q.device)
    if lengths is None:
        cu_k, flat = cu_q, latent.flatten(0, 1)
    else:
        valid = torch.arange(latent.shape[1], device=q.device) < lengths.view(-1, 1)
        cu_k, flat = F.pad(lengths.cumsum(0), (1, 0)), latent[valid]
    k, v = expanded.keys_values(call, flat)
    attend, options, q = _varlen_options(q.flatten(0, 1), call.scale)
    longest_q, longest_k = q.shape[0], flat.shape[0]
    if not torch.compiler.is_compiling():  # a graph cannot read the lengths: it takes what they cannot exceed
        longest_q = longest_sequence(cu_q, longest_q)
        longest_k = longest_q if cu_k is cu_q else longest_sequence(cu_k, longest_k)
    wide = D - call.v_dim
    if wide < 0:
        q, k = F.pad(q, (0, -wide)), F.pad(k, (0, -wide))
    o = attend(q, k, F.pad(v, (0, max(wide, 0))), cu_q.int(), cu_k.int(), longest_q, longest_k, **options)
    return o[..., : call.v_dim].view(B, T, H, call.v_dim)


@cache
def _varlen_attn() -> Callable[..., Tensor] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return cast("Callable[..., Tensor]", varlen_attn)


def _varlen_options(q: Tensor, scale: float) -> tuple[Callable[..., Tensor], dict[str, object], Tensor]:
    """torch spells causality `is_causal` in 2.10 and `window_size` later, and 2.10 knows no scale."""
    attend = _varlen_attn()
    if attend is None:
        raise NotImplementedError(f"torch {torch.__version__} has no torch.nn.attention.varlen (2.10 has)")
    known = inspect.signature(attend).parameters
    options: dict[str, object] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "scale" in known:
        return attend, {**options, "scale": scale}, q
    return attend, options, q * (scale * q.shape[-1] ** 0.5)

"""Launch of the Attention Residuals kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openkda.ops.attn_res.triton import MAX_SOURCES
from openkda.ops.attn_res.triton.rows import bank_kernel, merge_kernel, mix_gradient_kernel, mix_kernel
from openkda.ops.triton.api import ceil_div, launch, padded


def mix(sources: Sequence[Tensor], query: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    first, n = sources[0], len(sources)
    D, rows = first.shape[-1], first.shape[:-1].numel()
    flat = [v.contiguous() for v in sources]
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    r, c = (torch.empty((n, *first.shape[:-1]), dtype=torch.float32, device=first.device) for _ in range(2))
    if rows:
        tensors = (*flat, *flat[:1] * (MAX_SOURCES - n), query.float().contiguous(), out, r, c)
        launch(mix_kernel, rows, tensors, (D,), (rows, eps), (n, padded(D)), _warps(D), first.device)
    return out, r, c


def merge(m: Tensor, l: Tensor, o: Tensor, value: Tensor, query: Tensor, eps: float) -> Tensor:
    D, rows = value.shape[-1], value.shape[:-1].numel()
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if rows:
        tensors = (*(t.contiguous() for t in (m, l, o, value)), query.float().contiguous(), out)
        launch(merge_kernel, rows, tensors, (D,), (eps,), (padded(D),), _warps(D), value.device)
    return out


def bank(sources: Sequence[Tensor], queries: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    first, n, S = sources[0], len(sources), queries.shape[0]
    D, rows = first.shape[-1], first.shape[:-1].numel()
    m, l, o = (
        torch.empty(S, *first.shape[:-1], *last, dtype=torch.float32, device=first.device) for last in ((), (), (D,))
    )
    if rows * S:
        flat = [v.contiguous() for v in sources]
        tensors = (*flat, *flat[:1] * (MAX_SOURCES - n), queries.float().contiguous(), m, l, o)
        launch(bank_kernel, S * rows, tensors, (D,), (rows, eps), (n, padded(D)), _warps(D), first.device)
    return m, l, o


PROGRAMS = 1056
"""Of the gradient: eight for each multiprocessor of a Hopper card. Each has a part of the query's gradient."""


def mix_gradient(
    grad: Tensor, sources: Sequence[Tensor], query: Tensor, r: Tensor, c: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the query, float32, and of the sources."""
    first, n = sources[0], len(sources)
    D, rows = first.shape[-1], first.shape[:-1].numel()
    each = max(1, ceil_div(rows, PROGRAMS))
    programs = ceil_div(rows, each)
    dv = torch.empty((n, *first.shape), dtype=first.dtype, device=first.device)
    dw = torch.empty(programs, D, dtype=torch.float32, device=first.device)
    if rows:
        flat = [v.contiguous() for v in sources]
        # Hooks on saved tensors may lay r and c out otherwise.
        others = (t.contiguous() for t in (grad, query.float(), r, c))
        tensors = (*flat, *flat[:1] * (MAX_SOURCES - n), *others, dv, dw)
        launch(mix_gradient_kernel, programs, tensors, (D,), (rows, each), (n, padded(D)), _warps(D), first.device)
    return dw.sum(0), list(dv.unbind(0))


def _warps(D: int) -> int:
    """16 channels a thread: the compiler loads all sources ahead, and with 32 five of them fill the registers."""
    return max(1, min(16, padded(D) // 512))

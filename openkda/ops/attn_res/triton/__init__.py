"""Triton kernels of the Attention Residuals mix and its gradient: every source is read once, or once more from the cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from openkda.ops.device.api import is_watched, triton_refusals

MAX_SOURCES = 9
"""Embedding and block sums of Kimi K3: eight rows of the bank and the running sum."""
MAX_WIDTH = 16384


def refusals(sources: Sequence[Tensor]) -> list[str]:
    """Why the kernels cannot mix `sources`; empty if they can."""
    first = sources[0]
    reasons = triton_refusals(first)
    if len(sources) > MAX_SOURCES:
        reasons.append(f"at most {MAX_SOURCES} sources, received {len(sources)}")
    if not 0 < first.shape[-1] <= MAX_WIDTH:
        reasons.append(f"rows of 1 to {MAX_WIDTH}, received {first.shape[-1]}")
    if is_watched() or any(is_traceable_wrapper_subclass(v) for v in sources):
        reasons.append("torch.compile, dispatch modes and tensor subclasses, which look inside")
    return reasons


def mix(sources: Sequence[Tensor], query: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(h, r [n, ...], c [n, ...]): the mix, inverse root mean squares and products with the query."""
    from openkda.ops.attn_res.triton import launch

    return launch.mix(sources, query, eps)


def merge(m: Tensor, l: Tensor, o: Tensor, value: Tensor, query: Tensor, eps: float) -> Tensor:
    """Phase 2 for one query: m, l [...], o [..., D] of the bank."""
    from openkda.ops.attn_res.triton import launch

    return launch.merge(m, l, o, value, query, eps)


def bank(sources: Sequence[Tensor], queries: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Phase 1 for queries [S, D]: m, l and o of `BankPartials`."""
    from openkda.ops.attn_res.triton import launch

    return launch.bank(sources, queries, eps)


def mix_gradient(
    grad: Tensor, sources: Sequence[Tensor], query: Tensor, r: Tensor, c: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """From the gradient of h, and r and c of `mix`: those of the query (float32) and of every source."""
    from openkda.ops.attn_res.triton import launch

    return launch.mix_gradient(grad, sources, query, r, c)

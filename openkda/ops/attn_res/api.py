"""The contract of the Attention Residuals mix, over n sources v_i (the embedding, block sums, the running partial sum):

    s_i = w . v_i / sqrt(mean(v_i^2) + eps)          w = norm weight * pseudo-query, one vector a sublayer
    h   = sum_i softmax_i(s) v_i                     the values are NOT normalised; no 1/sqrt(D)

Scores, softmax and sum are float32 (float64 for float64 sources); one cast at the end. Zero pseudo-queries give the plain mean.

Two ways to the same h. `attn_res_mix` takes all sources at once. In a block of layers every source but the running sum stands
still, so `attn_res_bank` reads those once for all S sublayers of the block and leaves the softmax open,
`attn_res_merge` closes it with the running sum:

    phase 1   m = max_i s_i,   l = sum_i e^(s_i - m),   o = sum_i e^(s_i - m) v_i            for S queries at once
    phase 2   m' = max(m, s),  h = (o e^(m - m') + v e^(s - m')) / (l e^(m - m') + e^(s - m'))

Source: Attention Residuals (arXiv 2603.15031), eq. 2 to 5 and algorithm 1; Kimi K3 report, eq. 8 to 10 and section 5.4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from openkda.ops.attn_res import reference, triton
from openkda.ops.attn_res.reference import BankPartials

__all__ = ["BankPartials", "attn_res_bank", "attn_res_merge", "attn_res_mix"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def attn_res_mix(
    sources: Sequence[Float[Tensor, "... D"]], query: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "... D"]:
    """Softmax mix of the sources.

    Args:
        sources: one or more tensors [..., D] of one shape and float dtype.
        query: [D] norm weight times pseudo-query, float32 or wider.
        eps: added to the mean square.
    Returns: [..., D] in the sources' dtype. Raises: ValueError or TypeError, showing expected and received.
    Differentiable once, in sources and query; saves the sources themselves and three numbers a source and token, never a stack.
    """
    _check(sources, query, eps)
    module = _module(sources)
    return reference.Mix.apply(query, eps, module.mix, module.mix_gradient, *sources)


def attn_res_bank(sources: Sequence[Float[Tensor, "... D"]], queries: Float[Tensor, "S D"], eps: float) -> BankPartials:
    """Phase 1: the open softmax of S queries over sources that stand still for a whole block.

    Args: as in `attn_res_mix`; queries [S, D]. Holds S * tokens * D float32 values: meant for few tokens.
    Returns: BankPartials(m [S, ...], l [S, ...], o [S, ..., D]).
    """
    if queries.dim() != 2:
        _bad("queries.shape", "[S, D]", list(queries.shape))
    _check(sources, queries[0] if queries.shape[0] else queries.new_zeros(queries.shape[1]), eps)
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in (*sources, queries))
    if recording or _module(sources) is reference:  # the kernel has no derivative
        return reference.bank(sources, queries, eps)
    return BankPartials(*triton.bank(sources, queries, eps))


def attn_res_merge(
    partials: BankPartials, index: int, value: Float[Tensor, "... D"], query: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "... D"]:
    """Phase 2: close the softmax of query number `index` with one more source, the running sum.

    Args: value [..., D], of the bank's shape. query [D], the one that stood at `index` in `attn_res_bank`.
    Returns: [..., D] in value's dtype: `attn_res_mix([*sources, value], query, eps)` up to rounding.
    """
    _check([value], query, eps)
    if partials.o.shape[1:] != value.shape:
        _bad("value.shape", f"{list(partials.o.shape[1:])} (that of the bank)", list(value.shape))
    if not 0 <= index < partials.o.shape[0]:
        _bad("index", f"0..{partials.o.shape[0] - 1}", index)
    m, l, o = (t[index] for t in (partials.m, partials.l, partials.o))
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in (m, l, o, value, query))
    return (reference if recording else _module([value])).merge(
        m, l, o, value, query, eps
    )  # the kernel has no derivative


def _module(sources: Sequence[Tensor]) -> ModuleType:
    """What mixes: on a GPU a kernel that reads every source once, else torch's own operations."""
    if not sources[0].is_cuda or torch.compiler.is_compiling() or triton.refusals(sources):
        return reference
    return triton


def _check(sources: Sequence[Tensor], query: Tensor, eps: float) -> None:
    if not len(sources):
        _bad("sources", "at least one tensor", "none")
    first = sources[0]
    for i, v in enumerate(sources):
        if not isinstance(v, Tensor) or v.dtype not in _FLOATS:
            raise TypeError(f"sources[{i}]: expected a float tensor, received {getattr(v, 'dtype', type(v).__name__)}")
        if (v.shape, v.dtype, v.device) != (first.shape, first.dtype, first.device):
            want, got = ([list(t.shape), t.dtype, str(t.device)] for t in (first, v))
            _bad(f"sources[{i}]", f"{want} (that of sources[0])", got)
    if not first.dim() or tuple(query.shape) != (first.shape[-1],):
        _bad("query.shape", f"{list(first.shape[-1:])} (last axis of the sources)", list(query.shape))
    wide = torch.promote_types(first.dtype, torch.float32)
    if query.dtype not in (wide, torch.float64):
        raise TypeError(f"query.dtype: expected {wide} (scores are never computed in 16 bits), received {query.dtype}")
    if not (math.isfinite(eps) and eps >= 0):
        _bad("eps", "a finite number >= 0", eps)


def _bad(name: str, expected: object, received: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, received {received}")

"""Attention Residuals in plain torch, with a backward that keeps no stack of the sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class BankPartials:
    """The open softmax of S queries over a bank: running maximum, sum, and weighted sum, in float32 (or float64).

    m, l: [S, ...]. o: [S, ..., D].
    """

    m: Tensor
    l: Tensor
    o: Tensor


def _wide(v: Tensor) -> Tensor:
    return v.to(torch.promote_types(v.dtype, torch.float32))


def _inverse_rms(v: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(v.square().mean(-1) + eps)


Forward = Callable[[Sequence[Tensor], Tensor, float], tuple[Tensor, Tensor, Tensor]]
Backward = Callable[[Tensor, Sequence[Tensor], Tensor, Tensor, Tensor], tuple[Tensor, list[Tensor]]]


def mix(sources: Sequence[Tensor], query: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(h, r [n, ...], c [n, ...]); see `Mix`."""
    r = torch.stack([_inverse_rms(_wide(v), eps) for v in sources])
    c = torch.stack([_wide(v) @ query.to(r.dtype) for v in sources])
    a = torch.softmax(r * c, 0)
    out = a[0].unsqueeze(-1) * _wide(sources[0])
    for a_i, v in zip(a[1:], sources[1:], strict=True):
        out.addcmul_(a_i.unsqueeze(-1), _wide(v))
    return out.to(sources[0].dtype), r, c


def mix_gradient(
    grad: Tensor, sources: Sequence[Tensor], query: Tensor, r: Tensor, c: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the query and of every source; see `Mix`."""
    a = torch.softmax(r * c, 0)
    g = _wide(grad)
    w = query.to(r.dtype)
    da = torch.stack([(g * _wide(v)).sum(-1) for v in sources])
    ds = a * (da - (a * da).sum(0))
    along_w, along_v = ds * r, -ds * c * r**3 / w.numel()
    dw = torch.zeros_like(w)
    dsources = []
    for i, v in enumerate(sources):
        wide = _wide(v)
        dw += along_w[i].flatten() @ wide.flatten(0, -2)
        dv = a[i].unsqueeze(-1) * g + along_w[i].unsqueeze(-1) * w + along_v[i].unsqueeze(-1) * wide
        dsources.append(dv.to(v.dtype))
    return dw, dsources


class Mix(torch.autograd.Function):
    """h = sum_i a_i v_i, with r_i the inverse RMS, c_i = w . v_i, s_i = r_i c_i and a = softmax(s).

    d a_i = g . v_i;   d s_i = a_i (d a_i - sum_j a_j d a_j)
    d v_i = a_i g + d s_i (r_i w - c_i r_i^3 v_i / D);   d w = sum_i sum_tokens d s_i r_i v_i
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, eps: float, mix: Forward, gradient: Backward, *sources: Tensor) -> Tensor:
        out, r, c = mix(sources, query, eps)
        ctx.save_for_backward(query, r, c, *sources)
        ctx.gradient = gradient
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        query, r, c, *sources = ctx.saved_tensors
        dw, dsources = ctx.gradient(grads[0], sources, query, r, c)
        return dw.to(query.dtype), None, None, None, *dsources


def bank(sources: Sequence[Tensor], queries: Tensor, eps: float) -> BankPartials:
    rows = _wide(torch.stack(list(sources)))
    s = torch.einsum("n...d,sd->sn...", rows, queries.to(rows.dtype)) * _inverse_rms(rows, eps)
    m = s.amax(1)
    e = torch.exp(s - m.unsqueeze(1))
    return BankPartials(m, e.sum(1), torch.einsum("sn...,n...d->s...d", e, rows))


def merge(m: Tensor, l: Tensor, o: Tensor, value: Tensor, query: Tensor, eps: float) -> Tensor:
    """m, l [...], o [..., D]: the open softmax of one query."""
    v = _wide(value)
    s = (v @ query.to(v.dtype)) * _inverse_rms(v, eps)
    top = torch.maximum(m, s)
    old, new = torch.exp(m - top), torch.exp(s - top)
    mixed = o * old.unsqueeze(-1) + v * new.unsqueeze(-1)
    return (mixed / (l * old + new).unsqueeze(-1)).to(value.dtype)

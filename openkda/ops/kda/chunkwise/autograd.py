"""Where the chunkwise form meets autograd: one Function, whose backward is written by hand and has no derivative itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import is_batched, no_autocast
from openkda.ops.kda.chunkwise.forward import Settings, Tokens
from openkda.ops.kda.chunkwise.plan import make_plan
from openkda.ops.kda.chunkwise.segments import Saved, block_backward, block_forward

Spans = list[tuple[int, int]]


class Chunkwise(torch.autograd.Function):
    """(settings, spans, states [N, HV, K, V], *Tokens) -> (o [R, HV, V], states [N, HV, K, V])."""

    @staticmethod
    def forward(ctx: Any, opts: Settings, spans: Spans, S: Tensor, *tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        t = Tokens(*tokens)  # type: ignore[arg-type]
        blocks = make_plan(spans, t.g[0].numel() * S.element_size() if len(t.g) else 0, t.v.device.type)
        o, S = torch.zeros_like(t.v, memory_format=torch.contiguous_format), S.clone()
        keep = any(ctx.needs_input_grad)
        saved = [block_forward(block, t, opts, S, o, keep) for block in blocks]
        ctx.opts, ctx.blocks, ctx.state_shape = opts, blocks, S.shape
        ctx.save_for_backward(*tokens, *(x for block in saved for pair in block for x in pair))
        ctx.set_materialize_grads(False)
        return o, S

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Any, ...]:
        if is_batched(do, dS):
            raise NotImplementedError(
                "kda: many upstream gradients at once (is_grads_batched, jacobian(vectorize=True)) are not implemented; "
                "take one by one, or impl='reference'"
            )
        tensors = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
        t, rest = Tokens(*tensors[:7]), iter(tensors[7:])
        saved: list[Saved] = [[(next(rest), next(rest)) for _ in block.segments()] for block in ctx.blocks]
        with torch.no_grad(), no_autocast(t.v):
            do = t.v.new_zeros(t.v.shape) if do is None else do
            dS = t.g.new_zeros(ctx.state_shape, dtype=ctx.opts.dtype) if dS is None else dS.clone()
            results = _backward(ctx, t, saved, do, dS)
        grads = [g if want else None for g, want in zip(results, ctx.needs_input_grad[2:], strict=True)]
        if torch.is_grad_enabled():  # create_graph=True
            grads = _once(grads, [x for x in (*t, do, dS) if x is not None])
        return None, None, *grads


def _backward(ctx: Any, t: Tokens, saved: list[Saved], do: Tensor, dS: Tensor) -> list[Tensor | None]:
    """[gradient of the entering states, gradients of `Tokens`...]; dS [N, HV, K, V] is taken over."""
    grads = [None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format) for x in t]
    for block, kept in zip(ctx.blocks, saved, strict=True):
        block_backward(block, t, ctx.opts, kept, do, dS, grads)
    return [dS, *grads]


class _Once(torch.autograd.Function):
    """Identity on gradients that answers a second derivative with a clear error instead of a wrong zero."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError("kda: the second derivative is not implemented (impl='reference' has one)")


def _once(grads: list[Tensor | None], sources: list[Tensor]) -> list[Tensor | None]:
    present = [g for g in grads if g is not None]
    marked = iter(_Once.apply(len(present), *present, *sources))
    return [None if g is None else next(marked) for g in grads]

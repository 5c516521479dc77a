"""The entry of the chunkwise implementation: calls become flat rows and spans, and meet autograd in one Function."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from openkda.ops.kda.call import KDACall, KDAOutput
from openkda.ops.kda.chunkwise.backward import segment_backward
from openkda.ops.kda.chunkwise.forward import Settings, Tokens, factors, prologue, walk
from openkda.ops.kda.chunkwise.plan import Block, Segment, make_plan
from openkda.ops.kda.states import compute_dtype, load_states, outgoing, store_states

Spans = list[tuple[int, int]]


def refusals(call: KDACall) -> list[str]:
    """Runs everything, on any device that torch runs on."""
    return []


def run(call: KDACall) -> KDAOutput:
    """See `api.kda`. torch.compile breaks its graph here and runs this eagerly: its loops depend on the sequence lengths."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_run)(call)
    return _run(call)


def _run(call: KDACall) -> KDAOutput:
    B, T, HV, V = call.v.shape
    S = load_states(call)
    cu = [b * T for b in range(B + 1)] if call.cu_seqlens is None else call.cu_seqlens.tolist()
    spans = list(itertools.pairwise(cu))
    if call.state_positions is None:
        o, S = _apply(call, spans, S)
        return KDAOutput(o.view(B, T, HV, V), store_states(call, S))
    o, S, kept = _run_in_pieces(call, spans, S)
    return KDAOutput(o.view(B, T, HV, V), store_states(call, S), outgoing(call, kept))


def step(call: KDACall) -> tuple[Tensor, Tensor]:
    """See `api.kda_step`: the recurrence itself, for all rows at once."""
    with _no_autocast(call.v):
        return _step(call)


def _step(call: KDACall) -> tuple[Tensor, Tensor]:
    opts = _settings(call)
    S = load_states(call)
    q, k, log_a, b = (x.squeeze(1) for x in prologue(_tokens(call, flat=False), opts))
    group = log_a.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, 1).unsqueeze(-2) for x in (q, k))
    S = S + S * torch.expm1(log_a).unsqueeze(-1)  # S exp(log_a): a decay near 1 is never rounded (it would drift)
    error = call.v.squeeze(1).to(opts.dtype).unsqueeze(-2) - k @ S
    S = S + k.transpose(-1, -2) * (b[..., None, None] * error)
    o = (q @ S).squeeze(-2)
    if call.state_indices is not None:
        o = torch.where((call.state_indices >= 0).view(-1, 1, 1), o, 0)
    state = store_states(call, S)
    assert state is not None  # for the type checker: the step call always asks for it
    return o.to(call.v.dtype), state


def _settings(call: KDACall) -> Settings:
    return Settings(call.gate, call.scale, call.use_qk_l2norm, call.use_beta_sigmoid, compute_dtype(call))


def _tokens(call: KDACall, flat: bool = True) -> Tokens:
    rows = (call.q, call.k, call.v, call.g, call.beta)
    gate = (None, None) if call.gate is None else (call.gate.A_log, call.gate.dt_bias)
    q, k, v, g, beta = (x.flatten(0, 1) if flat else x for x in rows)
    return Tokens(q, k, v, g, beta, *gate)


def _apply(call: KDACall, spans: Spans, S: Tensor) -> tuple[Tensor, Tensor]:
    with _no_autocast(call.v):
        return Chunkwise.apply(_settings(call), spans, S, *_tokens(call))


def _no_autocast(t: Tensor) -> torch.autocast:
    """The dtypes are chosen here: inside an autocast region the products would be rounded to 16 bits."""
    return torch.autocast(t.device.type, enabled=False)


def _run_in_pieces(call: KDACall, spans: Spans, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut every sequence behind each wanted token; the r-th pieces of all sequences run together, state handed on."""
    assert call.state_positions is not None  # for the type checker: the caller tested it
    wanted = call.state_positions.tolist()
    cuts = [sorted({p + 1 for p in wanted if a <= p < b} | {b}) for a, b in spans]
    begin = [a for a, _ in spans]
    states = list(S.unbind(0))
    kept: dict[int, Tensor] = {}
    o: Tensor | None = None
    for r in range(max(map(len, cuts), default=0)):
        going = [n for n, ends in enumerate(cuts) if r < len(ends)]
        pieces = [(begin[n], cuts[n][r]) for n in going]
        part, S = _apply(call, pieces, torch.stack([states[n] for n in going]))
        o = part if o is None else o + part  # rows outside a call's spans are zero
        for n, state in zip(going, S.unbind(0), strict=True):
            states[n], begin[n] = state, cuts[n][r]
            kept[cuts[n][r] - 1] = state
    chosen = [kept[p] for p in wanted]
    assert o is not None  # for the type checker: a call has at least one sequence
    return o, torch.stack(states), torch.stack(chosen) if chosen else S.new_zeros(0, *S.shape[1:])


class Chunkwise(torch.autograd.Function):
    """(settings, spans, states [N, HV, K, V], *Tokens) -> (o [R, HV, V], states [N, HV, K, V])."""

    @staticmethod
    def forward(ctx: Any, opts: Settings, spans: Spans, S: Tensor, *tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        t = Tokens(*tokens)  # type: ignore[arg-type]
        plan = make_plan(spans, t.g.shape[1] * t.g.shape[2] * S.element_size(), t.g.device.type)
        o, S = torch.zeros_like(t.v, memory_format=torch.contiguous_format), S.clone()
        keep = any(ctx.needs_input_grad)
        saved: list[Tensor] = []
        for block in plan:
            members = torch.tensor(block.sequences, device=S.device)
            state = S[members].flatten(0, 1)
            for seg in block.segments():
                O, E, states = _segment_forward(seg, t, opts, state)
                seg.put(O.unflatten(1, (len(members), -1)).transpose(2, 3), o)
                state = states[-1]
                saved += [E, states[:-1]] if keep else []
            S[members] = state.view(len(members), *S.shape[1:])
        ctx.opts, ctx.plan, ctx.state_shape = opts, plan, S.shape
        ctx.save_for_backward(*tokens, *saved)
        ctx.set_materialize_grads(False)
        return o, S

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
        t, saved = Tokens(*tensors[:7]), tensors[7:]
        with torch.no_grad(), _no_autocast(t.v):
            do = t.v.new_zeros(t.v.shape) if do is None else do
            dS = t.g.new_zeros(ctx.state_shape, dtype=ctx.opts.dtype) if dS is None else dS.clone()
            grads = _backward(ctx.opts, ctx.plan, t, saved, do, dS)
        grads = [g if want else None for g, want in zip(grads, ctx.needs_input_grad[2:], strict=True)]
        if torch.is_grad_enabled():  # create_graph=True
            grads = _once(grads, [x for x in (*t, do, dS) if x is not None])
        return None, None, *grads


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


def _rows(seg: Segment, t: Tokens) -> Tokens:
    q, k, v, g, beta = (seg.take(x) for x in t[:5])
    return Tokens(q, k, v, g, beta, t.A_log, t.dt_bias)


def _segment_forward(seg: Segment, t: Tokens, opts: Settings, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = _rows(seg, t)
    q, k, log_a, b = prologue(rows, opts)
    return walk(factors(rows, opts, q, k, seg.clear_padding(log_a), b), state, seg.count)


def _backward(
    opts: Settings, plan: list[Block], t: Tokens, saved: tuple[Tensor, ...], do: Tensor, dS: Tensor
) -> list[Tensor | None]:
    """[gradient of the entering states, gradients of `Tokens`...]; dS [N, HV, K, V] is taken over."""
    grads = [None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format) for x in t]
    kept = iter(zip(saved[-2::-2], saved[-1::-2], strict=True))  # (E, states) of the segments, last first
    for block in reversed(plan):
        members = torch.tensor(block.sequences, device=dS.device)
        dstate = dS[members].flatten(0, 1)
        for seg in reversed(list(block.segments())):
            E, states = next(kept)
            part, dstate = segment_backward(seg, _rows(seg, t), opts, E, states, seg.take(do), dstate)
            for into, g in zip(grads[:5], part[:5], strict=True):
                assert into is not None and g is not None  # for the type checker: q, k, v, g, beta always are
                seg.put(g, into)
            for into, g in zip(grads[5:], part[5:], strict=True):
                if into is not None and g is not None:
                    into += g
        dS[members] = dstate.view(len(members), *dS.shape[1:])
    return [dS, *grads]

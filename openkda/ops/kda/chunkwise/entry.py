"""The entry of the chunkwise implementation: calls become flat rows and spans of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from openkda.ops.device.api import has_values, no_autocast, transform_refusals
from openkda.ops.kda.call import KDACall, KDAOutput
from openkda.ops.kda.chunkwise.autograd import Chunkwise, Spans
from openkda.ops.kda.chunkwise.compiled import kda_chunkwise_op, spans_of
from openkda.ops.kda.chunkwise.forward import Settings, Tokens, prologue
from openkda.ops.kda.states import compute_dtype, load_states, outgoing, read_states, store_states


def refusals(call: KDACall) -> list[str]:
    """Runs everything, on any device."""
    return []


def run(call: KDACall) -> KDAOutput:
    """See `api.kda`. torch.compile sees one opaque operator, because the loops depend on the sequence lengths; with
    `state_positions` the graph breaks here. A DTensor meets the same operator, for which openkda/distributed has rules, and so
    do meta and fake tensors, which get their shapes from it."""
    faked = not has_values(call.q) and not torch.compiler.is_compiling()
    if not (faked or torch.compiler.is_compiling() or is_traceable_wrapper_subclass(call.q)):
        return _run(call)
    at = call.state_positions
    if at is not None and not faked:
        return torch.compiler.disable(_run)(call)
    gate, S = call.gate, None if call.initial_state is None else load_states(call)
    A_log, dt_bias = (None, None) if gate is None else (gate.A_log, gate.dt_bias)
    o, S = kda_chunkwise_op(
        call.q, call.k, call.v, call.g, call.beta, A_log, dt_bias, S, call.cu_seqlens, gate is not None,
        None if gate is None else gate.lower_bound, call.scale, call.use_qk_l2norm, call.use_beta_sigmoid,
    )  # fmt: skip
    return KDAOutput(
        o, store_states(call, S), None if at is None else outgoing(call, S.new_empty(len(at), *S.shape[1:]))
    )


def _run(call: KDACall) -> KDAOutput:
    transforms = transform_refusals()  # not in `refusals`, because `step` is plain torch and has every derivative
    if transforms:
        raise NotImplementedError(f"kda: impl='chunkwise' cannot run {transforms[0]}")
    B, T, HV, V = call.v.shape
    S = load_states(call)
    spans = spans_of(B, T, call.cu_seqlens)
    if call.state_positions is None:
        o, S = _apply(call, spans, S)
        return KDAOutput(o.view(B, T, HV, V), store_states(call, S))
    o, S, kept = _run_in_pieces(call, spans, S)
    return KDAOutput(o.view(B, T, HV, V), store_states(call, S), outgoing(call, kept))


def step(call: KDACall) -> tuple[Tensor, Tensor]:
    """See `api.kda_step`: the recurrence itself, for all rows at once."""
    with no_autocast(call.v):
        return _step(call)


def _step(call: KDACall) -> tuple[Tensor, Tensor]:
    opts = _settings(call)
    q, k, log_a, b = (x.squeeze(1) for x in prologue(_tokens(call, flat=False), opts))
    group = log_a.shape[1] // q.shape[1]
    if group > 1:
        q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    q, k, v = q.unsqueeze(-2), k.unsqueeze(-2), call.v.squeeze(1).to(opts.dtype).unsqueeze(-2)
    # Two passes over the state, which is most of what a step touches: S exp(log_a) and S + k (x) error.
    S = read_states(call)
    S = torch.addcmul(S, S, torch.expm1(log_a).unsqueeze(-1))  # a decay near 1 is never rounded (it would drift)
    S = torch.addcmul(S, k.transpose(-1, -2), (v - k @ S) * b[..., None, None])
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
    with no_autocast(call.v):
        return Chunkwise.apply(_settings(call), spans, S, *_tokens(call))


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
            if begin[n] < cuts[n][r]:  # an empty member has no last token, and must not name its neighbour's
                kept[cuts[n][r] - 1] = state
            states[n], begin[n] = state, cuts[n][r]
    chosen = [kept[p] for p in wanted]
    if o is None:  # a batch of none
        o, S = _apply(call, spans, S)
        return o, S, S.new_zeros(0, *S.shape[1:])
    return o, torch.stack(states), torch.stack(chosen) if chosen else S.new_zeros(0, *S.shape[1:])

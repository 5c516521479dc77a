"""The truth: the recurrence, one token at a time, in plain torch with torch's own autograd.

Per token and value head, state S [K, V], decay a = exp(log decay) [K], write strength b:

    S <- Diag(a) S
    S <- S + b k (v - S^T k)^T
    o  = scale * S^T q

Any float dtype: float64 inputs are computed in float64, everything else in float32. Every other implementation is tested
against this file, so it shares no formula with them. Source: Kimi Linear report (arXiv 2510.26692), eq. 1.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from openkda.ops.kda.call import KDACall, KDAOutput
from openkda.ops.kda.states import compute_dtype, load_states, outgoing, store_states
from openkda.ops.norm.api import L2NORM_EPS


def refusals(call: KDACall) -> list[str]:
    """Runs everything."""
    return []


def run(call: KDACall) -> KDAOutput:
    """All tokens of all sequences; a pack is walked member by member, a batch side by side."""
    q, k, v, a, b = _inputs(call)
    B, T, HV, V = v.shape
    S = load_states(call)
    cu = [0, T] if call.cu_seqlens is None else call.cu_seqlens.tolist()
    wanted = [] if call.state_positions is None else call.state_positions.tolist()
    rows: list[Tensor] = []
    finals: list[Tensor] = []
    kept: dict[int, Tensor] = {}
    for n, (start, end) in enumerate(itertools.pairwise(cu)):
        state = S if call.cu_seqlens is None else S[n : n + 1]
        for t in range(start, end):
            state = a[:, t].unsqueeze(-1) * state
            error = v[:, t] - _read(state, k[:, t])
            state = state + k[:, t].unsqueeze(-1) * (b[:, t].unsqueeze(-1) * error).unsqueeze(-2)
            rows.append(_read(state, q[:, t]))
            kept |= {p: state[p // T] for p in wanted if p % T == t}
        finals.append(state)
    o = torch.stack(rows, 1) if rows else v.new_zeros(B, T, HV, V)
    states_at = None
    if call.state_positions is not None:
        states_at = outgoing(call, torch.stack([kept[p] for p in wanted]) if wanted else S.new_zeros(0, *S.shape[1:]))
    return KDAOutput((call.scale * o).to(call.v.dtype), store_states(call, torch.cat(finals)), states_at)


def step(call: KDACall) -> tuple[Tensor, Tensor]:
    """One token a row; rows without a slot (-1) give zeros."""
    o, state, _ = run(call)
    assert state is not None  # for the type checker: the step call always asks for it
    o = o[:, 0]
    if call.state_indices is not None:
        o = torch.where((call.state_indices >= 0).view(-1, 1, 1), o, 0)
    return o, state


def _read(S: Tensor, x: Tensor) -> Tensor:
    return (S * x.unsqueeze(-1)).sum(-2)  # S^T x: [.., K, V], [.., K] -> [.., V]


def _inputs(call: KDACall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k [B, T, HV, K] (heads repeated), v, decay a [B, T, HV, K], b [B, T, HV], in the compute dtype."""
    q, k, v, g, b = (t.to(compute_dtype(call)) for t in (call.q, call.k, call.v, call.g, call.beta))
    if call.use_qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + L2NORM_EPS).sqrt() for x in (q, k))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    log_a = g if call.gate is None else call.gate(g)
    return q, k, v, log_a.exp(), torch.sigmoid(b) if call.use_beta_sigmoid else b

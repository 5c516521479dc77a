"""The kernels as torch operators, so that torch.compile, CUDA graphs and inference mode see one opaque call each.

States that are not asked for come back as empty tensors, because an operator's results cannot be optional.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import define
from openkda.ops.kda.call import CALLS, TENSORS, KDACall, KDAOutput, Replay
from openkda.ops.kda.triton.launch import Args, forward, new_states, readable
from openkda.ops.triton.api import Tape, dense, record

STATE = TENSORS.index("initial_state")
_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu"
_OPTIONS = "int gate, float bound, float scale, bool l2norm, bool sigmoid, bool want_state, bool v_first"


def _kda(q, k, v, g, beta, A_log, dt_bias, cu, state, positions, gate, bound, scale, l2norm, sigmoid, want_state, v_first,
         state_dtype, exact):  # fmt: skip
    a = readable(
        q, k, v, g, beta, A_log, dt_bias, cu, state, None, positions, gate, bound, scale, l2norm, sigmoid, want_state,
        v_first, state_dtype, exact, False,
    )  # fmt: skip
    o, final, kept = forward(a)
    empty = o.new_empty(0)
    return o, empty if final is None else final, o.new_empty(0) if kept is None else kept


def _kda_pool(q, k, v, g, beta, A_log, dt_bias, cu, pool, index, positions, gate, bound, scale, l2norm, sigmoid,
              want_state, v_first, exact, skip):  # fmt: skip
    a = readable(
        q, k, v, g, beta, A_log, dt_bias, cu, pool, index, positions, gate, bound, scale, l2norm, sigmoid, want_state,
        v_first, pool.dtype, exact, skip,
    )  # fmt: skip
    o, _, kept = forward(a)
    return o, o.new_empty(0) if kept is None else kept


def _shape(q, k, v, g, beta, A_log, dt_bias, cu, state, positions, state_dtype, v_first) -> Args:
    return Args(
        q, k, v, g, beta, A_log, dt_bias, cu, state, None, positions,
        0, 0.0, 1.0, False, False, True, v_first, state_dtype, False, False,
    )  # fmt: skip


def _fake_kda(q, k, v, g, beta, A_log, dt_bias, cu, state, positions, gate, bound, scale, l2norm, sigmoid, want_state,
              v_first, state_dtype, exact):  # fmt: skip
    a = _shape(q, k, v, g, beta, A_log, dt_bias, cu, state, positions, state_dtype, v_first)
    o = v.new_empty(v.shape)
    final = new_states(a, a.num_sequences) if want_state else o.new_empty(0)
    return o, final, o.new_empty(0) if positions is None else new_states(a, positions.numel())


def _fake_kda_pool(q, k, v, g, beta, A_log, dt_bias, cu, pool, index, positions, gate, bound, scale, l2norm, sigmoid,
                   want_state, v_first, exact, skip):  # fmt: skip
    a = _shape(q, k, v, g, beta, A_log, dt_bias, cu, pool, positions, pool.dtype, v_first)
    o = v.new_empty(v.shape)
    return o, o.new_empty(0) if positions is None else new_states(a, positions.numel())


kda_op = define(
    f"kda({_TOKENS}, Tensor? state, Tensor? positions, {_OPTIONS}, ScalarType state_dtype, bool exact)"
    " -> (Tensor, Tensor, Tensor)",
    _kda,
    _fake_kda,
)
kda_pool_op = define(
    f"kda_pool({_TOKENS}, Tensor(a!) pool, Tensor index, Tensor? positions, {_OPTIONS}, bool exact, bool skip)"
    " -> (Tensor, Tensor)",
    _kda_pool,
    _fake_kda_pool,
)


def run_direct(call: KDACall, q, k, v, g, beta, A_log, dt_bias, cu, state, index, positions, gate, bound, scale, l2norm,
               sigmoid, want_state, v_first, state_dtype, exact, skip):  # fmt: skip
    """The forward without the operator: (output, final states or the pool or None, states at positions or None)."""
    a = readable(
        q, k, v, g, beta, A_log, dt_bias, cu, state, index, positions, gate, bound, scale, l2norm, sigmoid, want_state,
        v_first, state_dtype, exact, skip,
    )  # fmt: skip
    if call.key is None or positions is not None:
        return forward(a)
    results: list[Tensor | None] = []

    def run() -> list[Tensor]:
        workspaces: list[Tensor] = []
        results.extend(forward(a, workspaces))
        new = () if results[1] is None or index is not None else (results[1],)
        return [results[0], *new, *workspaces]

    own_gate = (None, None) if call.gate is None else (call.gate.A_log, call.gate.dt_bias)
    tensors = (call.q, call.k, call.v, call.g, call.beta, *own_gate, state, call.cu_seqlens, index, None)
    _, tape = record(run, tensors, q.device)
    if tape is not None:
        CALLS.replays[call.key] = _step_replay(tape, v) if skip else replay_of(tape, want_state, index is not None)
    return tuple(results)


def replay_of(tape: Tape, want_state: bool, pooled: bool) -> Replay:
    """Of `kda`, whose tape makes the output first and then, if wanted, new states."""

    def again(tensors: tuple[Tensor | None, ...]) -> KDAOutput | None:
        made = tape.run(tensors)
        if made is None:
            return None
        return KDAOutput(made[0], (tensors[STATE] if pooled else made[1]) if want_state else None)

    return again


def _step_replay(tape: Tape, v: Tensor) -> Replay:
    """Of `kda_step`, whose output has no token axis."""
    tape.shape_result(0, (v.shape[0], *v.shape[2:]))

    def again(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None] | None:
        made = tape.run(tensors)
        if made is None:
            return None
        return made[0], made[1] if len(made) > 1 else tensors[STATE]

    return again


def as_tensor_pair(gate: object) -> tuple[Tensor | None, Tensor | None]:
    """(A_log [HV], dt_bias [HV * K]) of a gate object, contiguous float32, or None for each that it lacks."""
    return _flat(getattr(gate, "A_log", None)), _flat(getattr(gate, "dt_bias", None))


def _flat(t: Tensor | None) -> Tensor | None:
    if t is None:
        return None
    if t.dim() != 1:  # every step only where needed: each costs a microsecond of host time
        t = t.reshape(-1)
    if t.dtype != torch.float32:
        t = t.to(torch.float32)
    return dense(t)

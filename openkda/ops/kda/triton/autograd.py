"""The kernels' derivative: `openkda::kda_backward`, hung on `openkda::kda`. Importing this file registers both.

Calls that nobody watches (`are_plain`) go through a `torch.autograd.Function` instead: torch spends 100 us a call on the
defaults of an operator of 20 arguments that has a derivative. What such calls launch is repeated from tapes: the forward's by
the key of `api.kda`, the backward's by one of its own, because hooks on saved tensors may hand it other strides than the
forward had. A second derivative is refused: the kernels of the first are not differentiable themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import Repeated, are_plain, define, derive, refuse_derivative
from openkda.ops.kda.call import CALLS, KDACall, KDAOutput, Replay
from openkda.ops.kda.triton import backward as host
from openkda.ops.kda.triton.launch import Args, forward, readable
from openkda.ops.kda.triton.positions import backward_at_positions
from openkda.ops.kda.triton.register import _OPTIONS, _TOKENS, kda_op
from openkda.ops.triton.api import Tape, record, record_stages, unit_stride

BACKWARDS = Repeated()
"""Tapes of backward passes."""


def _arguments(tensors: Sequence[Tensor | None], positions: Tensor | None, options: tuple[Any, ...]) -> Args:
    """tensors: q .. dt_bias, cu, state; options: of `openkda::kda_backward`, whose states are always wanted here."""
    return readable(*tensors, None, positions, *options[:5], True, *options[6:], False)  # type: ignore[arg-type]


def _kda_backward(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, A_log, dt_bias, cu, state, positions, o, kept, do, ds, dkept, *options
) -> tuple[Tensor, ...]:
    a = _arguments((q, k, v, g, beta, A_log, dt_bias, cu, state), positions, options)
    do = None if do is None else unit_stride(do)
    if dkept is None:
        found = host.backward(a, o, do, ds, state is not None)
    else:
        found = backward_at_positions(a, o, do, ds, state is not None, kept, dkept)
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _fake_backward(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, A_log, dt_bias, cu, state, positions, o, kept, do, ds, dkept, *options
) -> tuple[Tensor, ...]:
    like = (q, k, v, g, beta, A_log, dt_bias)
    grads = [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in like]
    return (*grads, q.new_empty(0) if state is None else state.new_empty(state.shape, dtype=torch.float32))


kda_backward_op = define(
    f"kda_backward({_TOKENS}, Tensor? state, Tensor? positions, Tensor o, Tensor? kept, Tensor? do, Tensor? ds, Tensor? dkept,"
    f" {_OPTIONS}, ScalarType state_dtype, bool exact)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _kda_backward,
    _fake_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    o, _, kept = output
    ctx.save_for_backward(*inputs[:10], o, None if inputs[9] is None else kept)  # q .. dt_bias, cu, state, positions
    ctx.options = inputs[10:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, ds: Tensor | None, dkept: Tensor | None) -> tuple[Any, ...]:
    return (*differentiate(ctx, ctx.needs_input_grad, do, ds, dkept), None, *(None for _ in ctx.options))


class Direct(torch.autograd.Function):
    """forward(*tensors) -> (o, final, kept), the latter two or None, for the ten tensors of `_save`; options: of
    `openkda::kda_backward`."""

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., tuple[Tensor | None, ...]], options: tuple[Any, ...], *tensors: Tensor | None
    ) -> Any:
        output = forward(*tensors)
        _save(ctx, (*tensors, *options), output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *differentiate(ctx, ctx.needs_input_grad[2:], *grads), None)


def differentiate(
    ctx: Any, needs: tuple[bool, ...], do: Tensor | None, ds: Tensor | None, dkept: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of the nine tensors of `_TOKENS` and the initial state, for what `_save` kept."""
    ds, dkept = (d if d is not None and d.numel() else None for d in (ds, dkept))  # empty: it was not asked for
    if do is None and ds is None and dkept is None:
        return (None,) * 9
    tensors = ctx.saved_tensors
    if torch.is_grad_enabled() or not are_plain(*tensors, do, ds, dkept):
        found = kda_backward_op(*tensors, do, ds, dkept, *ctx.options)
    elif dkept is None:
        found = _again_or_anew(tensors, do, ds, ctx.options)
    else:
        found = _kda_backward(*tensors, do, ds, dkept, *ctx.options)
    grads = [g if need else None for g, need in zip(found, (*needs[:7], needs[8]), strict=True)]
    state = tensors[8]
    if grads[7] is not None and state is not None:
        grads[7] = grads[7].to(state.dtype)
    return (*grads[:7], None, grads[7])


def _again_or_anew(
    tensors: tuple[Tensor | None, ...], do: Tensor | None, ds: Tensor | None, options: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of q .. dt_bias and the state: from a tape where such a pass has one."""
    do = None if do is None else unit_stride(do)
    given = (*tensors[:9], tensors[10], do, ds)
    key, again = BACKWARDS.look(given, (*options, host.HOPPER_PRODUCTS, host.HOPPER_GRADIENTS))
    made: Sequence[Any] | None = None if again is None else again(given)
    if made is None:
        a, o = _arguments(tensors[:9], None, options), tensors[10]
        assert o is not None  # for the type checker

        def launches() -> Sequence[Tensor | None]:
            return host.launches(a, o, do, ds, a.state is not None)

        seen = BACKWARDS.seen(key)
        BACKWARDS.module(key, lambda: host)
        if seen is None:
            made = launches()
        else:
            made, tape = record_stages(launches, given, o.device)
            if tape is not None:
                BACKWARDS.replays[seen] = tape.run
    q, v, v_first = tensors[0], tensors[2], options[6]
    assert q is not None and v is not None
    return host.finished(q, v, v_first, *made)


derive(kda_op, _backward, _save)
refuse_derivative(
    kda_backward_op, "kda: second derivatives are not implemented; use impl='reference' in float64 for them"
)


def run(call: KDACall | None, *arguments: Any) -> tuple[Any, ...]:
    """`kda_op` on these arguments of it, ten tensors first, with its derivative: (o, final, kept). call: of `kda`, if its."""
    tensors, options = arguments[:10], arguments[10:]
    if not are_plain(*tensors):
        return kda_op(*arguments)  # type: ignore[no-any-return]

    def run_forward(workspaces: list[Tensor], *given: Any) -> tuple[Any, ...]:
        return forward(readable(*given[:9], None, given[9], *options, False), workspaces)

    return attach(call, run_forward, options, tensors)


def attach(
    call: KDACall | None, forward: Callable[..., tuple[Any, ...]], options: tuple[Any, ...], tensors: tuple[Any, ...]
) -> tuple[Any, ...]:
    """forward(workspaces, *tensors) -> (o, final, kept), which lists what memory it uses besides, with its derivative. From
    the second call of a key on its launches are recorded, and later calls repeat them."""
    if call is not None and call.gate is not None:
        # In their own shapes, where they are what the kernels read: every call saves the same, however it runs (checkpointing
        # compares), and no reshape is recorded.
        tensors = (*tensors[:5], *map(_own, (call.gate.A_log, call.gate.dt_bias), tensors[5:7]), *tensors[7:])
    if call is None or call.key is None or call.state_positions is not None:
        return Direct.apply(lambda *given: forward([], *given), options, *tensors)  # type: ignore[no-any-return]
    gate = (None, None) if call.gate is None else (call.gate.A_log, call.gate.dt_bias)
    inputs = (call.q, call.k, call.v, call.g, call.beta, *gate, call.initial_state, call.cu_seqlens, None, None)

    def recording(*given: Tensor | None) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = []

        def run() -> list[Tensor]:
            workspaces: list[Tensor] = []
            results.extend(forward(workspaces, *given))
            return [t for t in results if t is not None] + workspaces

        _, tape = record(run, inputs, call.q.device)
        if tape is not None and call.key is not None:
            CALLS.replays[call.key] = _training_replay(tape, call.output_final_state, options)
        return tuple(results)

    return Direct.apply(recording, options, *tensors)  # type: ignore[no-any-return]


def _own(t: Tensor | None, flat: Tensor | None) -> Tensor | None:
    return t if t is None or (t.is_contiguous() and t.dtype == torch.float32) else flat


def _training_replay(tape: Tape, want_state: bool, options: tuple[Any, ...]) -> Replay:
    def again(tensors: tuple[Tensor | None, ...]) -> KDAOutput | None:
        made = tape.run(tensors)
        if made is None:
            return None
        output = made[0], made[1] if want_state else None, None
        q, k, v, g, beta, A_log, dt_bias, state, cu = tensors[:9]
        o, final, _ = Direct.apply(lambda *_: output, options, q, k, v, g, beta, A_log, dt_bias, cu, state, None)
        return KDAOutput(o, final)

    return again

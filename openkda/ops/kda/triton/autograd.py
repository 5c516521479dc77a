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
from openkda.ops.kda.triton import keep
from openkda.ops.kda.triton.launch import Args, forward, readable
from openkda.ops.kda.triton.positions import backward_at_positions
from openkda.ops.kda.triton.register import _OPTIONS, _TOKENS, kda_op
from openkda.ops.triton.api import Tape, record, record_stages, walkable

BACKWARDS = Repeated(1024)
"""Tapes of backward passes."""


def _arguments(tensors: Sequence[Tensor | None], positions: Tensor | None, options: tuple[Any, ...]) -> Args:
    """tensors: q .. dt_bias, cu, state; options: of `openkda::kda_backward`, whose states are always wanted here."""
    return readable(*tensors, None, positions, *options[:5], True, *options[6:], False)  # type: ignore[arg-type]


def _kda_backward(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, A_log, dt_bias, cu, state, positions, o, kept, do, ds, dkept, *options
) -> tuple[Tensor, ...]:
    a = _arguments((q, k, v, g, beta, A_log, dt_bias, cu, state), positions, options)
    do = None if do is None else walkable(do)
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
    _keep(ctx, inputs[:10], inputs[10:], output[0], output[2])


def _keep(
    ctx: Any, tensors: tuple[Any, ...], options: tuple[Any, ...], o: Tensor, kept: Tensor | None, *more: Tensor
) -> None:
    """tensors: q .. dt_bias, cu, state, positions; more: what `keep.forward` keeps."""
    ctx.save_for_backward(*tensors, o, None if tensors[9] is None else kept, *more)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, ds: Tensor | None, dkept: Tensor | None) -> tuple[Any, ...]:
    return (*differentiate(ctx, 0, do, ds, dkept), None, *(None for _ in ctx.options))


class Direct(torch.autograd.Function):
    """forward(*tensors) -> (o, final, kept, *more), final and kept may be None, for the ten tensors of `_keep`, where more
    stays; options: of `openkda::kda_backward`."""

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., tuple[Any, ...]], options: tuple[Any, ...], *tensors: Tensor | None
    ) -> Any:
        o, final, kept, *more = forward(*tensors)
        _keep(ctx, tensors, options, o, kept, *more)
        return o, final, kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *differentiate(ctx, 2, *grads), None)


_apply: Callable[..., Any] = super(torch.autograd.Function, Direct).apply  # type: ignore[misc]
"""Without looking for torch.func, which are_plain and keys have done: 2.5 us less."""


def differentiate(
    ctx: Any, before: int, do: Tensor | None, ds: Tensor | None, dkept: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of the nine tensors of `_TOKENS` and the initial state, for what `_keep` kept. before: how many other arguments
    come in front of them."""
    if ds is not None and not ds.numel():  # it was not asked for
        ds = None
    if dkept is not None and not dkept.numel():
        dkept = None
    if do is None and ds is None and dkept is None:
        return (None,) * 9
    tensors = ctx.saved_tensors
    again, key, given = None, None, ()
    if dkept is None and not torch.is_grad_enabled():
        do = None if do is None else walkable(do)
        given = (*tensors[:9], tensors[10], do, ds, *tensors[12:])
        key, again = BACKWARDS.look(
            given, (*ctx.options, host.HOPPER_WALKS, host.HOPPER_PRODUCTS, host.HOPPER_GRADIENTS)
        )
    found = None if again is None else again(given)
    if found is None:
        if torch.is_grad_enabled() or not are_plain(*tensors, do, ds, dkept):
            found = kda_backward_op(*tensors[:12], do, ds, dkept, *ctx.options)
        elif dkept is None:
            found = _anew(key, given, ctx.options)
        else:
            found = _kda_backward(*tensors[:12], do, ds, dkept, *ctx.options)
        needs = ctx.needs_input_grad[before:]
        found = [g if need else None for g, need in zip(found, (*needs[:7], needs[8]), strict=True)]
    ds0, state = found[7], tensors[8]
    if ds0 is not None and state is not None and ds0.dtype != state.dtype:
        ds0 = ds0.to(state.dtype)
    return (*found[:7], None, ds0)


def _anew(key: Any, given: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of q .. dt_bias and the state; from the second pass of a key on, recorded. given: q .. dt_bias, cu, state, o,
    do, ds, and what the forward kept."""
    *nine, o, do, ds = given[:12]
    a, q, v, v_first = _arguments(nine, None, options), given[0], given[2], options[6]
    kept: host.Kept | host.KeptChunks | None = None
    if given[12:]:
        kept = host.KeptChunks(*given[12:]) if given[12].dtype == torch.uint8 else keep.parts(a, *given[12:])

    def launches() -> Sequence[Any]:
        return host.launches(a, o, do, ds, a.state is not None, kept=kept)

    seen = BACKWARDS.seen(key)
    BACKWARDS.module(key, lambda: host)
    if seen is None:
        return host.finished(q, v, v_first, *launches())
    made, tape = record_stages(launches, given, o.device)
    found = host.finished(q, v, v_first, *made)  # type: ignore[arg-type]
    if tape is not None:
        run = tape.run

        def again(given: tuple[Any, ...]) -> tuple[Tensor | None, ...] | None:
            made: Any = run(given)
            return None if made is None else host.finished(given[0], given[2], v_first, *made)

        nothing_left = all(f is m for f, m in zip(found, made, strict=True))  # as sizes and dtypes have it
        BACKWARDS.replays[seen] = run if nothing_left else again
    return found


derive(kda_op, _backward, _save)
refuse_derivative(
    kda_backward_op, "kda: second derivatives are not implemented; use impl='reference' in float64 for them"
)


def run(call: KDACall | None, *arguments: Any) -> tuple[Any, ...]:
    """`kda_op` on these arguments of it, ten tensors first, with its derivative: (o, final, kept). call: of `kda`, if its."""
    tensors, options = arguments[:10], arguments[10:]
    if not are_plain(*tensors):
        return kda_op(*arguments)  # type: ignore[no-any-return]

    keeps = call is not None and call.keeps

    def run_forward(workspaces: list[Tensor], *given: Any) -> tuple[Any, ...]:
        a = readable(*given[:9], None, given[9], *options, False)
        if not keeps:
            return forward(a, workspaces)
        o, final, *kept = keep.forward(a, workspaces)
        return o, final, None, *kept

    return attach(call, run_forward, options, tensors)


def attach(
    call: KDACall | None, forward: Callable[..., tuple[Any, ...]], options: tuple[Any, ...], tensors: tuple[Any, ...]
) -> tuple[Any, ...]:
    """(o, final, kept) of forward(workspaces, *tensors), which lists what memory it uses besides and may give more for the
    backward, with its derivative. From the second call of a key on its launches are recorded, and later calls repeat them."""
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
            CALLS.replays[call.key] = _training_replay(tape, call.output_final_state, len(results) - 3, options)
        return tuple(results)

    return Direct.apply(recording, options, *tensors)  # type: ignore[no-any-return]


def _own(t: Tensor | None, flat: Tensor | None) -> Tensor | None:
    return t if t is None or (t.is_contiguous() and t.dtype == torch.float32) else flat


def _training_replay(tape: Tape, want_state: bool, more: int, options: tuple[Any, ...]) -> Replay:
    first, last = 1 + want_state, 1 + want_state + more

    def again(tensors: tuple[Tensor | None, ...]) -> KDAOutput | None:
        made = tape.run(tensors)
        if made is None:
            return None
        output = made[0], made[1] if want_state else None, None, *made[first:last]
        q, k, v, g, beta, A_log, dt_bias, state, cu, _, _ = tensors
        o, final, _ = _apply(lambda *_: output, options, q, k, v, g, beta, A_log, dt_bias, cu, state, None)
        return KDAOutput(o, final)

    return again

"""The kernels' derivative: `openkda::kda_backward`, hung on `openkda::kda`. Importing this file registers both.

Calls that nobody watches (`goes_direct`) go through a `torch.autograd.Function` instead: torch spends 100 us a call on the
defaults of an operator of 20 arguments that has a derivative. A second derivative is refused: the kernels of the first are not
differentiable themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import are_plain, define, derive, refuse_derivative
from openkda.ops.kda.triton.backward import backward
from openkda.ops.kda.triton.launch import readable
from openkda.ops.kda.triton.positions import backward_at_positions
from openkda.ops.kda.triton.register import _OPTIONS, _TOKENS, _kda, kda_op
from openkda.ops.triton.api import unit_stride


def _kda_backward(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, A_log, dt_bias, cu, state, positions, o, kept, do, ds, dkept, *options
) -> tuple[Tensor, ...]:
    gate, bound, scale, l2norm, sigmoid, _, v_first, state_dtype, exact = options
    a = readable(
        q, k, v, g, beta, A_log, dt_bias, cu, state, None, positions, gate, bound, scale, l2norm, sigmoid, True, v_first,
        state_dtype, exact, False,
    )  # fmt: skip
    do = None if do is None else unit_stride(do)
    if dkept is None:
        found = backward(a, o, do, ds, state is not None)
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
    """forward(*tensors) -> (o, final, kept), for the ten tensors of `_save`; options: of `openkda::kda_backward`."""

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., tuple[Tensor, ...]], options: tuple[Any, ...], *tensors: Tensor | None
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
    direct = not torch.is_grad_enabled() and are_plain(*tensors, do, ds, dkept)
    found = (_kda_backward if direct else kda_backward_op)(*tensors, do, ds, dkept, *ctx.options)
    grads = [g if need else None for g, need in zip(found, _differentiable(needs), strict=True)]
    state = tensors[8]
    if grads[7] is not None and state is not None:
        grads[7] = grads[7].to(state.dtype)
    return (*grads[:7], None, grads[7])


def _differentiable(needs: tuple[bool, ...]) -> tuple[bool, ...]:
    return (*needs[:7], needs[8])


derive(kda_op, _backward, _save)
refuse_derivative(
    kda_backward_op, "kda: second derivatives are not implemented; use impl='reference' in float64 for them"
)


def run(*arguments: Any) -> tuple[Tensor, ...]:
    """`kda_op` on the same arguments, ten tensors first, with its derivative: (o, final, kept)."""
    tensors, options = arguments[:10], arguments[10:]
    if not are_plain(*tensors):
        return kda_op(*arguments)
    return Direct.apply(lambda *given: _kda(*given, *options), options, *tensors)  # type: ignore[no-any-return]

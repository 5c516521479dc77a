"""The chunkwise form as one torch operator, for torch.compile: its loops depend on the lengths, which a graph cannot.

The backward runs the forward again, because what the forward would have to hand over has a shape that the lengths decide.
Called without torch.compile the implementation keeps it and is a quarter faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import define, derive, no_autocast, refuse_derivative
from openkda.ops.kda.chunkwise.autograd import Chunkwise, Spans
from openkda.ops.kda.chunkwise.forward import Settings, Tokens
from openkda.ops.kda.gate import BoundedGate, Gate, SoftplusGate
from openkda.ops.packing.api import check_cu_seqlens

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? state, Tensor? cu"
)
_OPTIONS = "bool gate, float? bound, float scale, bool l2norm, bool sigmoid"


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd inside an operator's own code, where the dispatcher has left it behind."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def spans_of(B: int, T: int, cu: Tensor | None) -> Spans:
    """(first row, row behind the last) of every sequence in the flattened [B * T] rows."""
    return list(itertools.pairwise([b * T for b in range(B + 1)] if cu is None else cu.tolist()))


def _state_shape(v: Tensor, g: Tensor, cu: Tensor | None) -> tuple[int, ...]:
    return (v.shape[0] if cu is None else cu.shape[0] - 1, v.shape[2], g.shape[3], v.shape[3])


def _state_dtype(v: Tensor) -> torch.dtype:
    return torch.promote_types(v.dtype, torch.float32)


def _run(
    rows: tuple[Tensor, ...], A_log: Tensor | None, dt_bias: Tensor | None, state: Tensor | None, cu: Tensor | None,
    gate: bool, bound: float | None, scale: float, l2norm: bool, sigmoid: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """state [N, HV, K, V] in the dtype of the arithmetic, or None for zeros -> (o [B, T, HV, V], states)."""
    found: Gate | None = None
    if gate and bound is not None:
        found = BoundedGate(bound, A_log, dt_bias)
    elif gate:
        assert A_log is not None  # for the type checker: validation made sure of it
        found = SoftplusGate(A_log, dt_bias)
    v = rows[2]
    if state is None:
        state = v.new_zeros(_state_shape(v, rows[3], cu), dtype=_state_dtype(v))
    check_cu_seqlens(cu, v.shape[0], v.shape[1])  # its values could not be read while the graph was traced
    q, k, flat_v, g, beta = (x.flatten(0, 1) for x in rows)
    with no_autocast(v):
        o, S = Chunkwise.apply(
            Settings(found, scale, l2norm, sigmoid, state.dtype), spans_of(v.shape[0], v.shape[1], cu), state,
            *Tokens(q, k, flat_v, g, beta, A_log, dt_bias),
        )  # fmt: skip
    return o.view(v.shape), S


def _forward(q, k, v, g, beta, A_log, dt_bias, state, cu, *options) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    with torch.no_grad():
        return _run((q, k, v, g, beta), A_log, dt_bias, state, cu, *options)


def _fake_forward(q, k, v, g, beta, A_log, dt_bias, state, cu, *options) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape), v.new_empty(_state_shape(v, g, cu), dtype=_state_dtype(v))


def _backward(do, ds, q, k, v, g, beta, A_log, dt_bias, state, cu, *options) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    inputs = (q, k, v, g, beta, A_log, dt_bias, state)
    with _recording():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        rows, (A, dt, S) = leaves[:5], leaves[5:]
        ends = _run(tuple(rows), A, dt, S, cu, *options)  # type: ignore[arg-type]
        given = [(end, d) for end, d in zip(ends, (do, ds), strict=True) if d is not None]
        wanted = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad([e for e, _ in given], wanted, [d for _, d in given], materialize_grads=True))
    return tuple(q.new_empty(0) if x is None else next(found).contiguous() for x in inputs)


def _fake_backward(do, ds, q, k, v, g, beta, A_log, dt_bias, state, cu, *options) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    inputs = (q, k, v, g, beta, A_log, dt_bias, state)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(False)


def _grads(ctx: Any, do: Tensor | None, ds: Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    if do is None and ds is None:
        return (None,) * (len(tensors) + len(ctx.options))
    found = _backward_op(do, ds, *tensors, *ctx.options)
    grads = [g if need else None for g, need in zip(found, ctx.needs_input_grad[:8], strict=True)]
    return (*grads, None, *(None for _ in ctx.options))


kda_chunkwise_op = define(f"kda_chunkwise({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)", _forward, _fake_forward)
_backward_op = define(
    f"kda_chunkwise_backward(Tensor? do, Tensor? ds, {_INPUTS}, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
derive(kda_chunkwise_op, _grads, _save)
refuse_derivative(_backward_op, "kda: the second derivative is not implemented (impl='reference' has one)")

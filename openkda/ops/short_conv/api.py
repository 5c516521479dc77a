"""The contract of the short convolution: each channel mixes its last W tokens.

    y_t = act( sum_{j=0..W-1} weight[:, j] * x_{t-(W-1)+j} )        tap W-1, the last, multiplies the current token

Tokens before the first one of a sequence come from `initial_state` (zeros without it), never from a neighbour in the pack.
Source: Kimi Linear report, section 3; weight layout of the published checkpoints, [D, 1, W] without its middle axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openkda.ops.device.api import Repeated, choose_module
from openkda.ops.packing.api import check_cu_seqlens

__all__ = ["ACTIVATIONS", "IMPLEMENTATIONS", "short_conv", "short_conv_step", "short_convs"]

IMPLEMENTATIONS = ("triton", "reference")
"""In order of preference. Each is a module of this folder with `refusals(x)`, `run` and `step`."""

ACTIVATIONS = ("silu", None)
WIDTHS = (2, 3, 4)

CALLS = Repeated()
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def short_conv(
    x: Float[Tensor, "B T D"],
    weight: Float[Tensor, "D W"],
    *,
    initial_state: Float[Tensor, "N D _w"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " _n1"] | None = None,
    activation: str | None = "silu",
    impl: str | None = None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "_n D _w"] | None]:
    """Causal depthwise convolution over whole sequences, then SiLU.

    Args:
        x: [B, T, D], any float dtype; computed in float32 (float64) with one cast at the end. T may be 0.
        weight: [D, W] with W = 2, 3 or 4, float32 (or x.dtype).
        initial_state: [N, D, W - 1], the W - 1 inputs before each sequence, newest last, in x.dtype. Default zeros.
        output_final_state: also return the last W - 1 inputs of each sequence. A sequence shorter than W - 1 keeps the
            newest entries of its own initial state.
        cu_seqlens: [N + 1] int32 or int64, 0 = first <= ... <= last = T, sequences packed along T (then B = 1). Empty and
            one-token members are fine. Values are checked on the CPU only (on a GPU that would stall the stream).
        activation: "silu" or None.
        impl: a name out of IMPLEMENTATIONS; None chooses.

    Returns: (y [B, T, D] in x.dtype, final state [N, D, W - 1] in x.dtype or None).
    Raises: ValueError or TypeError, showing expected and received, before anything runs.
    Differentiable in x, weight and initial_state, through both results.
    """
    ys, finals = short_convs(
        (x,), (weight,), initial_states=None if initial_state is None else (initial_state,),
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, activation=activation, impl=impl,
    )  # fmt: skip
    return ys[0], None if finals is None else finals[0]


def short_convs(
    xs: Sequence[Float[Tensor, "B T _d"]],
    weights: Sequence[Float[Tensor, "_d W"]],
    *,
    initial_states: Sequence[Float[Tensor, "N _d _w"]] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " _n1"] | None = None,
    activation: str | None = "silu",
    impl: str | None = None,
) -> tuple[list[Float[Tensor, "B T _d"]], list[Float[Tensor, "_n _d _w"]] | None]:
    """`short_conv` of one to three tensors of the same tokens, in one launch on a GPU: q, k and v of a layer.

    xs: [B, T, D_i] of one dtype; weights: [D_i, W] of one W; initial_states: one [N, D_i, W - 1] for each x, or None.
    Returns: (the outputs, the final states or None), as `short_conv` does for each. Raises and differentiates as it does.
    """
    key, again, tensors = None, None, cast("tuple[Tensor | None, ...]", ())
    if all(type(items) in (tuple, list, type(None)) for items in (xs, weights, initial_states)):
        tensors = (*xs, *weights, *(initial_states or ()), cu_seqlens)
        options = (len(xs), len(weights), initial_states is None, output_final_state, activation, impl)
        key, again = CALLS.look(tensors, options)
    done = None if again is None else again(tensors)
    if done is not None:
        return done
    states = [] if initial_states is None else list(initial_states)
    seen = CALLS.seen(key)
    module = CALLS.module(key, lambda: _checked(xs, weights, initial_states, cu_seqlens, activation, impl))
    repeated = None if seen is None else (seen, output_final_state)
    ys, finals = module.run(list(xs), list(weights), states, cu_seqlens, activation, repeated)
    return ys, finals if output_final_state else None


def short_conv_step(
    x: Float[Tensor, "N D"],
    weight: Float[Tensor, "D W"],
    state: Float[Tensor, "N D _w"],
    *,
    activation: str | None = "silu",
    impl: str | None = None,
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D _w"]]:
    """One token for each of N sequences: (y [N, D], new state [N, D, W - 1]); `state` is left untouched.

    The same additions in the same order as `short_conv`.
    """
    _check_weight(x, 2, "[N, D]", weight, activation)
    _check_state("state", state, x, (*x.shape, weight.shape[1] - 1))
    recording = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or state.requires_grad)
    names = (
        ("reference",) if recording and impl is None else IMPLEMENTATIONS
    )  # the kernel of the step has no derivative
    return choose_module("short_conv", names, impl, x, _module).step(x, weight, state, activation)


def _checked(
    xs: Sequence[Tensor], weights: Sequence[Tensor], states: Sequence[Tensor] | None, cu: Tensor | None,
    activation: str | None, impl: str | None,
) -> ModuleType:  # fmt: skip
    _check_lists(xs, weights, states)
    x = xs[0]
    for i, (t, w) in enumerate(zip(xs, weights, strict=True)):
        _check_weight(t, 3, "[B, T, D]", w, activation)
        if i and (t.shape[:2] != x.shape[:2] or t.dtype != x.dtype or t.device != x.device):
            wanted = f"{x.dtype} of shape {[*x.shape[:2]]} + [D] on {x.device}"
            _bad(f"xs[{i}]", wanted, f"{t.dtype} {list(t.shape)} on {t.device}")
        if i and w.shape[1] != weights[0].shape[1]:
            _bad(f"weights[{i}].shape", f"[D, W] with W = {weights[0].shape[1]}", list(w.shape))
    if isinstance(cu, Tensor) and cu.device != x.device:
        _bad("cu_seqlens.device", f"{x.device} (that of x)", cu.device)
    N = check_cu_seqlens(cu, x.shape[0], x.shape[1])
    for t, w, state in zip(xs, weights, states or (), strict=False):
        _check_state("initial_state", state, t, (N, t.shape[2], w.shape[1] - 1))
    return choose_module("short_conv", IMPLEMENTATIONS, impl, x, _module)


def _check_lists(xs: Sequence[Tensor], weights: Sequence[Tensor], states: Sequence[Tensor] | None) -> None:
    if isinstance(xs, Tensor) or not 1 <= len(xs) <= 3:
        _bad("xs", "one to three tensors", "a tensor" if isinstance(xs, Tensor) else len(xs))
    for name, items in (("weights", weights), ("initial_states", states)):
        if items is not None and (isinstance(items, Tensor) or len(items) != len(xs)):
            _bad(name, f"{len(xs)} tensors, one for each x", "a tensor" if isinstance(items, Tensor) else len(items))


def _bad(name: str, expected: object, received: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: expected {expected}, received {received}")


def _check_weight(x: Tensor, dims: int, letters: str, weight: Tensor, activation: str | None) -> None:
    for name, t in (("x", x), ("weight", weight)):
        if not isinstance(t, Tensor):
            _bad(name, "a torch.Tensor", type(t).__name__, TypeError)
        if t.dtype not in _FLOATS:
            _bad(f"{name}.dtype", "float16, bfloat16, float32 or float64", t.dtype, TypeError)
        if t.device != x.device:
            _bad(f"{name}.device", f"{x.device} (that of x)", t.device)
    if x.dim() != dims:
        _bad("x.shape", letters, list(x.shape))
    if weight.dim() != 2 or weight.shape[0] != x.shape[-1] or weight.shape[1] not in WIDTHS:
        _bad("weight.shape", f"[D, W] = [{x.shape[-1]}, 2..4]", list(weight.shape))
    if activation not in ACTIVATIONS:
        _bad("activation", "'silu' or None", repr(activation))


def _check_state(name: str, state: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(state, Tensor):
        _bad(name, "a torch.Tensor", type(state).__name__, TypeError)
    if tuple(state.shape) != shape:
        _bad(f"{name}.shape", f"[N, D, W - 1] = {list(shape)}", list(state.shape))
    if state.dtype != x.dtype:
        _bad(f"{name}.dtype", f"{x.dtype} (that of x)", state.dtype, TypeError)
    if state.device != x.device:
        _bad(f"{name}.device", f"{x.device} (that of x)", state.device)


def _module(name: str) -> ModuleType:
    if name == "triton":
        from openkda.ops.short_conv import triton

        return triton
    from openkda.ops.short_conv import reference

    return reference

"""The contract of the short convolution: each channel mixes its last W tokens.

    y_t = act( sum_{j=0..W-1} weight[:, j] * x_{t-(W-1)+j} )        tap W-1, the last, multiplies the current token

Tokens before the first one of a sequence come from `initial_state` (zeros without it), never from a neighbour in the pack.
Source: Kimi Linear report, section 3; weight layout of the published checkpoints, [D, 1, W] without its middle axis.
"""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openkda.ops.device.api import choose_module
from openkda.ops.packing.api import check_cu_seqlens

__all__ = ["ACTIVATIONS", "IMPLEMENTATIONS", "short_conv", "short_conv_step"]

IMPLEMENTATIONS = ("triton", "reference")
"""In order of preference. Each is a module of this folder with `refusals(x)`, `run` and `step`."""

ACTIVATIONS = ("silu", None)
WIDTHS = (2, 3, 4)

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
    _check_weight(x, 3, "[B, T, D]", weight, activation)
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.device != x.device:
        _bad("cu_seqlens.device", f"{x.device} (that of x)", cu_seqlens.device)
    N = check_cu_seqlens(cu_seqlens, x.shape[0], x.shape[1])
    if initial_state is not None:
        _check_state("initial_state", initial_state, x, (N, x.shape[2], weight.shape[1] - 1))
    y, final = choose_module("short_conv", IMPLEMENTATIONS, impl, x, _module).run(
        x, weight, initial_state, cu_seqlens, activation
    )
    return y, final if output_final_state else None


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
    return choose_module("short_conv", IMPLEMENTATIONS, impl, x, _module).step(x, weight, state, activation)


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

"""Triton convolution and its backward; the one-token step has none."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from openkda.ops.device.api import goes_direct, triton_refusals


def refusals(x: Tensor) -> list[str]:
    return triton_refusals(x)


def run(
    xs: list[Tensor],
    weights: list[Tensor],
    states: list[Tensor],
    cu_seqlens: Tensor | None,
    activation: str | None,
    repeated: tuple[Any, bool] | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs, final states); arguments as in `api.short_convs`, in one launch.

    repeated: (key, whether final states are wanted) of a call that looks like an earlier one.
    """
    silu = activation == "silu"
    if goes_direct(*xs, *weights, *states):
        from openkda.ops.short_conv.triton import launch

        if repeated is None:
            return launch.conv(xs, weights, states, cu_seqlens, silu)
        return launch.conv_recorded(xs, weights, states, cu_seqlens, silu, *repeated)
    from openkda.ops.short_conv.triton import register

    found = register.conv_op(xs, weights, states, cu_seqlens, silu)
    return found[: len(xs)], found[len(xs) :]


def step(x: Tensor, weight: Tensor, state: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    """(y, new state); arguments as in `api.short_conv_step`."""
    if goes_direct(x, weight, state):
        from openkda.ops.short_conv.triton import launch

        return launch.step(x, weight, state, activation == "silu")
    from openkda.ops.short_conv.triton import register

    return register.step_op(x, weight, state, activation == "silu")

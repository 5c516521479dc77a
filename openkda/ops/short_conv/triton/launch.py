"""Launches of the convolution kernels: one, two or three tensors of the same tokens in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import counts_in_32_bits
from openkda.ops.short_conv.api import CALLS
from openkda.ops.short_conv.triton.conv import conv_kernel, step_kernel
from openkda.ops.short_conv.triton.gradient import conv_gradient_kernel
from openkda.ops.triton.api import QUICK, ceil_div, dense, launch, record, rows_of, unit_stride, walkable

BT, BD, STEP, WARPS, STAGES = 64, 512, 8, 4, 2
"""H200, 8192 tokens of 3 x 12,288 channels: 0.312 ms with the next step's rows on their way (two stages), 0.422 without."""
GRADIENT_BT, GRADIENT_BD, GRADIENT_STEP, GRADIENT_WARPS, GRADIENT_STAGES = 64, 256, 2, 4, 1
GROUPS = 256
"""Rows of partial sums of dw: with one row a block of tokens, a pack of many short members would need more memory for them
than its tokens take."""

Tensors = Sequence[Tensor]


def conv(
    xs: Tensors,
    weights: Tensors,
    states: Tensors,
    cu: Tensor | None,
    silu: bool,
    settings: tuple[int, ...] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """(y [B, T, D], final window [N, D, W - 1]) of each x; states: one for each x, or none at all.

    settings: (BT, BD, STEP, warps, pipeline stages), the measured ones by default.
    """
    B, T, _ = xs[0].shape
    W = weights[0].shape[1]
    N = B if cu is None else cu.numel() - 1
    device, dtype = xs[0].device, xs[0].dtype
    ys = [torch.empty(x.shape, dtype=dtype, device=device) for x in xs]
    windows = [torch.empty((N, x.shape[2], W - 1), dtype=dtype, device=device) for x in xs]
    bt, bd, step, warps, stages = settings or (BT, BD, STEP, WARPS, STAGES)
    slots = B * max(ceil_div(T, bt), 1) if cu is None else T // bt + N
    tensors: list[Tensor | None] = []
    steps: list[int] = []
    for i, x in enumerate(xs):
        x = walkable(x)
        state = _reachable(states[i]) if states else None
        tensors += (x, dense(weights[i]), state, ys[i], windows[i])
        steps += (*rows_of(x), *((0, 0, 0) if state is None else state.stride()), x.shape[2])
    count = len(xs)
    blocks = sum(ceil_div(x.shape[2], bd) for x in xs)
    if slots and blocks:
        launch(
            conv_kernel, slots * blocks,
            (*tensors, *(None,) * (5 * (3 - count)), None if cu is None else dense(cu)),
            (*steps, *(0,) * (6 * (3 - count))), (T, N),
            (bt, bd, step, count, W, cu is not None, bool(states), silu, QUICK, stages), warps, device,
        )  # fmt: skip
    return ys, windows


def _reachable(state: Tensor) -> Tensor:
    return state if counts_in_32_bits(state, 1) else state.contiguous()


def conv_recorded(
    xs: Tensors, weights: Tensors, states: Tensors, cu: Tensor | None, silu: bool, key: Any, want_state: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """`conv`; from now on calls of this key repeat its launch."""
    count = len(xs)

    def run() -> list[Tensor]:
        ys, windows = conv(xs, weights, states, cu, silu)
        return [*ys, *windows]

    made, tape = record(run, (*xs, *weights, *states, cu), xs[0].device)
    if tape is not None:

        def again(tensors: tuple[Tensor | None, ...]) -> tuple[list[Tensor], list[Tensor] | None] | None:
            made = tape.run(tensors)
            return None if made is None else (made[:count], made[count:] if want_state else None)

        CALLS.replays[key] = again
    return list(made[:count]), list(made[count:])


def conv_gradient(
    xs: Tensors,
    weights: Tensors,
    states: Tensors,
    cu: Tensor | None,
    dys: Sequence[Tensor | None],
    dfinals: Sequence[Tensor | None],
    silu: bool,
    settings: tuple[int, ...] | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(dx, dw in float32, dstate in x's dtype) of each x; dys, dfinals: None for a result without a gradient.

    settings: (BT, BD, STEP, warps, pipeline stages), the measured ones by default.
    """
    bt, bd, step, warps, stages = settings or (
        GRADIENT_BT, GRADIENT_BD, GRADIENT_STEP, GRADIENT_WARPS, GRADIENT_STAGES,
    )  # fmt: skip
    B, T, _ = xs[0].shape
    W = weights[0].shape[1]
    N = B if cu is None else cu.numel() - 1
    device, dtype = xs[0].device, xs[0].dtype
    slots = B * max(ceil_div(T, bt), 1) if cu is None else T // bt + N
    group = max(ceil_div(slots, GROUPS), 1)
    groups = ceil_div(slots, group)
    has_final = any(f is not None for f in dfinals)
    new = lambda *shape, like=dtype: torch.empty(shape, dtype=like, device=device)  # noqa: E731
    dxs = [new(*x.shape) for x in xs]
    partial = [new(groups, 4, x.shape[2], like=torch.float32) for x in xs]
    dstates = [new(N, x.shape[2], W - 1) for x in xs] if states else []
    tensors: list[Tensor | None] = []
    steps: list[int] = []
    for i, x in enumerate(xs):
        D = x.shape[2]
        x = walkable(x)
        state, dy, df = _reachable(states[i]) if states else None, dys[i], dfinals[i]
        dy = torch.zeros((), dtype=dtype, device=device).expand(x.shape) if dy is None else dy
        dy = walkable(dy)
        if has_final and df is None:
            df = torch.zeros((N, D, W - 1), dtype=dtype, device=device)
        tensors += (
            x, dense(weights[i]), state, dy, df, dxs[i], dstates[i] if states else None, partial[i],
        )  # fmt: skip
        steps += (
            *rows_of(x), *((0, 0, 0) if state is None else state.stride()), *rows_of(dy),
            *((0, 0, 0) if df is None else df.stride()), D,
        )  # fmt: skip
    count = len(xs)
    blocks = sum(ceil_div(x.shape[2], bd) for x in xs)
    if groups and blocks:
        launch(
            conv_gradient_kernel, groups * blocks,
            (*tensors, *(None,) * (8 * (3 - count)), None if cu is None else dense(cu)),
            (*steps, *(0,) * (11 * (3 - count))), (T, N, slots, group),
            (bt, bd, step, count, W, cu is not None, bool(states), has_final, silu, QUICK, stages), warps, device,
        )  # fmt: skip
    dws = [p.sum(0)[4 - W :].t().contiguous() for p in partial]
    return dxs, dws, dstates


def step(x: Tensor, weight: Tensor, state: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """One token: (y [N, D], new window [N, D, W - 1])."""
    x, weight, state = unit_stride(x), dense(weight), _reachable(state)
    N, D = x.shape
    y, new = x.new_empty(N, D), x.new_empty(state.shape)
    if N and D:
        tensors, steps = (x, weight, state, y, new), (x.stride(0), *state.stride(), D)
        launch(step_kernel, N * ceil_div(D, 256), tensors, steps, (), (256, weight.shape[1], silu), 4, x.device)
    return y, new

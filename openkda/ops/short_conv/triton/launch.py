"""Launch and registration of the convolution kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.short_conv.triton.conv import conv_kernel, step_kernel, window_kernel
from openkda.ops.triton.api import ceil_div, launch

BT, BD = 64, 512
_LIBRARY = torch.library.Library("openkda", "FRAGMENT")
_LIBRARY.define("short_conv(Tensor x, Tensor weight, Tensor? state, Tensor? cu, bool silu) -> (Tensor, Tensor)")
_LIBRARY.define("short_conv_step(Tensor x, Tensor weight, Tensor state, bool silu) -> (Tensor, Tensor)")


def _conv(x: Tensor, weight: Tensor, state: Tensor | None, cu: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight, cu = weight.contiguous(), None if cu is None else cu.contiguous()
    B, T, D = x.shape
    W = weight.shape[1]
    N = B if cu is None else cu.numel() - 1
    y, window = torch.empty((B, T, D), dtype=x.dtype, device=x.device), x.new_empty(N, D, W - 1)
    strides = (0, 0, 0) if state is None else state.stride()
    slots = B * ceil_div(T, BT) if cu is None else T // BT + N
    flags = (W, cu is not None, state is not None)
    if slots and D:
        steps = (*x.stride()[:2], *y.stride()[:2], *strides, D)
        constants = (BT, BD, *flags, silu)
        launch(conv_kernel, slots * ceil_div(D, BD), (x, weight, state, cu, y), steps, (T, N), constants, 4, x.device)
    if N and D:
        steps = (*x.stride()[:2], *strides, D)
        launch(window_kernel, N * ceil_div(D, 256), (x, state, cu, window), steps, (T,), (256, *flags), 4, x.device)
    return y, window


def _step(x: Tensor, weight: Tensor, state: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    x, weight = x if x.stride(-1) == 1 else x.contiguous(), weight.contiguous()
    N, D = x.shape
    y, new = x.new_empty(N, D), x.new_empty(state.shape)
    if N and D:
        tensors, steps = (x, weight, state, y, new), (x.stride(0), *state.stride(), D)
        launch(step_kernel, N * ceil_div(D, 256), tensors, steps, (), (256, weight.shape[1], silu), 4, x.device)
    return y, new


def _fake_conv(x, weight, state, cu, silu):
    N = x.shape[0] if cu is None else cu.numel() - 1
    return x.new_empty(x.shape), x.new_empty(N, x.shape[2], weight.shape[1] - 1)


def _fake_step(x, weight, state, silu):
    return x.new_empty(x.shape), x.new_empty(state.shape)


for _name, _run, _fake in (("short_conv", _conv, _fake_conv), ("short_conv_step", _step, _fake_step)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"openkda::{_name}", _fake, lib=_LIBRARY)

conv_op = torch.ops.openkda.short_conv.default
step_op = torch.ops.openkda.short_conv_step.default

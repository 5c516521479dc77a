"""The short convolution in plain torch with torch's own autograd: the truth on any device, and the CPU path.

Each sequence is laid out behind its own W - 1 state rows; tap j of a token is then the row j places after the first row of
its window, and no padding and no mask is needed, whatever the lengths.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


def refusals(x: Tensor) -> list[str]:
    """Runs everything."""
    return []


def run(
    xs: list[Tensor],
    weights: list[Tensor],
    states: list[Tensor],
    cu_seqlens: Tensor | None,
    activation: str | None,
    repeated: tuple[object, bool] | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs, final states); arguments as in `api.short_convs`, states empty for zeros. repeated: for the kernels."""
    ys, finals = [], []
    for i, (x, weight) in enumerate(zip(xs, weights, strict=True)):
        y, final = _one(x, weight, states[i] if states else None, cu_seqlens, activation)
        ys.append(y)
        finals.append(final)
    return ys, finals


def _one(
    x: Tensor, weight: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    T, D = x.shape[1:]
    tail = weight.shape[1] - 1
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    before = x.new_zeros(N, tail, D) if initial_state is None else initial_state.transpose(1, 2)
    if cu_seqlens is None:
        laid = torch.cat([before, x], 1)  # [B, W - 1 + T, D]
        windows = (laid[:, j : j + T] for j in range(tail + 1))
        final = laid[:, T:]
    else:
        laid, first, last = _lay_out_pack(x[0], before, cu_seqlens)
        windows = (laid.index_select(0, first + j).unsqueeze(0) for j in range(tail + 1))
        final = laid[last]
    return _mix(windows, weight, activation, x.dtype), final.transpose(1, 2).contiguous()


def step(x: Tensor, weight: Tensor, state: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    """(y, new state); arguments as in `api.short_conv_step`."""
    window = torch.cat([state, x.unsqueeze(-1)], -1)
    return _mix(window.unbind(-1), weight, activation, x.dtype), window[..., 1:].contiguous()


def _mix(windows: Iterable[Tensor], weight: Tensor, activation: str | None, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    y = None
    for window, tap in zip(windows, weight.to(wide).unbind(1), strict=True):
        term = window.to(wide) * tap
        y = term if y is None else y + term
    assert y is not None  # for the type checker: W >= 2
    return (F.silu(y) if activation == "silu" else y).to(dtype)


def _lay_out_pack(x: Tensor, before: Tensor, cu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D], before [N, W-1, D] -> (rows [T + N (W-1), D], first window row [T], last W-1 rows of each [N, W-1])."""
    N, tail, D = before.shape
    T = x.shape[0]
    cu = cu.long()
    token = torch.arange(T, device=x.device)
    sequence = torch.searchsorted(cu[1:], token, right=True)
    first = (
        token + sequence * tail
    )  # a token's window starts W - 1 rows above its own row, token + (sequence + 1) * tail
    offsets = torch.arange(tail, device=x.device)
    state_rows = (cu[:-1] + torch.arange(N, device=x.device) * tail).unsqueeze(1) + offsets
    last = (cu[1:] + torch.arange(N, device=x.device) * tail).unsqueeze(1) + offsets
    source = torch.empty(T + N * tail, dtype=torch.long, device=x.device)
    source[first + tail] = token
    source[state_rows.flatten()] = T + torch.arange(N * tail, device=x.device)
    return torch.cat([x, before.reshape(N * tail, D)]).index_select(0, source), first, last

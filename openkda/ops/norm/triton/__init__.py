"""Triton norms and their backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import goes_direct, triton_refusals

MAX_WIDTH = 32768


def refusals(x: Tensor) -> list[str]:
    reasons = triton_refusals(x)
    if x.shape[-1] > MAX_WIDTH:
        reasons.append(f"rows of at most {MAX_WIDTH}, received {x.shape[-1]}")
    return reasons


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, key: Any) -> Tensor:
    """See `api.rms_norm`. key: of a call that looks like an earlier one."""
    return _norm(x, None, weight, eps, dtype, key)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, key: Any) -> Tensor:
    """See `api.gated_rms_norm`."""
    return _norm(x, gate, weight, eps, x.dtype, key)


def add_rms_norm(x: Tensor, a: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `api.add_rms_norm`."""
    from openkda.ops.norm.triton import launch

    total, y = launch.add_norm_op(x, a, weight, eps, dtype)
    return total, y


def _norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, key: Any) -> Tensor:
    from openkda.ops.norm.triton import launch

    if not goes_direct(x, gate, weight):
        return launch.norm_op(x, gate, weight, eps, dtype)
    if key is None:
        return launch.norm(x, gate, weight, eps, dtype)
    return launch.norm_recorded(x, gate, weight, eps, dtype, key)

"""Triton norms and their backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from openkda.ops.device.api import goes_direct, triton_refusals

MAX_WIDTH = 32768


def refusals(x: Tensor) -> list[str]:
    reasons = triton_refusals(x)
    if x.shape[-1] > MAX_WIDTH:
        reasons.append(f"rows of at most {MAX_WIDTH}, received {x.shape[-1]}")
    return reasons


def rms_norm(x: Tensor, weight: Tensor, eps: float, key: Any) -> Tensor:
    """See `api.rms_norm`. key: of a call that looks like an earlier one."""
    return _norm(x, None, weight, eps, key)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, key: Any) -> Tensor:
    """See `api.gated_rms_norm`."""
    return _norm(x, gate, weight, eps, key)


def _norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, key: Any) -> Tensor:
    from openkda.ops.norm.triton import launch

    if not goes_direct(x, gate, weight):
        return launch.norm_op(x, gate, weight, eps)
    return launch.norm(x, gate, weight, eps) if key is None else launch.norm_recorded(x, gate, weight, eps, key)

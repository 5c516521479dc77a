"""Triton norms and their backward."""

from __future__ import annotations

from torch import Tensor

from openkda.ops.device.api import goes_direct, triton_refusals

MAX_WIDTH = 32768


def refusals(x: Tensor) -> list[str]:
    reasons = triton_refusals(x)
    if x.shape[-1] > MAX_WIDTH:
        reasons.append(f"rows of at most {MAX_WIDTH}, received {x.shape[-1]}")
    return reasons


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `api.rms_norm`."""
    return _norm(x, None, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `api.gated_rms_norm`."""
    return _norm(x, gate, weight, eps)


def _norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    from openkda.ops.norm.triton import launch

    return (launch.norm if goes_direct(x, gate, weight) else launch.norm_op)(x, gate, weight, eps)

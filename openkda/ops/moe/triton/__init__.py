"""Kernels on a GPU: the gated activations, one pass over gate and up and one back, which keeps nothing but them; and, where
nothing is differentiated, experts as four launches and their routing as two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.device.api import goes_direct, triton_refusals

KINDS = {"swiglu": 0, "situ": 1, "situ-unbounded": 2, "sigmoid": 3}

FEW_TOKENS = 64
"""Up to which routing is two launches; cuBLAS is faster beyond."""

FEW_PAIRS = 1024
"""Token-expert pairs up to which plain matrices are multiplied by these kernels, and not by torch's grouped matmul."""

Matrices = Tensor | tuple[Tensor, Tensor]
"""[E, out, in]; or codes and scales of MXFP4."""


def refusals(x: Tensor) -> list[str]:
    return triton_refusals(x)


def glu(gate: Tensor, up: Tensor, kind: str, beta: float = 1.0, linear_beta: float = 1.0) -> Tensor:
    """See `openkda/ops/moe/activation.py`; kind: of KINDS. gate and up have one shape and dtype."""
    from openkda.ops.moe.triton import launch

    run = launch.glu if goes_direct(gate, up) else launch.glu_op
    result: Tensor = run(gate, up, KINDS[kind], beta, linear_beta)
    return result


def takes(gate: Tensor, up: Tensor) -> bool:
    """Whether the kernels run on this pair; plain torch does otherwise."""
    alike = gate.shape == up.shape and gate.dtype == up.dtype and gate.device == up.device
    return gate.is_cuda and alike and not refusals(gate) and gate.dtype != torch.float64


def takes_experts(x: Tensor, weights: Tensor, matrices: tuple[Matrices, Matrices, Matrices], pairs: int) -> bool:
    """Whether `experts` runs this call: packed matrices in any number of pairs, plain ones of x's dtype in few."""
    if refusals(x) or weights.dtype != torch.float32:
        return False
    plain = [w for w in matrices if isinstance(w, Tensor)]
    if plain and (pairs > FEW_PAIRS or any(w.dtype != x.dtype for w in plain)):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, *plain)))


def experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    matrices: tuple[Matrices, Matrices, Matrices],
    glu: tuple[str, float, float],
) -> Tensor:
    """The weighted sum of every token's experts: `openkda/ops/moe/api.py`. matrices: w1 (gate), w3 (up), w2 (down)."""
    from openkda.ops.moe.triton import expert_launch as host

    parts: list[Any] = [part for w in matrices for part in ((w, None) if isinstance(w, Tensor) else w)]
    run: Any = host.experts if goes_direct(x, experts, weights, *parts) else host.experts_op
    kind, b1, b2 = glu
    result: Tensor = run(x, experts, weights, *parts, KINDS[kind], b1, b2)
    return result


def takes_routing(x: Tensor, weight: Tensor, bias: Tensor | None, k: int) -> bool:
    """Whether `route` runs this call: few tokens, nothing differentiated."""
    if refusals(x) or x.shape[0] > FEW_TOKENS or k > 64 or weight.device != x.device or weight.dtype == torch.float64:
        return False
    if bias is not None and (bias.dtype != torch.float32 or bias.device != x.device):
        return False
    return not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, k: int, normalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts, weights and scores as in `Routing`."""
    from openkda.ops.moe.triton import expert_launch as host

    run = host.route if goes_direct(x, weight, bias) else host.route_op
    result: tuple[Tensor, Tensor, Tensor] = run(x, weight, bias, k, normalize, scale)
    return result


def combine(y: Tensor, weights: Tensor, row: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_j weights[t, j] y[row[t k + j]] of y [P, D], summed in float32 -> [T, D]."""
    from openkda.ops.moe.triton import expert_launch as host

    return host.combine(y, weights, row, dtype)

"""Kernels on a GPU: the gated activations, one pass over gate and up and one back, which keeps nothing but them; and rows times
the packed matrices of their experts."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import goes_direct, triton_refusals

KINDS = {"swiglu": 0, "situ": 1, "situ-unbounded": 2}


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


def multiplies_packed(x: Tensor) -> bool:
    """Whether `packed_linear` takes these rows: it has no derivative."""
    return not refusals(x) and not (torch.is_grad_enabled() and x.requires_grad)


def packed_linear(x: Tensor, codes: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """Rows of x [M, D], sorted by expert, times the transposed matrix of their expert (codes, scale as in `PackedExperts`)."""
    from openkda.ops.moe.triton import launch

    run = launch.packed_linear if goes_direct(x, codes, scale, ends) else launch.packed_linear_op
    result: Tensor = run(x, codes, scale, ends)
    return result

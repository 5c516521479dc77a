"""Whether Triton kernels can run on a tensor, found out without importing triton."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor


_INSTALLED = importlib.util.find_spec("triton") is not None


def triton_refusals(x: Tensor) -> list[str]:
    """Why no Triton kernel can run on x; empty when one can. TRITON_INTERPRET=1 allows CPU tensors, except
    bfloat16, which the interpreter computes wrongly."""
    reasons = []
    if not _INSTALLED:
        reasons.append("triton is not installed")
    if not x.is_cuda:
        if os.environ.get("TRITON_INTERPRET", "0") != "1":
            reasons.append(f"needs CUDA tensors, received {x.device.type}")
        elif x.dtype == torch.bfloat16:
            reasons.append("the Triton interpreter computes bfloat16 wrongly")
    if x.dtype == torch.float64:
        reasons.append("float64 inputs")
    return reasons

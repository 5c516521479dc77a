"""The head's loss in plain torch, all logits at once: the truth on any device, and the CPU path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def refusals(x: Tensor) -> list[str]:
    """Runs everything."""
    return []


def run(h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """See `api.head_loss`; dtype: of the product."""
    logits = F.linear(h.to(dtype), weight.to(dtype))
    return F.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), targets, reduction="sum")

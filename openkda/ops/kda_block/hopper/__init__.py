"""One token of heads of 128 channels on Hopper, in Gluon: same call, same results as the portable kernel (`one.py`)."""

from __future__ import annotations

import torch

from openkda.ops.device.api import is_hopper

HEAD = 128
FEW = 132
"""Programs up to which a warp owns value channels, not keys (see `one.py`): one a processor. H200, 96 heads, us in a graph with
cold states, this layout, the other one and the portable kernel: batch 1 6.11, 7.27, 8.03; 8 33.1, 31.2, 33.6; 32 117.8, 108.5,
111.9; 256 905, 823, 840."""


def fits(device: torch.device, K: int, V: int) -> bool:
    """Whether the kernel can run there."""
    return K == HEAD and V == HEAD and device.type == "cuda" and is_hopper(device.index)

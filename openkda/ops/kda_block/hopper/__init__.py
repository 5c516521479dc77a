"""One token of heads of 128 channels on Hopper, in Gluon: same call, same results as the portable kernel (`one.py`)."""

from __future__ import annotations

import torch

from openkda.ops.device.api import is_hopper

HEAD = 128
FEW = 768
"""Programs up to which the layout for few of them wins. H200, 96 heads, us in a graph with cold states, it and the portable
kernel: batch 1 5.92 and 7.89, 8 33.0 and 33.5, 32 117.8 and 111.6, 256 905 and 838."""
WHOLE_ROWS = False
"""Whether more programs take the layout for many of them. Otherwise they take the portable kernel."""


def fits(device: torch.device, K: int, V: int, programs: int) -> bool:
    """Whether the kernel can run there and is the faster one."""
    return (
        K == HEAD
        and V == HEAD
        and (WHOLE_ROWS or programs <= FEW)
        and device.type == "cuda"
        and is_hopper(device.index)
    )

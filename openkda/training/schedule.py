"""Learning rate: linear warm-up, then half a cosine (Kimi K3 report: 1 % warm-up; cosine beat a constant rate with decay)."""

from __future__ import annotations

import math


def rate(done: float, *, warmup: float, end: float) -> float:
    """Factor on the peak learning rate when `done` in [0, 1] of the run lies behind.

    Rises from 0 to 1 over `warmup`, then falls to `end`; past 1 it stays at `end`.
    """
    if done < warmup:
        return done / warmup
    position = min(1.0, (done - warmup) / (1.0 - warmup))
    return end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * position))

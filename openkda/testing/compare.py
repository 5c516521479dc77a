"""Error measures, and a report that names the first bad coordinate instead of a wall of numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def rel(x: Tensor, ref: Tensor) -> float:
    """|x - ref| / |ref| in the Frobenius norm, in float64; 0 for two zeros, inf where x is not finite."""
    x, ref = x.detach().double().cpu(), ref.detach().double().cpu()
    if x.shape != ref.shape:
        raise ValueError(f"rel: expected shape {list(ref.shape)}, received {list(x.shape)}")
    if not bool(torch.isfinite(x).all()):
        return float("inf")
    gap, size = (x - ref).norm().item(), ref.norm().item()
    return gap / size if size > 0 else (0.0 if gap == 0 else float("inf"))


def rel_grad(x: Tensor, ref: Tensor, dq: Tensor) -> float:
    """Gradient error |x - ref| / max(|ref|, 1e-3 |dq|): a gradient that is truly nothing is no failure."""
    if not bool(torch.isfinite(x).all()):
        return float("inf")
    gap = (x.detach().double().cpu() - ref.detach().double().cpu()).norm().item()
    floor = max(ref.detach().double().norm().item(), 1e-3 * dq.detach().double().norm().item())
    return gap / floor if floor > 0 else (0.0 if gap == 0 else float("inf"))


def first_bad(x: Tensor, ref: Tensor, tolerance: float) -> str:
    """Where x first leaves ref by more than tolerance * max|ref|, in row-major order; "" when nowhere."""
    x, ref = x.detach().double().cpu(), ref.detach().double().cpu()
    limit = tolerance * max(ref.abs().max().item(), 1e-30) if ref.numel() else 0.0
    bad = (~((x - ref).abs() <= limit)).nonzero()
    if not bad.numel():
        return ""
    at = tuple(bad[0].tolist())
    share = bad.shape[0] / x.numel()
    return f"first bad at {list(at)}: {x[at].item():.6g}, expected {ref[at].item():.6g} ({share:.1%} of entries bad)"


def check_close(name: str, x: Tensor, ref: Tensor, limit: float) -> None:
    """Raise AssertionError, with the error and the first bad coordinate, unless rel(x, ref) <= limit."""
    error = rel(x, ref)
    if not error <= limit:
        raise AssertionError(f"{name}: relative error {error:.3g} above {limit:.3g}; {first_bad(x, ref, limit)}")

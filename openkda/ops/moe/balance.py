"""Quantile Balancing: the selection bias that gives every expert the same load, by one order statistic an expert.

m tokens, E experts, k chosen: the target load is q = m k / E. Token i prefers expert j to its (k+1)-th choice, whose
biased score is the cutoff alpha_i, where s_ij + b_j > alpha_i. So the bias at which exactly q tokens do is the (q+1)-th
smallest of r_ij = alpha_i - s_ij (raw score, not biased), and only differences between experts matter:

    b_j = (q+1)-th smallest over i of r_ij,      b <- b - mean(b)

The histogram form counts r in equal bins instead. r lies in [min b - 1, max b + 1], so the counts of micro-batches and
ranks simply add, in integers, and the result is within one bin's width. Source: Kimi K3 report, section 2.3.3, appendix D.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BINS = 1000
"""Bins of the published histogram: widths of 0.002 to 0.004."""


def quantile_bias(
    scores: Float[Tensor, "T E"], cutoff: Float[Tensor, " T"], k: int, *, mask: Bool[Tensor, " T"] | None = None
) -> Float[Tensor, " E"]:
    """Exact form, from the tokens at hand.

    Args:
        scores: [T, E] raw scores. cutoff: [T], the (k+1)-th largest biased score (`route(..., with_cutoff=True)`).
        k: experts a token. mask: [T], True = counted; padding is False.
    Returns: [E] centred bias in the scores' dtype. Raises: ValueError where no token is counted.
    """
    margins = cutoff.unsqueeze(-1) - scores
    if mask is not None:
        margins = margins[mask]
    m, E = margins.shape
    if m == 0:
        raise ValueError("quantile_bias: expected at least one counted token, received none")
    bias = margins.kthvalue(m * k // E + 1, dim=0).values
    return bias - bias.mean()


def margin_histogram(
    scores: Float[Tensor, "T E"],
    cutoff: Float[Tensor, " T"],
    bias: Float[Tensor, " E"],
    *,
    bins: int = BINS,
    mask: Bool[Tensor, " T"] | None = None,
) -> Int[Tensor, "E bins"]:
    """Counts of alpha_i - s_ij for `histogram_bias`; add them over micro-batches and ranks that used the same `bias`.

    Args: as in `quantile_bias`; bias: [E], the one that the cutoffs were taken with.
    Returns: [E, bins] int64. Integer sums: bit-equal in any order.
    """
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, received {bins}")
    low, width = _range(bias, bins)
    place = ((cutoff.unsqueeze(-1) - scores - low) / width).long().clamp_(0, bins - 1)
    E = scores.shape[1]
    place += torch.arange(E, device=place.device) * bins
    counted = torch.ones_like(place) if mask is None else mask.long().unsqueeze(-1).expand(place.shape)
    counts = torch.zeros(E * bins, dtype=torch.int64, device=place.device)
    return counts.scatter_add_(0, place.flatten(), counted.flatten()).view(E, bins)


def histogram_bias(counts: Int[Tensor, "E bins"], bias: Float[Tensor, " E"], k: int) -> Float[Tensor, " E"]:
    """Next bias from the counts: the first bin that reaches q, interpolated inside it, centred.

    Args: counts: sums of `margin_histogram`. bias: the one they were taken with. k: experts a token.
    Returns: [E] in bias's dtype; bias itself where nothing was counted.
    """
    E, bins = counts.shape
    low, width = _range(bias, bins)
    pairs = counts.sum(-1, keepdim=True) * k  # q = pairs / E
    reached = counts.cumsum(-1)
    place = torch.searchsorted(reached, ((pairs + E - 1) // E).clamp(min=1)).clamp(max=bins - 1)
    inside = counts.gather(-1, place)
    before = reached.gather(-1, place) - inside
    share = ((pairs - before * E) / (inside.clamp(min=1) * E)).clamp(0, 1)
    new = (low + (place + share) * width).squeeze(-1)
    return torch.where(counts.any(), new - new.mean(), bias)


def _range(bias: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    low, high = bias.min() - 1, bias.max() + 1
    return low, (high - low) / bins

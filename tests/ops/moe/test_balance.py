"""Quantile Balancing: its defining property, the histogram form, and how fast it balances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openkda.ops.moe.api import select_experts
from openkda.ops.moe.balance import histogram_bias, margin_histogram, quantile_bias


def skewed(T: int, E: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.sigmoid(torch.randn(T, E, generator=g) + 0.5 * torch.randn(E, generator=g))


def loads(experts: Tensor, E: int) -> Tensor:
    return torch.bincount(experts.flatten(), minlength=E)


@pytest.mark.parametrize(("T", "E", "k"), [(512, 16, 2), (1000, 12, 5), (96, 24, 1)])
def test_at_the_old_cutoffs_every_expert_gets_exactly_its_share(T: int, E: int, k: int) -> None:
    scores = skewed(T, E)
    r = select_experts(scores, torch.zeros(E), k, with_cutoff=True)
    assert r.cutoff is not None
    # Before centring, a common shift is what the mean took away: undo it with the order statistic itself.
    margins = r.cutoff[:, None] - scores
    raw = margins.sort(0).values[T * k // E]
    bias = quantile_bias(scores, r.cutoff, k)
    assert torch.allclose(bias, raw - raw.mean(), atol=1e-6)
    # A token whose cutoff is expert j itself has margin 0 exactly (the bias is zero): ties that no bias can split.
    below, up_to = (margins < raw).sum(0), (margins <= raw).sum(0)
    assert ((below <= T * k // E) & (T * k // E < up_to)).all()
    assert (below == T * k // E)[raw != 0].all() and bool((raw != 0).any())


def test_eight_tokens_four_experts() -> None:
    """The shape of the report's figure 5: m = 8, n = 4, k = 1; loads (4, 3, 1, 0) become (2, 2, 2, 2) in one update."""
    scores = torch.tensor(
        [
            [0.90, 0.30, 0.20, 0.10],
            [0.85, 0.35, 0.25, 0.15],
            [0.80, 0.40, 0.60, 0.20],
            [0.75, 0.35, 0.30, 0.60],
            [0.30, 0.90, 0.20, 0.10],
            [0.35, 0.85, 0.25, 0.15],
            [0.40, 0.75, 0.30, 0.60],
            [0.20, 0.30, 0.90, 0.25],
        ]
    )
    r = select_experts(scores, torch.zeros(4), 1, with_cutoff=True)
    assert loads(r.experts, 4).tolist() == [4, 3, 1, 0]
    assert r.cutoff is not None
    after = select_experts(scores, quantile_bias(scores, r.cutoff, 1), 1)
    assert loads(after.experts, 4).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("form", ["exact", "histogram"])
def test_balances_skewed_scores_within_five_updates(form: str) -> None:
    T, E, k = 4096, 64, 4
    scores, bias = skewed(T, E), torch.zeros(E)
    target = T * k / E
    ratios = []
    for _ in range(6):
        r = select_experts(scores, bias, k, with_cutoff=True)
        assert r.cutoff is not None
        ratios.append(loads(r.experts, E).max().item() / target)
        if form == "exact":
            bias = quantile_bias(scores, r.cutoff, k)
        else:
            bias = histogram_bias(margin_histogram(scores, r.cutoff, bias), bias, k)
    assert ratios[0] > 5 and ratios[5] < 1.10, ratios


@pytest.mark.parametrize("bins", [50, 1000])
def test_histogram_is_within_one_bin_of_exact(bins: int) -> None:
    T, E, k = 2048, 32, 4
    scores = skewed(T, E, 1)
    bias = torch.randn(E, generator=torch.Generator().manual_seed(2)) * 0.1
    bias -= bias.mean()
    r = select_experts(scores, bias, k, with_cutoff=True)
    assert r.cutoff is not None
    width = (bias.max() - bias.min() + 2).item() / bins
    got = histogram_bias(margin_histogram(scores, r.cutoff, bias, bins=bins), bias, k)
    gap = (got - quantile_bias(scores, r.cutoff, k)).abs().max().item()
    assert gap <= 2 * width  # one bin for the quantile, one for the mean that is taken off
    assert abs(got.mean().item()) < 1e-6


def test_counts_add_over_micro_batches_and_leave_padding_out() -> None:
    scores, bias = skewed(300, 8), torch.linspace(-0.2, 0.2, 8)
    r = select_experts(scores, bias, 2, with_cutoff=True)
    assert r.cutoff is not None
    whole = margin_histogram(scores, r.cutoff, bias)
    parts = sum(margin_histogram(scores[i : i + 70], r.cutoff[i : i + 70], bias) for i in range(0, 300, 70))
    assert torch.equal(whole, parts) and (whole.sum(-1) == 300).all()
    mask = torch.arange(300) < 100
    assert torch.equal(
        margin_histogram(scores, r.cutoff, bias, mask=mask), margin_histogram(scores[:100], r.cutoff[:100], bias)
    )
    assert torch.equal(quantile_bias(scores, r.cutoff, 2, mask=mask), quantile_bias(scores[:100], r.cutoff[:100], 2))


def test_nothing_counted() -> None:
    bias = torch.tensor([0.3, -0.3])
    assert torch.equal(histogram_bias(torch.zeros(2, 10, dtype=torch.int64), bias, 1), bias)
    with pytest.raises(ValueError, match="at least one counted token"):
        quantile_bias(torch.rand(3, 2), torch.rand(3), 1, mask=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="bins: expected at least 1, received 0"):
        margin_histogram(torch.rand(4, 3), torch.zeros(4), torch.zeros(3), bins=0)

"""The learning rate over a run."""

from __future__ import annotations

from itertools import pairwise

import pytest

from openkda.training.schedule import rate


def test_warm_up_then_cosine() -> None:
    assert rate(0.0, warmup=0.1, end=0.0) == 0.0
    assert rate(0.05, warmup=0.1, end=0.0) == pytest.approx(0.5)
    assert rate(0.1, warmup=0.1, end=0.0) == 1.0
    assert rate(0.55, warmup=0.1, end=0.2) == pytest.approx(0.6)  # half-way down from 1 to 0.2
    assert rate(1.0, warmup=0.1, end=0.2) == rate(7.0, warmup=0.1, end=0.2) == pytest.approx(0.2)
    assert rate(0.0, warmup=0.0, end=0.0) == 1.0


def test_it_only_falls_after_the_warm_up() -> None:
    values = [rate(i / 1000, warmup=0.01, end=0.05) for i in range(10, 1001)]
    assert all(a > b for a, b in pairwise(values)) and values[0] == 1.0

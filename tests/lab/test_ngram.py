from __future__ import annotations

import math

import numpy as np
import pytest

from openkda.lab.ngram import NGram


def test_trigram_by_hand() -> None:
    """abcabd: context ab is followed once by c and once by d; bc by a; ca by b."""
    model = NGram(np.array([0, 1, 2, 0, 1, 3]), vocab_size=4)
    assert model.loss(np.array([0, 1, 2])) == pytest.approx(-math.log((1 + 1) / (2 + 4)))
    assert model.loss(np.array([1, 2, 0])) == pytest.approx(-math.log((1 + 1) / (1 + 4)))
    assert model.loss(np.array([3, 3, 3])) == pytest.approx(math.log(4))
    both = model.loss(np.array([0, 1, 2, 0]))
    assert both == pytest.approx((math.log(6 / 2) + math.log(5 / 2)) / 2)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_probabilities_of_every_context_sum_to_one(n: int) -> None:
    rng = np.random.default_rng(0)
    model = NGram(rng.integers(0, 5, 200), vocab_size=5, n=n)
    for _ in range(10):
        context = rng.integers(0, 5, n - 1)
        total = sum(math.exp(-model.loss(np.append(context, x))) for x in range(5))
        assert total == pytest.approx(1)


def test_counts_direct() -> None:
    """Against counting with a dictionary."""
    rng = np.random.default_rng(1)
    train, held = rng.integers(0, 6, 500), rng.integers(0, 6, 100)
    seen: dict[tuple[int, ...], int] = {}
    for i in range(2, len(train)):
        for key in (tuple(train[i - 2 : i + 1]), tuple(train[i - 2 : i])):
            seen[key] = seen.get(key, 0) + 1
    nats = [
        -math.log((seen.get(tuple(held[i - 2 : i + 1]), 0) + 1) / (seen.get(tuple(held[i - 2 : i]), 0) + 6))
        for i in range(2, len(held))
    ]
    assert NGram(train, vocab_size=6).loss(held) == pytest.approx(sum(nats) / len(nats))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="at least n = 3, received 2"):
        NGram(np.array([1, 2]), vocab_size=4)
    with pytest.raises(ValueError, match=r"\[0, 4\), received 0..9"):
        NGram(np.array([0, 1, 9]), vocab_size=4)
    with pytest.raises(ValueError, match="at most"):
        NGram(np.array([0, 1, 9]), vocab_size=1000)
    with pytest.raises(ValueError, match="positive"):
        NGram(np.array([0, 1, 9]), vocab_size=10, n=0)

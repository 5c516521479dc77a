"""An n-gram model with add-one smoothing: what counting alone can do on the same text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_CELLS = 1 << 26  # counts of 4 bytes: 256 MiB


class NGram:
    """p(x | the n - 1 tokens before) = (count(context, x) + 1) / (count(context) + vocabulary).

    tokens: [T] ids to count. Raises ValueError for fewer than n tokens, ids outside the vocabulary, or a table of more
    than 64 M counts (bytes allow n = 3).
    """

    def __init__(self, tokens: NDArray[np.integer], *, vocab_size: int, n: int = 3) -> None:
        if n < 1 or vocab_size < 1:
            raise ValueError(f"n, vocab_size: expected positive integers, received {n}, {vocab_size}")
        if vocab_size**n > MOST_CELLS:
            raise ValueError(
                f"vocab_size ** n: expected at most {MOST_CELLS} counts, received {vocab_size} ** {n} = {vocab_size**n}"
            )
        self.n, self.vocab_size = n, vocab_size
        counts = np.bincount(self._cells(tokens), minlength=vocab_size**n)
        self._counts = counts.reshape(-1, vocab_size).astype(np.int32)
        self._totals = self._counts.sum(1)

    def loss(self, tokens: NDArray[np.integer]) -> float:
        """Mean nats per token over tokens[n-1:], each predicted from the n - 1 before it."""
        context, target = np.divmod(self._cells(tokens), self.vocab_size)
        hits = self._counts[context, target] + 1.0
        return float(np.mean(np.log(self._totals[context] + float(self.vocab_size)) - np.log(hits)))

    def _cells(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """The n-gram that ends at each token from the n-th on, as one number."""
        if len(tokens) < self.n:
            raise ValueError(f"tokens: expected at least n = {self.n}, received {len(tokens)}")
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"tokens: expected ids in [0, {self.vocab_size}), received {ids.min()}..{ids.max()}")
        cells = np.zeros(len(ids) - self.n + 1, dtype=np.int64)
        for i in range(self.n):
            cells = cells * self.vocab_size + ids[i : len(ids) - self.n + 1 + i]
        return cells

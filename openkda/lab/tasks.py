"""Synthetic sequences with known answers: what a memory of fixed size can and cannot recall.

    palindrome   x1 x2 ... xn <sep>            answer   xn ... x2 x1
    mqar         k1 v1 k2 v2 ... <sep> k7 k2   answer   the value that stood beside each queried key
    stack        <push> s x   <pop> s          answer   the element that this pop takes from stack s

Every batch follows from its torch.Generator alone. Source: Kimi Linear report (arXiv 2510.26692), section 5.1; multi-query
associative recall: Arora et al. (arXiv 2312.04927).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100  # a target that is not scored (the default ignore_index of torch's cross_entropy)


@dataclass(frozen=True)
class TaskBatch:
    """input_ids [B, T] int64; targets [B, T] int64: what must be predicted at each place, IGNORE where nothing is asked."""

    input_ids: Tensor
    targets: Tensor
    vocab_size: int

    def accuracy(self, logits: Tensor) -> float:
        """Share of the asked places where the most likely token of logits [B, T, vocab] is right."""
        asked = self.targets != IGNORE
        return float((logits.argmax(-1)[asked] == self.targets[asked]).float().mean())


def palindrome(batch: int, length: int, *, symbols: int = 64, rng: torch.Generator) -> TaskBatch:
    """`length` random symbols, a separator, and their reverse, of which every symbol is asked. T = 2 * length."""
    _positive(batch=batch, length=length, symbols=symbols)
    x = torch.randint(symbols, (batch, length), generator=rng)
    sequence = torch.cat([x, torch.full((batch, 1), symbols), x.flip(1)], dim=1)
    targets = sequence[:, 1:].clone()
    targets[:, :length] = IGNORE
    return TaskBatch(sequence[:, :-1], targets, symbols + 1)


def mqar(batch: int, pairs: int, *, queries: int | None = None, symbols: int = 64, rng: torch.Generator) -> TaskBatch:
    """`pairs` keys with values, a separator, then `queries` (default: all) of the keys in random order.

    `symbols` keys and as many values exist; the keys of a sequence are distinct. T = 2 * pairs + 1 + queries.
    """
    queries = pairs if queries is None else queries
    _positive(batch=batch, pairs=pairs, queries=queries, symbols=symbols)
    if not queries <= pairs <= symbols:
        raise ValueError(f"mqar: expected queries <= pairs <= symbols, received {queries}, {pairs}, {symbols}")
    keys = _shuffled(batch, symbols, rng)[:, :pairs]
    values = symbols + torch.randint(symbols, (batch, pairs), generator=rng)
    asked = _shuffled(batch, pairs, rng)[:, :queries]
    told = torch.stack([keys, values], dim=2).flatten(1)
    separator = torch.full((batch, 1), 2 * symbols)
    input_ids = torch.cat([told, separator, keys.gather(1, asked)], dim=1)
    targets = torch.full_like(input_ids, IGNORE)
    targets[:, 2 * pairs + 1 :] = values.gather(1, asked)
    return TaskBatch(input_ids, targets, 2 * symbols + 1)


def stack(batch: int, operations: int, *, stacks: int = 64, symbols: int = 64, rng: torch.Generator) -> TaskBatch:
    """Pushes and pops on `stacks` last-in-first-out stacks, three tokens each; asked is the element of every pop.

    An operation is a push or a pop with equal chance (a push where all stacks are empty). T = 3 * operations - 1.
    """
    _positive(batch=batch, operations=operations, stacks=stacks, symbols=symbols)
    push, pop, first_symbol = 0, 1, 2 + stacks
    rows, asked = [], []
    for seed in torch.randint(2**62, (batch,), generator=rng).tolist():
        dice, held = random.Random(seed), {}  # type: random.Random, dict[int, list[int]]
        row: list[int] = []
        ask: list[bool] = []
        for _ in range(operations):
            filled = [s for s, elements in held.items() if elements]
            if filled and dice.random() < 0.5:
                s = dice.choice(filled)
                row += [pop, 2 + s, held[s].pop()]
                ask += [False, False, True]
            else:
                s, x = dice.randrange(stacks), first_symbol + dice.randrange(symbols)
                held.setdefault(s, []).append(x)
                row += [push, 2 + s, x]
                ask += [False, False, False]
        rows.append(row)
        asked.append(ask)
    sequence = torch.tensor(rows)
    targets = sequence[:, 1:].masked_fill(~torch.tensor(asked)[:, 1:], IGNORE)
    return TaskBatch(sequence[:, :-1], targets, first_symbol + symbols)


def _shuffled(batch: int, n: int, rng: torch.Generator) -> Tensor:
    """A random order of 0..n-1 in each row."""
    return torch.rand(batch, n, generator=rng, dtype=torch.float64).argsort(1)


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}: expected a positive integer, received {value}")

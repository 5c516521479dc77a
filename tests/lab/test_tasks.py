"""Every answer follows from the sequence: each task is solved by its definition, and its seed decides all of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from openkda.lab.tasks import IGNORE, TaskBatch, mqar, palindrome, stack


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_palindrome() -> None:
    task = palindrome(5, 9, symbols=20, rng=rng())
    assert task.input_ids.shape == task.targets.shape == (5, 18)
    for row, targets in zip(task.input_ids.tolist(), task.targets.tolist(), strict=True):
        assert row[9] == 20 and targets[:9] == [IGNORE] * 9
        assert targets[9:] == row[:9][::-1]


def test_mqar() -> None:
    task = mqar(6, 11, queries=7, symbols=30, rng=rng())
    assert task.input_ids.shape == (6, 2 * 11 + 1 + 7)
    orders = set()
    for row, targets in zip(task.input_ids.tolist(), task.targets.tolist(), strict=True):
        memory = dict(zip(row[0:22:2], row[1:22:2], strict=True))
        assert len(memory) == 11 and row[22] == 60
        assert targets[:23] == [IGNORE] * 23
        assert targets[23:] == [memory[key] for key in row[23:]] and len(set(row[23:])) == 7
        orders.add(tuple(row[0:22:2].index(key) for key in row[23:]))
    assert len(orders) == 6


def test_stack() -> None:
    task = stack(4, 80, stacks=3, symbols=10, rng=rng())
    assert task.input_ids.shape == (4, 239) and task.vocab_size == 15
    for row, targets in zip(task.input_ids.tolist(), task.targets.tolist(), strict=True):
        held: dict[int, list[int]] = {}
        whole = [*row, targets[-1] if targets[-1] != IGNORE else 5]
        pops = 0
        for i in range(0, 240, 3):
            kind, s, x = whole[i : i + 3]
            assert targets[i] == IGNORE and (i + 2 == 239 or targets[i + 2] == IGNORE)
            if kind == 0:
                held.setdefault(s, []).append(x)
                assert targets[i + 1] == IGNORE
            else:
                assert targets[i + 1] == held[s].pop()
                pops += 1
        assert pops > 20


@pytest.mark.parametrize("make", [palindrome, mqar, stack])
def test_seed_decides_everything(make: object) -> None:
    first, again, other = (make(3, 12, rng=rng(seed)) for seed in (1, 1, 2))  # type: ignore[operator]
    assert torch.equal(first.input_ids, again.input_ids) and torch.equal(first.targets, again.targets)
    assert not torch.equal(first.input_ids, other.input_ids)
    assert int(first.input_ids.min()) >= 0 and int(first.input_ids.max()) < first.vocab_size


def test_accuracy_counts_asked_places_only() -> None:
    task = TaskBatch(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[IGNORE, 2, IGNORE, 1]]), 3)
    logits = F.one_hot(torch.tensor([[0, 2, 0, 0]]), 3).float()
    assert task.accuracy(logits) == 0.5


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="length: expected a positive"):
        palindrome(1, 0, rng=rng())
    with pytest.raises(ValueError, match="queries <= pairs <= symbols, received 4, 5, 4"):
        mqar(1, 5, queries=4, symbols=4, rng=rng())
    with pytest.raises(ValueError, match="stacks: expected a positive"):
        stack(1, 5, stacks=0, rng=rng())

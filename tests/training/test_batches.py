"""Order and packing: every window once an epoch, a pure function of (seed, step), documents kept apart."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from openkda.models.tokenizer import ByteTokenizer
from openkda.training.batches import Batches, pack, permute
from openkda.training.corpus import find_files
from openkda.training.token_file import TokenFile, write_token_file


@pytest.fixture(scope="module")
def tokens(text: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return write_token_file(tmp_path_factory.mktemp("tokens") / "t", find_files([text]), ByteTokenizer())


def read(path: str, step: int) -> list[int]:
    """In a worker process: one batch of its own reader."""
    batches = Batches(TokenFile(path), seq_len=24, batch_size=4, seed=3)
    return batches.micro_batch(step, 0, 1).input_ids.flatten().tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097])
def test_permutation(size: int) -> None:
    orders = [permute(np.arange(size, dtype=np.uint64), size, np.uint64(key)).tolist() for key in (0, 1, 2**63)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert size < 10 or len({tuple(order) for order in orders}) == 3


def test_permutation_looks_random() -> None:
    """Neighbours land far apart on average (a third of the size), and few stay where they were."""
    size = 10_000
    order = permute(np.arange(size, dtype=np.uint64), size, np.uint64(7)).astype(np.int64)
    assert abs(np.abs(np.diff(order)).mean() / size - 1 / 3) < 0.02
    assert (order == np.arange(size)).sum() < 10


@pytest.mark.parametrize("seq_len", [7, 24, 100])
def test_an_epoch_visits_each_window_once(tokens: TokenFile, seq_len: int) -> None:
    batches = Batches(tokens, seq_len=seq_len, batch_size=3, seed=5)
    shifts = set()
    for epoch in range(3):
        samples = np.arange(epoch * batches.windows, (epoch + 1) * batches.windows, dtype=np.uint64)
        begins = np.sort(batches._begins(samples))
        assert np.all(np.diff(begins) == seq_len)
        assert begins[0] >= 0 and begins[-1] + seq_len + 1 <= len(tokens)
        shifts.add(int(begins[0]))
    assert len(shifts) > 1


def test_order_depends_on_seed_and_step_alone(tokens: TokenFile) -> None:
    def ids(batches: Batches, step: int) -> list[int]:
        return batches.micro_batch(step, 0, 1).input_ids.flatten().tolist()

    first = Batches(tokens, seq_len=24, batch_size=4, seed=3)
    forwards = [ids(first, step) for step in range(6)]
    fresh = Batches(tokens, seq_len=24, batch_size=4, seed=3)
    assert [ids(fresh, step) for step in reversed(range(6))] == forwards[::-1]
    assert ids(Batches(tokens, seq_len=24, batch_size=4, seed=4), 0) != forwards[0]
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        assert list(pool.map(read, [str(tokens.path)] * 6, range(6))) == forwards


def test_accumulation_splits_the_same_batch(tokens: TokenFile) -> None:
    batches = Batches(tokens, seq_len=24, batch_size=4, seed=3)
    whole = batches.micro_batch(2, 0, 1)
    for count in (2, 4):
        parts = [batches.micro_batch(2, i, count) for i in range(count)]
        assert torch.equal(torch.cat([p.input_ids for p in parts], 1), whole.input_ids)
        assert torch.equal(torch.cat([p.targets for p in parts], 1), whole.targets)


def test_documents_and_windows_are_apart(tokens: TokenFile) -> None:
    """Inside the pack every sequence is a stretch of one document, and each eos in the input begins one."""
    starts = set(tokens.starts.tolist())
    begins = np.array([0, int(tokens.starts[2]) - 20, int(tokens.starts[5])])
    batch = pack(tokens, begins, 100)
    borders = batch.cu_seqlens.tolist()
    assert borders[0] == 0 and borders[-1] == 300 and {100, 200} <= set(borders) and len(borders) > 4
    assert batch.cu_seqlens.dtype == torch.int32 and batch.input_ids.dtype == torch.int64
    positions = np.concatenate([np.arange(b, b + 100) for b in begins])
    for i, position in enumerate(positions):
        assert int(batch.input_ids[0, i]) == int(tokens.tokens[position])
        assert int(batch.targets[0, i]) == int(tokens.tokens[position + 1])
        assert (i in borders) == (int(position) in starts or i % 100 == 0)


def test_too_little_text(tokens: TokenFile) -> None:
    with pytest.raises(ValueError, match=rf"expected at least 100001 tokens .* received {len(tokens)}"):
        Batches(tokens, seq_len=100_000, batch_size=1, seed=0)
    exact = Batches(tokens, seq_len=len(tokens) - 1, batch_size=2, seed=0)
    assert exact.micro_batch(0, 0, 1).input_ids.shape == (1, 2 * (len(tokens) - 1))

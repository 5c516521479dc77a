"""The longest sequence of a pack: the right one after every change, and read no more often than that."""

from __future__ import annotations

import pytest
import torch

from openkda.ops.packing import api
from openkda.ops.packing.api import declare_longest, longest_sequence, move_offsets


def test_it_is_read_once_from_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    original = api._read
    monkeypatch.setattr(api, "_read", lambda cu: (reads.append(1), original(cu))[1])
    cu = torch.tensor([0, 3, 10])
    assert [longest_sequence(cu, 99) for _ in range(3)] == [7, 7, 7] and len(reads) == 1
    cu[1] = 1
    assert longest_sequence(cu, 99) == 9 and longest_sequence(cu.clone(), 99) == 9 and len(reads) == 3
    with torch.inference_mode():
        cu = torch.tensor([0, 3, 10])
        assert longest_sequence(cu, 99) == 7
        cu[1] = 1
        assert longest_sequence(cu, 99) == 9


def test_a_graph_keeps_no_length_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known from the calls before a capture or not: its replays have other offsets. What was declared holds for all of them."""
    cu, told = torch.tensor([0, 3, 10]), torch.tensor([0, 3, 10])
    assert longest_sequence(cu, 99) == 7
    declare_longest(told, 8)
    monkeypatch.setattr(api, "_is_captured", lambda t: True)
    assert longest_sequence(cu, 99) == 99 and longest_sequence(told, 99) == 8
    monkeypatch.undo()
    told[1] = 2
    assert longest_sequence(cu, 99) == 7 and longest_sequence(told, 99) == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offsets_of_the_host_are_never_read_back() -> None:
    """Behind work that takes 0.2 s and more: the copy and the length do not wait for it."""
    busy = torch.randn(8192, 8192, device="cuda")
    cu = torch.tensor([0, 3, 10, 11], dtype=torch.int32)
    move_offsets(cu, torch.device("cuda"))  # pinned memory is found once
    torch.cuda.synchronize()
    for _ in range(40):
        busy = torch.mm(busy, busy)
    done = torch.cuda.Event()
    done.record()
    moved = move_offsets(cu, torch.device("cuda"))
    assert longest_sequence(moved, 99) == 7 and not done.query(), "the host has waited for the GPU"
    assert moved.tolist() == cu.tolist()
    moved[1] = 1
    assert longest_sequence(moved, 99) == 9

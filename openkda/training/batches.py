"""Batches as a pure function of (seed, step): nothing is remembered, so resuming replays nothing.

The token file is cut into windows of `seq_len` tokens. An epoch visits every window once, in an order that is a keyed
permutation computed in place (no list of windows, however large the corpus), and shifts all cuts by a number of its
own, so that later epochs see other borders. The windows of a micro-batch lie behind one another in one pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openkda.ops.packing.api import move, move_offsets
from openkda.training.token_file import TokenFile


@dataclass
class Batch:
    """One pack.

    input_ids, targets: [1, N] int64; targets are the tokens one position later.
    cu_seqlens: [M + 1] int32: a sequence begins with every window and with every document inside one.
    """

    input_ids: Tensor
    targets: Tensor
    cu_seqlens: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.input_ids, self.targets, self.cu_seqlens

    def to(self, device: torch.device) -> Batch:
        """On `device`, in order behind what it has to do; the host goes on at once."""
        return Batch(move(self.input_ids, device), move(self.targets, device), move_offsets(self.cu_seqlens, device))


class Batches:
    """Training batches of `batch_size` windows. Raises ValueError if the file holds not even one window."""

    def __init__(self, tokens: TokenFile, *, seq_len: int, batch_size: int, seed: int) -> None:
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        need_tokens(tokens, seq_len + 1, f"one window of seq_len = {seq_len}")
        self.windows = max(1, (len(tokens) - seq_len) // seq_len)

    def micro_batch(self, step: int, index: int, count: int) -> Batch:
        """Part `index` of `count` of the batch of 0-based `step`; `count` divides batch_size."""
        each = self.batch_size // count
        first = step * self.batch_size + index * each
        return pack(self.tokens, self._begins(np.arange(first, first + each, dtype=np.uint64)), self.seq_len)

    def _begins(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Where the windows of these samples (numbered over the whole training) begin."""
        epochs, places = np.divmod(samples, np.uint64(self.windows))
        begins = np.empty(len(samples), dtype=np.int64)
        slack = len(self.tokens) - self.windows * self.seq_len
        for epoch in np.unique(epochs):
            key = _mix(np.uint64(self.seed) ^ _mix(epoch + np.uint64(1)))
            here = epochs == epoch
            shift = int(key % np.uint64(slack))
            begins[here] = permute(places[here], self.windows, key).astype(np.int64) * self.seq_len + shift
        return begins


def pack(tokens: TokenFile, begins: NDArray[np.int64], seq_len: int) -> Batch:
    """The windows [b, b + seq_len) for b in `begins`, with their document borders."""
    rows = np.stack([np.asarray(tokens.tokens[b : b + seq_len + 1], dtype=np.int64) for b in begins])
    borders = [0]
    for row, begin in enumerate(begins):
        inside = tokens.starts_between(int(begin), int(begin) + seq_len) - begin + row * seq_len
        borders += [*inside.tolist(), (row + 1) * seq_len]
    return Batch(
        input_ids=torch.from_numpy(np.ascontiguousarray(rows[:, :-1]).reshape(1, -1)),
        targets=torch.from_numpy(np.ascontiguousarray(rows[:, 1:]).reshape(1, -1)),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
    )


def need_tokens(tokens: TokenFile, least: int, purpose: str) -> None:
    """ValueError unless the file holds `least` tokens."""
    if len(tokens) < least:
        raise ValueError(f"data: expected at least {least} tokens for {purpose}, received {len(tokens)}")


def permute(index: NDArray[np.uint64], size: int, key: np.uint64) -> NDArray[np.uint64]:
    """A permutation of 0..size-1 picked by `key`, evaluated at `index`.

    A Feistel network of six rounds is a bijection on the even-bit power of two above `size`; values that land past
    `size` are sent through again until they fall inside (cycle walking), which keeps it a bijection.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    out = index.copy()
    todo = np.ones(len(out), dtype=bool)
    while todo.any():
        left, right = out[todo] >> shift, out[todo] & mask
        for step in range(6):
            left, right = right, left ^ (_mix(right ^ _mix(key + np.uint64(step))) & mask)
        out[todo] = (left << shift) | right
        todo[todo] = out[todo] >= size
    return out


def _mix(value: Any) -> Any:
    """The finaliser of SplitMix64 on uint64 scalars or arrays: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        value = (value + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(0xFFFFFFFFFFFFFFFF)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))

"""Which token lies in which chunk: sequences of any lengths become blocks of equal shape that fit the cache.

Tokens are rows of [R, ...]; a sequence is a span of rows. Sequences with the same number of chunks go side by side, and a
block of them is worked off in segments of a few chunks, so that the working set stays near the second-level cache (on one
core an elementwise pass runs 2.5x faster over 0.5 MB than over 2 MB) and memory does not grow with T.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
TILE = 16
CORE_BYTES, GPU_BYTES, SMALL_BYTES = 1 << 19, 1 << 26, 1 << 18
"""Of one [tokens, HV, K] tensor of a segment: about the cache of a core, times torch's threads; on a GPU enough to fill it."""


def segment_bytes(total: int, device: str) -> int:
    """total: bytes of the call's whole [tokens, HV, K] tensor. A segment takes 42 times its own bytes in forward and backward
    together and the call 8.5 times its total (measured), so half of the total keeps both under 32 times."""
    if device != "cpu":
        return GPU_BYTES
    return min(CORE_BYTES * torch.get_num_threads(), max(SMALL_BYTES, total // 2))


@dataclass(frozen=True)
class Block:
    """Sequences worked off side by side: all have the same number of chunks.

    sequences: which of the call's N. starts, lengths: their rows. chunk: tokens a chunk. chunks: chunks a sequence.
    step: chunks a segment.
    """

    sequences: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    chunk: int
    chunks: int
    step: int

    def segments(self) -> Iterator[Segment]:
        for first in range(0, self.chunks, self.step):
            yield Segment(self, first, min(self.step, self.chunks - first))


def make_plan(spans: list[tuple[int, int]], token_bytes: int, device: str = "cpu") -> list[Block]:
    """spans: (first row, end row) of every sequence; empty ones appear in no block. token_bytes: HV * K values."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for n, (start, end) in enumerate(spans):
        length = end - start
        if length:
            chunk = min(CHUNK, max(TILE, 1 << (length - 1).bit_length()))  # a short sequence needs no 64 rows
            alike[chunk, -(-length // chunk)].append(n)
    size = segment_bytes(sum(end - start for start, end in spans) * token_bytes, device)
    blocks = []
    for (chunk, chunks), members in alike.items():
        room = max(1, size // (chunk * token_bytes))  # chunks that fit a segment
        width = min(room, len(members))
        for at in range(0, len(members), width):
            part = tuple(members[at : at + width])
            starts = tuple(spans[n][0] for n in part)
            lengths = tuple(spans[n][1] - spans[n][0] for n in part)
            blocks.append(Block(part, starts, lengths, chunk, chunks, max(1, room // len(part))))
    return blocks


class Segment:
    """The rows of chunks [first, first + count) of a block, in order [count, sequence, token of the chunk].

    Rows past a sequence's end are padding: zeros when taken, dropped when put back.
    """

    def __init__(self, block: Block, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.shape = (count, len(block.starts), block.chunk)
        base = [s + first * block.chunk for s in block.starts]
        gaps = {b - a for a, b in itertools.pairwise(base)} or {0}
        whole = min(block.lengths) >= (first + count) * block.chunk
        self.regular = whole and len(gaps) == 1
        self.base, self.gap = base[0], min(gaps)
        if not self.regular:
            self._index(block)

    def _index(self, block: Block) -> None:
        chunk = block.chunk
        within = ((self.first + torch.arange(self.count, device="cpu")) * chunk)[:, None, None] + torch.arange(
            chunk, device="cpu"
        )
        real = (within < torch.tensor(block.lengths, device="cpu")[:, None]).flatten()
        rows = (within + torch.tensor(block.starts, device="cpu")[:, None]).flatten()
        self.real = real.nonzero().squeeze(1)
        self.padding = (~real).nonzero().squeeze(1)
        self.rows = rows[self.real]
        self.source = torch.where(real, rows, block.starts[0])

    def take(self, x: Tensor) -> Tensor:
        """[R, ...] -> [count, sequences, chunk, ...], a view where the rows lie regularly."""
        if self.regular:
            return self._view(x)
        y = x.index_select(0, self.source.to(x.device))
        return self.clear_padding(y.view(*self.shape, *x.shape[1:]))

    def put(self, y: Tensor, into: Tensor) -> None:
        """Write [count, sequences, chunk, ...] to the rows of `into` [R, ...]."""
        if self.regular:
            self._view(into).copy_(y)
        else:
            real, rows = self.real.to(y.device), self.rows.to(y.device)
            into[rows] = y.flatten(0, 2).index_select(0, real).to(into.dtype)

    def clear_padding(self, y: Tensor) -> Tensor:
        """Zero the padding rows of [count, sequences, chunk, ...] in place (contiguous in its first three axes)."""
        if not self.regular and self.padding.numel():
            y.view(-1, *y.shape[3:]).index_fill_(0, self.padding.to(y.device), 0)
        return y

    def _view(self, x: Tensor) -> Tensor:
        row = x.stride(0)
        strides = (self.shape[2] * row, self.gap * row, row, *x.stride()[1:])
        return x.as_strided((*self.shape, *x.shape[1:]), strides, x.storage_offset() + self.base * row)

"""Tapes of calls that need much memory for a short while: every launch says what is made before it and dropped behind it.

A `Tape` makes all memory of a call at its beginning. Of a backward that would be 20 instead of 14 times one of its inputs.
Where the workspace is small it is one block for the whole call, because an allocation takes a microsecond.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from openkda.ops.triton import launch as single
from openkda.ops.triton.launch import Launch, Noted, recorded
from openkda.ops.triton.parameters import Parameters

ONE_BLOCK = 32 << 20
"""Bytes of workspace that a call may hold from its first launch to its last."""
_ALIGNED = 256


class _Made(NamedTuple):
    """A tensor that a call made: as which launch was next. shape, strides and dtype make it again."""

    address: int
    size: int
    like: tuple[Any, ...]
    storage: StorageWeakRef


class _Making(threading.local):
    made: list[tuple[int, _Made]] | None = None
    launches: list[Launch] | None = None


_making = _Making()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, which a recording hears of."""
    t = torch.empty(shape, dtype=dtype, device=device)
    if _making.made is not None and _making.launches is not None:
        like, storage = (tuple(t.shape), t.stride(), dtype), StorageWeakRef(t.untyped_storage())
        _making.made.append((len(_making.launches), _Made(t.data_ptr(), t.numel() * t.element_size(), like, storage)))
    return t


class _Stage(NamedTuple):
    """Launches between which nothing is made or dropped. fresh: what is allocated before them; gone: places, among all that was
    allocated, of what nobody reads any more."""

    fresh: tuple[tuple[Any, ...], ...]
    launches: Parameters
    gone: tuple[int, ...]


class StagedTape:
    """The launches of a recorded call. Valid for calls whose tensors have the same dtypes, shapes, strides and device, and are
    None in the same places."""

    __slots__ = ("_current", "_empty", "_index", "_results", "_stages", "_stream")

    def __init__(self, stages: Sequence[_Stage], results: Sequence[int], device: torch.device) -> None:
        self._stages, self._results, self._index = stages, results, device.index
        self._empty = single._allocator(device)
        self._stream: Callable[[int], int] = single.driver.active.get_current_stream
        self._current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

    def run(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """What the call gave, None where it gave None; None where this call must go the long way: an unaligned address, another
        current device, someone who listens to launches."""
        index, listeners = self._index, single.knobs.runtime
        if self._current() != index or listeners.launch_enter_hook.calls or listeners.launch_exit_hook.calls:
            return None
        at = [t.data_ptr() for t in inputs if t is not None]
        if reduce(or_, at) & 15:
            return None
        stream, empty = self._stream(index), self._empty
        made: list[Tensor | None] = []
        for fresh, launches, gone in self._stages:
            for like in fresh:
                made.append(t := empty(*like))
                at.append(t.data_ptr())
            launches.play(at, stream)
            for i in gone:
                made[i] = None
        return [None if i < 0 else made[i] for i in self._results]


def record_stages(
    call: Callable[[], Sequence[Tensor | None]], inputs: Sequence[Tensor | None], device: torch.device
) -> tuple[Sequence[Tensor | None], StagedTape | None]:
    """Runs `call`, which makes all its memory by `empty`, and returns some of it; and its tape, or None where it has none.

    It has none for the reasons of `launch.record`, and where one tensor is returned twice.
    """
    with recorded() as launches:
        before = _making.made, _making.launches
        _making.made, _making.launches = [], launches
        try:
            results = call()
            made = _making.made
        finally:
            _making.made, _making.launches = before
    found = _stages_of(launches, made, [t for t in inputs if t is not None], results)
    return results, None if found is None else StagedTape(*found, device)


Place = tuple[int, int]
"""Where an argument lies: offset in what was made as that number, or, for number -1 - i, in input i."""


def _stages_of(
    launches: list[Any], made: list[tuple[int, _Made]], inputs: Sequence[Tensor], results: Sequence[Tensor | None]
) -> tuple[list[_Stage], list[int]] | None:
    own = [(t.data_ptr(), _extent(t)) for t in inputs]
    addresses = [a for a, _ in own]
    if not launches or len(set(addresses)) != len(own) or any(a % 16 for a in addresses):
        return None
    used: list[list[Place | None]] = []
    first, last = [len(launches)] * len(made), [-1] * len(made)
    for n, one in enumerate(launches):
        row: list[Place | None] = []
        for t in (*(d.base for d in one.descriptors), *one.memory):
            place = None if t is None else _place(t, own, made, n)
            if t is not None and place is None:
                return None
            row.append(place)
            if place is not None and place[0] >= 0:
                first[place[0]], last[place[0]] = min(first[place[0]], n), n
        used.append(row)
    given: list[int] = []
    for t in results:
        found = (-1, 0) if t is None else _place(Noted(t), [], made, len(launches))
        if found is None or (t is not None and (found[1] != 0 or _like(t) != made[found[0]][1].like)):
            return None
        given.append(found[0])
    kept = [i for i in given if i >= 0]
    if len(set(kept)) != len(kept) or any(last[i] < 0 for i in kept):
        return None
    blocks = _blocks([m.size for _, m in made], first, last, given, len(launches))
    return _lay_out(launches, used, [m for _, m in made], blocks, given, len(own))


def _like(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.dtype


def _extent(t: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    return (
        (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size() if t.numel() else 0
    )


def _place(t: Noted, own: list[tuple[int, int]], made: list[tuple[int, _Made]], launch: int) -> Place | None:
    """Of an argument of that launch. Memory may have been freed and made anew: the latest counts, if nobody else made it."""
    address = t.data_ptr()
    for i, (begin, _) in enumerate(own):
        if address == begin:
            return -1 - i, 0
    around = [(-1 - i, address - begin) for i, (begin, size) in enumerate(own) if begin < address < begin + size]
    if around:  # of several, which are views of one memory here, any may be meant
        return around[0] if len(around) == 1 else None
    for i in reversed(range(len(made))):
        before, m = made[i]
        if before <= launch and m.address <= address < m.address + max(m.size, 1):
            return (i, address - m.address) if t.may_be(m.storage) else None
    return None


class _Block(NamedTuple):
    """Tensors that are allocated as one before launch `begin` and dropped behind launch `end`."""

    begin: int
    end: int
    members: list[int]


def _blocks(sizes: list[int], first: list[int], last: list[int], given: list[int], launches: int) -> list[_Block]:
    """Results are tensors of their own; workspaces that live equally long share a block."""
    spaces = [i for i in range(len(sizes)) if i not in given and last[i] >= 0]
    small = sum(sizes[i] for i in spaces) <= ONE_BLOCK
    spans: dict[tuple[int, int], list[int]] = {}
    for i in spaces:
        spans.setdefault((0, launches - 1) if small else (first[i], last[i]), []).append(i)
    blocks = [_Block(0 if small else first[i], launches, [i]) for i in given if i >= 0]
    blocks += [_Block(*span, members) for span, members in spans.items()]
    return sorted(blocks, key=lambda b: b.begin)


def _lay_out(
    launches: list[Any],
    used: list[list[Place | None]],
    made: list[_Made],
    blocks: list[_Block],
    given: list[int],
    inputs: int,
) -> tuple[list[_Stage], list[int]] | None:
    library = single.find_driver()
    if library is None:
        return None
    base = {-1 - i: (i, 0) for i in range(inputs)}  # place of the memory that each tensor lies in, and where there
    likes: list[tuple[Any, ...]] = []
    for n, block in enumerate(blocks):
        size = 0
        for i in block.members:
            base[i] = inputs + n, size
            size += -(-made[i].size // _ALIGNED) * _ALIGNED
        likes.append(made[block.members[0]].like if block.end == len(launches) else ((size,), (1,), torch.uint8))
    cuts = sorted({0, len(launches), *(b.begin for b in blocks), *(min(b.end + 1, len(launches)) for b in blocks)})
    stages = []
    for begin, end in itertools.pairwise(cuts):
        there = inputs + sum(b.begin <= begin for b in blocks)
        inner: dict[tuple[int, int], int] = {}
        kernels = []
        for one, row in zip(launches[begin:end], used[begin:end], strict=True):
            places = []
            for p in row:
                place, offset = (-1, 0) if p is None else (base[p[0]][0], base[p[0]][1] + p[1])
                places.append(there + inner.setdefault((place, offset), len(inner)) if offset else place)
            kernel = single.kernel_of(one, places, library)
            if kernel is None:
                return None
            kernels.append(kernel)
        fresh = tuple(likes[i] for i, b in enumerate(blocks) if b.begin == begin)
        gone = tuple(i for i, b in enumerate(blocks) if b.end == end - 1)
        stages.append(_Stage(fresh, single.Parameters(kernels, library, list(inner)), gone))
    return stages, [-1 if i < 0 else next(n for n, b in enumerate(blocks) if b.members == [i]) for i in given]

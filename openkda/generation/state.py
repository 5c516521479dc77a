"""States put aside: a fixed number of slots, snapshots that outlive them, forks, and what all of it weighs.

A running batch holds its states in contiguous rows (decoder.py). Between two turns of a conversation, or for a prefix that
many requests share, a row is written to a slot here and later read back. A KDA state cannot be cut back to an earlier
token, so what may be needed again is put aside at the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.layers.state import KDAState, LayerState, MLAState, ModelState

_KDA_TENSORS = ("recurrent", "conv_q", "conv_k", "conv_v")


def state_bytes(state: ModelState) -> int:
    """Bytes of a state, all rows together."""
    return sum(layer.nbytes for layer in state)


def select(state: ModelState, rows: Sequence[int]) -> ModelState:
    """The given rows in the given order, copied; a row may come more than once. ValueError for one that is not there."""
    there = state[0].num_sequences if state else 0
    outside = [row for row in rows if not 0 <= row < there]
    if outside:
        raise ValueError(f"rows: expected 0..{there - 1}, received {outside}")
    return tuple(_select(layer, rows) for layer in state)


def join(states: Sequence[ModelState]) -> ModelState:
    """Several states as one, rows one after the other; MLA rows are padded to the longest."""
    if not states:
        raise ValueError("states to join: expected at least one, received none")
    layers = zip(*states, strict=True)
    return tuple(_join(list(same)) for same in layers)


def _select(layer: LayerState, rows: Sequence[int]) -> LayerState:
    if isinstance(layer, KDAState):
        at = torch.tensor(list(rows), dtype=torch.int64, device=layer.recurrent.device)
        return KDAState(*(getattr(layer, name).index_select(0, at) for name in _KDA_TENSORS))
    at = torch.tensor(list(rows), dtype=torch.int64, device=layer.latent.device)
    length = layer.length.index_select(0, at)
    longest = int(length.max()) if len(rows) else 0
    return MLAState(layer.latent[:, :longest].index_select(0, at), length, longest)


def _join(layers: list[LayerState]) -> LayerState:
    if all(isinstance(layer, KDAState) for layer in layers):
        return KDAState(*(torch.cat([getattr(layer, name) for layer in layers]) for name in _KDA_TENSORS))
    if not all(isinstance(layer, MLAState) for layer in layers):
        raise ValueError("states to join: expected the same kind of layer in each, received KDA and MLA in one place")
    latents = [layer for layer in layers if isinstance(layer, MLAState)]
    length = torch.cat([layer.length for layer in latents])
    longest = int(length.max())
    padded = [F.pad(m.latent[:, :longest], (0, 0, 0, max(0, longest - m.latent.shape[1]))) for m in latents]
    return MLAState(torch.cat(padded), length, longest)


@dataclass(frozen=True)
class Snapshot:
    """A copy of one sequence's state that no slot holds; it can be restored any number of times, and pickled."""

    state: ModelState

    @property
    def nbytes(self) -> int:
        return state_bytes(self.state)


class StateStore:
    """`slots` places for the state of one sequence each.

    KDA matrices and convolution tails live in one preallocated tensor a layer, whose size is fixed at the first write. MLA
    latents are kept at their own length. Every slot that is handed out starts empty: reading before writing raises,
    so no sequence ever continues another one's.

    Raises: ValueError for a slot that is not in use, an empty one, a state of other shapes or dtypes, or when all are taken.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots: expected a positive integer, received {slots}")
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._written: set[int] = set()
        self._like: ModelState = ()  # no rows: what every state must look like
        self._pools: list[KDAState | dict[int, Tensor]] = []  # one a layer; of an MLA layer: slot -> [length, R]

    def acquire(self) -> int:
        """A free slot, now in use and empty."""
        if not self._free:
            raise ValueError(f"state store: expected a free slot, all {self.slots} are in use")
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give the slot back; what it held is gone."""
        self._in_use(slot)
        self._written.discard(slot)
        for pool in self._pools:
            if isinstance(pool, dict):
                pool.pop(slot, None)
        self._free.append(slot)

    def write(self, slot: int, state: ModelState, row: int = 0) -> None:
        """Copy row `row` of `state` into the slot, over what it held."""
        self._in_use(slot)
        one = select(state, [_checked_row(state, row)])
        self._check_or_allocate(one)
        for pool, layer in zip(self._pools, one, strict=True):
            if isinstance(layer, KDAState) and isinstance(pool, KDAState):
                for name in _KDA_TENSORS:
                    getattr(pool, name)[slot] = getattr(layer, name)[0]
            elif isinstance(layer, MLAState) and isinstance(pool, dict):
                pool[slot] = layer.latent[0]
        self._written.add(slot)

    def read(self, slots: Sequence[int]) -> ModelState:
        """The states of these slots as the rows of one state, copied: continuing it leaves the slots as they are."""
        if not slots:
            raise ValueError("state store: expected at least one slot to read, received none")
        for slot in slots:
            self._in_use(slot)
            if slot not in self._written:
                raise ValueError(f"state store: expected a written slot, slot {slot} is empty")
        return tuple(
            _stack([pool[slot] for slot in slots]) if isinstance(pool, dict) else _select(pool, slots)
            for pool in self._pools
        )

    def fork(self, slot: int) -> int:
        """A new slot with the same content."""
        state = self.read([slot])
        new = self.acquire()
        self.write(new, state)
        return new

    def snapshot(self, slot: int) -> Snapshot:
        """A copy of the slot's content that outlives the slot."""
        return Snapshot(self.read([slot]))

    def restore(self, snapshot: Snapshot) -> int:
        """A new slot with the snapshot's content."""
        slot = self.acquire()
        try:
            self.write(slot, snapshot.state)
        except ValueError:
            self.release(slot)
            raise
        return slot

    def nbytes(self, slot: int | None = None) -> int:
        """Bytes held for one slot, or by the whole store, free KDA slots included (they are allocated)."""
        if slot is not None:
            return state_bytes(self.read([slot]))
        latents = [t for pool in self._pools if isinstance(pool, dict) for t in pool.values()]
        fixed = sum(pool.nbytes for pool in self._pools if isinstance(pool, KDAState))
        return fixed + sum(t.numel() * t.element_size() for t in latents)

    def _in_use(self, slot: int) -> None:
        if not 0 <= slot < self.slots or slot in self._free:
            raise ValueError(f"state store: expected a slot in use, received {slot}")

    def _check_or_allocate(self, one: ModelState) -> None:
        """`one` (a single row) must look like the first state that was written."""
        like = select(one, [])
        if not self._pools:
            self._like = like
            self._pools = [self._pool_for(layer) for layer in like]
            return
        if len(like) != len(self._like):
            raise ValueError(f"state: expected {len(self._like)} layers, received {len(like)}")
        for i, (want, got) in enumerate(zip(self._like, like, strict=True)):
            if _looks(want) != _looks(got):
                raise ValueError(f"state of layer {i}: expected {_looks(want)}, received {_looks(got)}")

    def _pool_for(self, layer: LayerState) -> KDAState | dict[int, Tensor]:
        if isinstance(layer, MLAState):
            return {}
        tensors = (getattr(layer, name) for name in _KDA_TENSORS)
        return KDAState(*(t.new_zeros(self.slots, *t.shape[1:]) for t in tensors))


def _checked_row(state: ModelState, row: int) -> int:
    first = state[0]
    rows = first.recurrent.shape[0] if isinstance(first, KDAState) else first.length.shape[0]
    if not 0 <= row < rows:
        raise ValueError(f"row: expected 0..{rows - 1}, received {row}")
    return row


def _looks(layer: LayerState) -> str:
    """Kind, shapes and dtypes of a layer's state, rows and length aside."""
    if isinstance(layer, MLAState):
        return f"MLA latents of {layer.latent.shape[-1]} values, {layer.latent.dtype}"
    tensors = ((name, getattr(layer, name)) for name in _KDA_TENSORS)
    return "KDA " + ", ".join(f"{name} {list(t.shape[1:])} {t.dtype}" for name, t in tensors)


def _stack(latents: list[Tensor]) -> MLAState:
    """Latents [length, R] of several sequences as one padded state."""
    lengths = [t.shape[0] for t in latents]
    longest = max(lengths)
    padded = torch.stack([F.pad(t, (0, 0, 0, longest - t.shape[0])) for t in latents])
    return MLAState(padded, torch.tensor(lengths, device=padded.device), longest)

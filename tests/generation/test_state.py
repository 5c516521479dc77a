"""States put aside come back as they were, and no slot ever shows what another sequence left there."""

from __future__ import annotations

import pickle

import pytest
import torch

from openkda.generation.decoder import Decoder
from openkda.generation.state import StateStore, join, select, state_bytes
from openkda.layers.state import KDAState, MLAState, ModelState
from openkda.models.hybrid import HybridLM
from openkda.models.inspect import describe


def after(model: HybridLM, prompts: list[list[int]]) -> ModelState:
    decoder = Decoder(model)
    decoder.prefill(prompts)
    assert decoder.state is not None
    return decoder.state


def next_logits(model: HybridLM, state: ModelState, token: int) -> torch.Tensor:
    rows = state[0].recurrent.shape[0]  # type: ignore[union-attr]
    return Decoder(model, state=state).step(torch.full((rows,), token))


def test_store_gives_back_what_was_written(model: HybridLM, prompts: list[list[int]]) -> None:
    state = after(model, prompts)
    store = StateStore(8)
    slots = [store.acquire() for _ in prompts]
    for n, slot in enumerate(slots):
        store.write(slot, state, n)
    want = next_logits(model, state, 3)
    torch.testing.assert_close(next_logits(model, store.read(slots), 3), want)
    order = [2, 0, 2]
    got = next_logits(model, store.read([slots[n] for n in order]), 3)
    torch.testing.assert_close(got, want[order], rtol=1e-9, atol=1e-9)


def test_continuing_a_read_state_leaves_the_slot(model: HybridLM, prompts: list[list[int]]) -> None:
    store = StateStore(2)
    slot = store.acquire()
    store.write(slot, after(model, [prompts[0]]))
    first = next_logits(model, store.read([slot]), 1)
    assert torch.equal(next_logits(model, store.read([slot]), 1), first)


def test_shared_prefix_is_forked(model: HybridLM, prompts: list[list[int]]) -> None:
    """One prefill of the prefix, two continuations: each equals the run that started from nothing."""
    store = StateStore(3)
    prefix = store.acquire()
    store.write(prefix, after(model, [prompts[3]]))
    other = store.fork(prefix)
    logits = Decoder(model, state=store.read([prefix, other])).prefill([[1, 2], [9]])
    want = Decoder(model).prefill([[*prompts[3], 1, 2], [*prompts[3], 9]])
    torch.testing.assert_close(logits, want, rtol=1e-9, atol=1e-9)


def test_snapshot_outlives_its_slot(model: HybridLM, prompts: list[list[int]]) -> None:
    store = StateStore(1)
    slot = store.acquire()
    store.write(slot, after(model, [prompts[0]]))
    want = next_logits(model, store.read([slot]), 5)
    snapshot = pickle.loads(pickle.dumps(store.snapshot(slot)))
    assert snapshot.nbytes == store.nbytes(slot)
    store.write(slot, after(model, [prompts[1]]))
    store.release(slot)
    back = store.restore(snapshot)
    assert torch.equal(next_logits(model, store.read([back]), 5), want)


def test_recycled_slot_is_empty(model: HybridLM) -> None:
    store = StateStore(1)
    slot = store.acquire()
    store.write(slot, after(model, [[1, 2, 3]]))
    store.release(slot)
    assert store.acquire() == slot
    with pytest.raises(ValueError, match="empty"):
        store.read([slot])


def test_select_and_join_are_inverse(model: HybridLM, prompts: list[list[int]]) -> None:
    state = after(model, prompts)
    again = join([select(state, [n]) for n in range(len(prompts))])
    for a, b in zip(state, again, strict=True):
        if isinstance(a, KDAState):
            assert torch.equal(a.recurrent, b.recurrent) and torch.equal(a.conv_v, b.conv_v)  # type: ignore[union-attr]
        else:
            assert isinstance(b, MLAState) and torch.equal(a.length, b.length)
            for row, n in enumerate(a.length.tolist()):
                assert torch.equal(a.latent[row, :n], b.latent[row, :n])
    with pytest.raises(ValueError, match="at least one"):
        join([])


def test_bytes_are_those_of_the_report(model: HybridLM, prompts: list[list[int]]) -> None:
    model32 = HybridLM(model.config)
    state = after(model32, prompts)
    report = describe(model.config, dtype=torch.float32)
    assert state_bytes(state) == sum(report.state_bytes(len(p)) for p in prompts)
    store = StateStore(4)
    slot = store.acquire()
    store.write(slot, state, 3)
    assert store.nbytes(slot) == report.state_bytes(len(prompts[3]))
    assert store.nbytes() == 4 * report.constant_bytes + report.bytes_per_token * len(prompts[3])


def test_bad_use(model: HybridLM) -> None:
    with pytest.raises(ValueError, match="positive"):
        StateStore(0)
    store, state = StateStore(1), after(model, [[1, 2]])
    with pytest.raises(ValueError, match="slot in use"):
        store.write(0, state)
    slot = store.acquire()
    with pytest.raises(ValueError, match="all 1 are in use"):
        store.acquire()
    with pytest.raises(ValueError, match="row"):
        store.write(slot, state, 1)
    store.write(slot, state)
    with pytest.raises(ValueError, match="at least one"):
        store.read([])
    with pytest.raises(ValueError, match="expected 4 layers, received 2"):
        store.write(slot, state[:2])
    with pytest.raises(ValueError, match=r"layer 0: expected KDA .*float64.* received .*float32"):
        store.write(slot, after(HybridLM(model.config), [[1, 2]]))
    store.release(slot)
    with pytest.raises(ValueError, match="slot in use"):
        store.release(slot)

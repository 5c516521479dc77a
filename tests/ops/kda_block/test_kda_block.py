"""The decoding block's contract, on the composition of its ops (the kernel is held to it in tests/ops/kda)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.layers.kda import KimiDeltaAttention
from openkda.models.presets import PRESETS
from openkda.ops.kda.gate import BoundedGate, SoftplusGate
from openkda.ops.kda_block.api import MAX_TOKENS, BlockState, BlockWeights, kda_block, kda_block_commit
from openkda.testing.compare import check_close

H, HV, K, V, W = 2, 4, 8, 12, 4
LIMIT = 2e-5


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GEN)


GEN = torch.Generator().manual_seed(0)
WEIGHTS = BlockWeights(draw(H * K, W), draw(H * K, W), draw(HV * V, W), draw(V), 1e-5)
GATE = SoftplusGate(draw(HV), draw(HV, K))


def tokens(N: int, T: int) -> dict[str, Tensor]:
    return {
        "q": draw(N, T, H * K), "k": draw(N, T, H * K), "v": draw(N, T, HV * V), "g": draw(N, T, HV, K),
        "beta": draw(N, T, HV), "out_gate": draw(N, T, HV, V),
    }  # fmt: skip


def state(rows: int) -> BlockState:
    return BlockState(
        draw(rows, HV, K, V), draw(rows, H * K, W - 1), draw(rows, H * K, W - 1), draw(rows, HV * V, W - 1)
    )


SHARED = BlockState(*(t.expand(5, *t.shape[1:]) for t in state(1).tensors()))


def part(x: dict[str, Tensor], t: slice) -> dict[str, Tensor]:
    return {name: y[:, t] for name, y in x.items()}


def test_tokens_together_or_one_by_one() -> None:
    x, first = tokens(3, 6), state(3)
    whole = kda_block(**x, weights=WEIGHTS, state=first, gate=GATE)
    every = kda_block(**x, weights=WEIGHTS, state=first, gate=GATE, keep="all")
    now = first
    assert every.states is not None and every.state is None
    for t in range(6):
        y, new, _ = kda_block(**part(x, slice(t, t + 1)), weights=WEIGHTS, state=now, gate=GATE)
        assert new is not None
        now = new
        check_close(f"token {t}", y, whole.output[:, t : t + 1], LIMIT)
        check_close(f"state {t}", every.states[:, t], now.recurrent, LIMIT)
    assert whole.state is not None
    check_close("output", every.output, whole.output, LIMIT)
    for a, b in zip(now.tensors(), whole.state.tensors(), strict=True):
        check_close("last state", a, b, LIMIT)


def test_is_what_the_layer_computes() -> None:
    """A prefill of a KDA layer, then one token through the layer's ops and through the block."""
    layer = KimiDeltaAttention(PRESETS["tiny"], 0).eval()
    x = draw(2, 9, PRESETS["tiny"].hidden_size)
    with torch.no_grad():
        _, before = layer(x[:, :8], return_state=True)
        want, after = layer._step(x[:, 8:], before)
        got, fused = layer._fused_step(x[:, 8:], before)
    check_close("output", got, want, LIMIT)
    for name in ("recurrent", "conv_q", "conv_k", "conv_v"):
        check_close(name, getattr(fused, name), getattr(after, name), LIMIT)


def test_a_pool_is_written_in_place_and_only_where_slots_point() -> None:
    x, pool, slots = tokens(3, 2), state(5), torch.tensor([4, -1, 0], dtype=torch.int32)
    old = [t.clone() for t in pool.tensors()]
    for t in pool.tensors():
        t[1:4] = float("nan")  # nobody's slots
    rows = BlockState(*(t[[4, 0, 0]] for t in old))
    want = kda_block(**x, weights=WEIGHTS, state=rows, gate=GATE)
    got = kda_block(**x, weights=WEIGHTS, state=pool, gate=GATE, slots=slots)
    assert got.state is pool and bool((got.output[1] == 0).all())
    check_close("output", got.output[[0, 2]], want.output[[0, 2]], LIMIT)
    assert want.state is not None
    for t, w in zip(pool.tensors(), want.state.tensors(), strict=True):
        check_close("slots", t[[4, 0]], w[[0, 2]], LIMIT)
        assert bool(t[1:4].isnan().all())


def test_without_slots_nothing_is_overwritten() -> None:
    x, first = tokens(2, 3), state(2)
    before = [t.clone() for t in (*x.values(), *first.tensors())]
    kda_block(**x, weights=WEIGHTS, state=first, gate=GATE)
    assert all(torch.equal(a, b) for a, b in zip((*x.values(), *first.tensors()), before, strict=True))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"keep": "some"}, ValueError, "'last' or 'all'"),
        ({"gate": None}, TypeError, "SoftplusGate or BoundedGate"),
        ({"impl": "cuda"}, ValueError, "triton, reference"),
        ({"impl": "triton"}, NotImplementedError, "CUDA"),
        ({"v": draw(2, 1, HV * V + 1)}, ValueError, r"v\.shape"),
        ({"k": draw(2, 1, H * K).double()}, TypeError, r"k\.dtype"),
        ({"beta": draw(2, 1, HV + 1)}, ValueError, r"beta\.shape"),
        ({"slots": torch.tensor([0])}, ValueError, r"slots\.shape"),
        ({"slots": torch.tensor([0.0, 1.0])}, TypeError, r"slots\.dtype"),
        # In place, by index: what torch would wrap, clamp or write twice.
        ({"state": state(5), "slots": torch.tensor([1, 1])}, ValueError, "slots: expected each slot at most once"),
        ({"state": state(5), "slots": torch.tensor([1, -2])}, ValueError, r"slots: expected values in \[-1, 5\)"),
        ({"state": state(5), "slots": torch.tensor([1, 5])}, ValueError, r"slots: expected values in \[-1, 5\)"),
        ({"state": state(0), "slots": torch.tensor([-1, -1])}, ValueError, "at least one slot"),
        ({"slots": [0, 1]}, TypeError, "slots: expected a torch.Tensor"),
        ({"state": SHARED, "slots": torch.tensor([0, 1])}, ValueError, "recurrent: expected a pool whose slots are"),
        ({"state": state(2).tensors()}, TypeError, "state: expected BlockState"),
        ({"weights": {}}, TypeError, "weights: expected BlockWeights"),
        ({"g": None}, ValueError, r"g\.shape"),
        ({"g": draw(2, 1, HV, 0)}, ValueError, r"g\.shape"),
        ({"scale": torch.tensor(1.0)}, TypeError, "scale: expected a number"),
        ({"gate": BoundedGate(-5.0, None, draw(K, HV))}, ValueError, r"gate\.dt_bias: expected \[HV, K\]"),
        ({"gate": SoftplusGate(None)}, ValueError, r"gate\.A_log: expected a float32 tensor"),
        ({"weights": replace(WEIGHTS, norm=None)}, TypeError, r"weights\.norm: expected a float tensor"),
        ({"weights": replace(WEIGHTS, norm_eps=float("nan"))}, ValueError, r"weights\.norm_eps"),
        ({"state": state(3)}, ValueError, "state rows"),
        ({"weights": replace(WEIGHTS, norm=draw(V + 1))}, ValueError, r"weights\.norm"),
        ({"weights": replace(WEIGHTS, conv_q=draw(H * K, 5))}, ValueError, "W = 2, 3 or 4"),
    ],
)
def test_malformed_calls_raise(change: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {**tokens(2, 1), "weights": WEIGHTS, "state": state(2), "gate": BoundedGate()}
    with pytest.raises(error, match=message):
        kda_block(**{**call, **change})


def test_too_many_tokens_and_gradients_raise() -> None:
    with pytest.raises(ValueError, match="1 to 64"):
        kda_block(**tokens(1, MAX_TOKENS + 1), weights=WEIGHTS, state=state(1), gate=GATE)
    x = tokens(1, 1)
    x["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match="not differentiable"):
        kda_block(**x, weights=WEIGHTS, state=state(1), gate=GATE)


@pytest.mark.parametrize("accepted", [(0, 3, 6), (1, 2, 4), (9, 1, -2)])
def test_commit_keeps_the_state_after_the_accepted_tokens(accepted: tuple[int, ...]) -> None:
    """As a step over just those tokens leaves it, windows included; with slots in place, without them in a new state."""
    x, first = tokens(3, 6), state(3)
    every = kda_block(**x, weights=WEIGHTS, state=first, gate=GATE, keep="all")
    assert every.states is not None
    before = [t.clone() for t in first.tensors()]
    inputs = (every.states, x["q"], x["k"], x["v"], torch.tensor(accepted))
    kept = kda_block_commit(*inputs, state=first)
    assert all(torch.equal(a, b) for a, b in zip(first.tensors(), before, strict=True))
    pool = state(5)
    for t, rows in zip(pool.tensors(), before, strict=True):
        t[[4, 0, 2]] = rows
    old = [t.clone() for t in pool.tensors()]
    assert kda_block_commit(*inputs, state=pool, slots=torch.tensor([4, 0, 2])) is pool
    for n, count in enumerate(min(max(a, 0), 6) for a in accepted):
        row = BlockState(*(t[n : n + 1] for t in before))
        want: BlockState | None = row
        if count:
            some = {name: y[n : n + 1, :count] for name, y in x.items()}
            want = kda_block(**some, weights=WEIGHTS, state=row, gate=GATE).state
        assert want is not None
        for got, here, w in zip(kept.tensors(), pool.tensors(), want.tensors(), strict=True):
            check_close(f"row {n} after {count}", got[n], w[0], LIMIT)
            check_close(f"slot of row {n}", here[(4, 0, 2)[n]], w[0], LIMIT)
    assert all(torch.equal(t[[1, 3]], o[[1, 3]]) for t, o in zip(pool.tensors(), old, strict=True))


def test_commit_of_padded_rows_touches_nothing() -> None:
    x, pool = tokens(2, 3), state(4)
    slots = torch.tensor([-1, 3])
    every = kda_block(**x, weights=WEIGHTS, state=pool, gate=GATE, keep="all", slots=slots)
    assert every.states is not None
    old = [t.clone() for t in pool.tensors()]
    kda_block_commit(every.states, x["q"], x["k"], x["v"], torch.tensor([3, 0]), state=pool, slots=slots)
    assert all(torch.equal(a, b) for a, b in zip(pool.tensors(), old, strict=True))


def test_commit_refuses_what_does_not_fit() -> None:
    x, pool = tokens(2, 3), state(2)
    every = kda_block(**x, weights=WEIGHTS, state=pool, gate=GATE, keep="all").states
    assert every is not None
    good = {"states": every, "q": x["q"], "k": x["k"], "v": x["v"], "accepted": torch.tensor([1, 2]), "state": pool}
    for change, error, message in (
        ({"accepted": torch.tensor([1.0, 2.0])}, TypeError, r"accepted\.dtype"),
        ({"accepted": torch.tensor([1])}, ValueError, r"accepted\.shape"),
        ({"accepted": [1, 2]}, TypeError, "accepted: expected a torch.Tensor"),
        ({"q": x["q"][:, :2]}, ValueError, r"q\.shape"),
        ({"state": state(3)}, ValueError, "state rows"),
        ({"states": every[0]}, ValueError, "states, q shapes"),
        ({"states": every.int()}, TypeError, "states.dtype"),
        ({"state": pool.tensors()}, TypeError, "state: expected BlockState"),
        ({"slots": torch.tensor([1, 1])}, ValueError, "slots: expected each slot at most once"),
        ({"slots": torch.tensor([0, 2])}, ValueError, r"slots: expected values in \[-1, 2\)"),
    ):
        with pytest.raises(error, match=message):
            kda_block_commit(**{**good, **change})  # type: ignore[arg-type]


def test_gate_parameters_of_another_size_are_refused() -> None:
    x = tokens(2, 1)
    for gate in (SoftplusGate(draw(HV + 1)), SoftplusGate(draw(HV), draw(K)), BoundedGate(-5.0, 1.0)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"gate\.(A_log|dt_bias)"):
            kda_block(**x, weights=WEIGHTS, state=state(2), gate=gate)

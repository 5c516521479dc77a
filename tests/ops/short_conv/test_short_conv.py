"""The short convolution: against a loop over tokens, in packs, in pieces, step by step, with its gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor

from openkda.ops.short_conv import api
from openkda.testing.compare import rel

short_conv, short_conv_step = (jaxtyped(typechecker=beartype)(f) for f in (api.short_conv, api.short_conv_step))


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loop(x: Tensor, w: Tensor, state: Tensor | None, activation: str | None) -> tuple[Tensor, Tensor]:
    """One sequence [T, D], one token and one tap at a time."""
    W = w.shape[1]
    past = list((torch.zeros(x.shape[1], W - 1, dtype=x.dtype) if state is None else state).unbind(1))
    rows = []
    for token in x:
        past.append(token)
        y = sum(w[:, j] * past[len(past) - W + j] for j in range(W))
        rows.append(y * torch.sigmoid(y) if activation else y)
    return torch.stack(rows) if rows else x, torch.stack(past[len(past) - W + 1 :], 1)


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("lengths", [(1, 2, 3, 4, 7), (0, 0, 2), (3, 1, 0, 0), (1, 1, 1), (0,), (70,)], ids=str)
def test_pack_equals_loop(W: int, activation: str | None, with_state: bool, lengths: tuple[int, ...]) -> None:
    x, w = rand(1, sum(lengths), 6), rand(6, W, seed=1)
    states = rand(len(lengths), 6, W - 1, seed=2) if with_state else None
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    leaves = [t.requires_grad_() for t in (x, w, states) if t is not None]
    y, final = short_conv(x, w, initial_state=states, output_final_state=True, cu_seqlens=cu, activation=activation)
    wanted = [
        loop(x[0, a:b], w, None if states is None else states[n], activation)
        for n, (a, b) in enumerate(itertools.pairwise(cu.tolist()))
    ]
    want_y, want_final = torch.cat([r[0] for r in wanted])[None], torch.stack([r[1] for r in wanted])
    assert rel(y, want_y) < 1e-14
    assert torch.equal(final, want_final)
    up = rand(*y.shape, seed=3), rand(*final.shape, seed=4)
    got = torch.autograd.grad((y, final), leaves, up, allow_unused=True, materialize_grads=True)
    ends = [(t, u) for t, u in zip((want_y, want_final), up, strict=True) if t.requires_grad]
    want = torch.autograd.grad(
        [t for t, _ in ends], leaves, [u for _, u in ends], allow_unused=True, materialize_grads=True
    )
    assert all(rel(g, h) < 1e-13 for g, h in zip(got, want, strict=True))


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("T", [0, 1, 2, 3, 50])
def test_batch_equals_rows_alone(W: int, T: int) -> None:
    x, w, states = rand(3, T, 5), rand(5, W, seed=1), rand(3, 5, W - 1, seed=2)
    y, final = short_conv(x, w, initial_state=states, output_final_state=True)
    for b in range(3):
        want_y, want_final = loop(x[b], w, states[b], "silu")
        assert rel(y[b], want_y) < 1e-14
        assert torch.equal(final[b], want_final)
    assert short_conv(x, w)[1] is None


@pytest.mark.parametrize("pieces", [(1,) * 20, (2, 1, 17), (3, 3, 14), (19, 1), (0, 5, 0, 15)], ids=str)
def test_pieces_and_steps_equal_the_whole(pieces: tuple[int, ...]) -> None:
    """Chunks shorter than the width included; the state carries the newest inputs last."""
    x, w = rand(2, 20, 8).float(), rand(8, 4, seed=1).float()
    want, want_final = short_conv(x, w, output_final_state=True)
    state, rows = torch.zeros(2, 8, 3), []
    for part in x.split(list(pieces), 1):
        y, state = short_conv(part, w, initial_state=state, output_final_state=True)
        rows.append(y)
    assert rel(torch.cat(rows, 1), want) < 1e-6
    assert torch.equal(state, want_final)
    state, rows = torch.zeros(2, 8, 3), []
    for t in range(20):
        before = state.clone()
        y, new = short_conv_step(x[:, t], w, state)
        assert torch.equal(state, before)
        state = new
        rows.append(y)
    assert rel(torch.stack(rows, 1), want) < 1e-6
    assert torch.equal(state, want_final)


def test_no_neighbour_leaks() -> None:
    """Values of one sample change no bit of another, its gradient from another's loss is exactly 0, its NaN stays its own."""
    w, cu, states = rand(4, 4, seed=1).float(), torch.tensor([0, 1, 3, 6, 10, 17]), rand(5, 4, 3, seed=2).float()
    x = rand(1, 17, 4).float()
    for poison in (1e3, float("nan")):
        y = x.clone()
        y[:, 3:6] = poison
        a, fa = short_conv(x, w, initial_state=states, output_final_state=True, cu_seqlens=cu)
        b, fb = short_conv(y, w, initial_state=states, output_final_state=True, cu_seqlens=cu)
        keep = [0, 1, 2, *range(6, 17)]
        assert torch.equal(a[:, keep], b[:, keep])
        assert torch.equal(fa[[0, 1, 3, 4]], fb[[0, 1, 3, 4]])
    x.requires_grad_()
    short_conv(x, w, cu_seqlens=cu)[0][:, 6:10].sum().backward()
    assert not bool(x.grad[:, :6].any())
    assert not bool(x.grad[:, 10:].any())


def test_the_future_changes_no_bit_of_the_past() -> None:
    x, w = rand(1, 40, 16).float(), rand(16, 4, seed=1).float()
    for P in (1, 2, 3, 17, 39):
        y = x.clone()
        y[:, P:] = float("nan")
        assert torch.equal(short_conv(x, w)[0][:, :P], short_conv(y, w)[0][:, :P])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(dtype: torch.dtype) -> None:
    """float32 inside, one rounding at the end; the state keeps the inputs as they are."""
    x, w = rand(1, 30, 16).to(dtype), rand(16, 4, seed=1).float()
    y, final = short_conv(x, w, output_final_state=True)
    want, _ = short_conv(x.double(), w.double())
    assert y.dtype == final.dtype == dtype
    assert rel(y, want) < {torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype] / 2
    assert torch.equal(final[0].T, x[0, -3:])


def test_strided_input_and_inputs_left_alone() -> None:
    big = rand(2, 10, 24)
    x, w = big[..., 8:16], rand(8, 4, seed=1)
    before = big.clone()
    y, final = short_conv(x, w, output_final_state=True)
    again, _ = short_conv(x.contiguous(), w)
    assert torch.equal(y, again)
    assert torch.equal(big, before)
    assert final.untyped_storage().data_ptr() not in (y.untyped_storage().data_ptr(), big.untyped_storage().data_ptr())


def test_refusals() -> None:
    x, w = rand(1, 5, 4), rand(4, 4, seed=1)
    for width in (1, 5):
        with pytest.raises(
            ValueError, match=rf"weight.shape: expected \[D, W\] = \[4, 2..4\], received \[4, {width}\]"
        ):
            api.short_conv(x, rand(4, width))
    with pytest.raises(ValueError, match=r"x.shape: expected \[B, T, D\], received \[5, 4\]"):
        api.short_conv(x[0], w)
    with pytest.raises(ValueError, match=r"initial_state.shape: expected .*\[1, 4, 3\], received \[1, 4, 4\]"):
        api.short_conv(x, w, initial_state=rand(1, 4, 4))
    with pytest.raises(TypeError, match=r"initial_state.dtype: expected torch.float64 .*received torch.float32"):
        api.short_conv(x, w, initial_state=rand(1, 4, 3).float())
    with pytest.raises(ValueError, match="activation: expected 'silu' or None, received 'relu'"):
        api.short_conv(x, w, activation="relu")
    with pytest.raises(ValueError, match=r"B = 1 .*received B = 2"):
        api.short_conv(rand(2, 5, 4), w, cu_seqlens=torch.tensor([0, 5, 10]))
    with pytest.raises(ValueError, match="never decrease, received 4 then 3"):
        api.short_conv(x, w, cu_seqlens=torch.tensor([0, 4, 3, 5]))
    with pytest.raises(ValueError, match=r"impl: expected one of .*received 'fast'"):
        api.short_conv(x, w, impl="fast")
    with pytest.raises(ValueError, match=r"state.shape: expected .*\[1, 4, 3\]"):
        api.short_conv_step(x[:, 0], w, rand(1, 4, 2))

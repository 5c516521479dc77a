"""What both attention layers owe: one result however the tokens arrive, and no way for a token to reach another's past,
a neighbour in the pack, or a padded row."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from openkda.layers.kda import KimiDeltaAttention
from openkda.layers.mla import GatedMLA
from openkda.layers.state import KDAState, LayerState, MLAState
from openkda.models.presets import PRESETS
from openkda.testing.compare import rel

TINY = PRESETS["tiny"].replace(initializer_range=0.15)  # wide weights, so that gates and scores leave their middle
LAYERS = {
    "kda-bounded": (KimiDeltaAttention, TINY),
    "kda-softplus": (KimiDeltaAttention, TINY.replace(gate_lower_bound=None, use_full_rank_gate=False)),
    "kda-grouped": (
        KimiDeltaAttention,
        TINY.replace(kda_num_v_heads=6, kda_head_dim=16, kda_v_head_dim=24, short_conv_kernel_size=3),
    ),
    "mla-gated": (GatedMLA, TINY.replace(q_lora_rank=24, v_head_dim=24)),
    "mla-plain": (GatedMLA, TINY.replace(mla_use_output_gate=False, qk_nope_head_dim=16)),
}
SAME = 2e-5  # float32: CPU matmuls of different shapes sum in different orders
PACK = (0, 1, 5, 64, 1, 0, 20)


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(1)
    kind, config = LAYERS[request.param]
    return kind(config, 0).eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, TINY.hidden_size, generator=torch.Generator().manual_seed(seed))


def cu_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def parts(state: LayerState) -> list[Tensor]:
    """Everything a state says: of an MLA state the valid entries, row by row."""
    if isinstance(state, KDAState):
        return [state.recurrent, state.conv_q, state.conv_k, state.conv_v]
    return [row[:n] for row, n in zip(state.latent, state.length.tolist(), strict=True)] + [state.length]


def assert_same_state(a: LayerState, b: LayerState) -> None:
    assert type(a) is type(b)
    for x, y in zip(parts(a), parts(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert rel(x, y) < SAME


def run_pieces(layer: nn.Module, x: Tensor, sizes: list[int]) -> tuple[Tensor, LayerState]:
    outputs, state, at = [], None, 0
    for size in sizes:
        y, state = layer(x[:, at : at + size], state=state, return_state=True)
        outputs.append(y)
        at += size
    assert at == x.shape[1] and state is not None
    return torch.cat(outputs, 1), state


def splits(total: int, count: int) -> list[list[int]]:
    rng = random.Random(5)
    found = [[13, 2, 3, 64, total - 82], [1] * total, [total - 1, 1], [1, total - 1], [0, total, 0]]
    for _ in range(count):
        cuts = sorted(rng.sample(range(1, total), rng.randint(1, 6)))
        found.append([b - a for a, b in pairwise([0, *cuts, total])])
    return found


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
def test_pieces_of_any_sizes_equal_one_call(layer: nn.Module, grad: bool) -> None:
    x = tokens(2, 90)
    with torch.set_grad_enabled(grad):
        whole, state = layer(x, return_state=True)
        for sizes in splits(90, 3 if grad else 12):
            y, final = run_pieces(layer, x, sizes)
            assert rel(y, whole) < SAME, sizes
            assert_same_state(final, state)


def test_gradients_through_pieces_equal_one_call(layer: nn.Module) -> None:
    x = tokens(2, 40).requires_grad_()
    weight = tokens(2, 40, seed=3)
    wanted = torch.autograd.grad((layer(x)[0] * weight).sum(), [x, *layer.parameters()])
    y, _ = run_pieces(layer, x, [7, 1, 25, 1, 6])
    for got, want in zip(torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()]), wanted, strict=True):
        assert rel(got, want) < 1e-4


def test_pack_equals_each_sequence_alone(layer: nn.Module) -> None:
    cu = cu_of(PACK)
    x = tokens(1, sum(PACK)).requires_grad_()
    weight = tokens(1, sum(PACK), seed=3)
    y, state = layer(x, cu_seqlens=cu, return_state=True)
    grads = torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])
    alone = [layer(x[:, a:b], return_state=True) for a, b in pairwise(cu.tolist())]
    joined = torch.cat([o for o, _ in alone], 1)
    assert rel(y, joined) < SAME
    for n, (_, s) in enumerate(alone):
        for got, want in zip(rows_of(state, n), rows_of(s, 0), strict=True):
            assert rel(got, want) < SAME
    for got, want in zip(grads, torch.autograd.grad((joined * weight).sum(), [x, *layer.parameters()]), strict=True):
        assert rel(got, want) < 1e-4


def rows_of(state: LayerState, n: int) -> list[Tensor]:
    if isinstance(state, MLAState):
        return [state.latent[n, : int(state.length[n])]]
    return [t[n] for t in parts(state)]


@torch.no_grad()
def test_pack_continues_from_a_state(layer: nn.Module) -> None:
    """Also the two packs whose token count equals their sequence count without being one token each."""
    first = (3, 0, 1, 12)
    x = tokens(1, sum(first), seed=7)
    _, state = layer(x, cu_seqlens=cu_of(first), return_state=True)
    for lengths in ((1, 1, 1, 1), (3, 1, 0, 0), (0, 0, 4, 0), (5, 0, 70, 2)):
        more = tokens(1, sum(lengths), seed=8)
        cu = cu_of(lengths)
        y, final = layer(more, state=state, cu_seqlens=cu, return_state=True)
        for n, ((a, b), (c, d)) in enumerate(zip(pairwise(cu_of(first).tolist()), pairwise(cu.tolist()), strict=True)):
            whole, want = layer(torch.cat([x[:, a:b], more[:, c:d]], 1), return_state=True)
            if d > c:
                assert rel(y[:, c:d], whole[:, b - a :]) < SAME
            for got, wish in zip(rows_of(final, n), rows_of(want, 0), strict=True):
                assert rel(got, wish) < SAME


@torch.no_grad()
def test_neighbours_in_a_pack_change_nothing(layer: nn.Module) -> None:
    cu = cu_of(PACK)
    x = tokens(1, sum(PACK))
    y, state = layer(x, cu_seqlens=cu, return_state=True)
    for n, (a, b) in enumerate(pairwise(cu.tolist())):
        other = tokens(1, sum(PACK), seed=9) * 5
        other[:, a:b] = x[:, a:b]
        y2, state2 = layer(other, cu_seqlens=cu, return_state=True)
        assert torch.equal(y2[:, a:b], y[:, a:b])
        assert all(torch.equal(p, q) for p, q in zip(rows_of(state2, n), rows_of(state, n), strict=True))


@torch.no_grad()
def test_the_future_never_changes_the_past(layer: nn.Module) -> None:
    x = tokens(1, 70)
    y, _ = layer(x)
    for at in (1, 15, 16, 17, 47, 63, 64, 65, 69):
        changed = x.clone()
        changed[:, at:] = tokens(1, 70 - at, seed=at) * 4
        assert torch.equal(layer(changed)[0][:, :at], y[:, :at]), at


def test_left_padding_is_as_if_it_were_not_there(layer: nn.Module) -> None:
    lengths, width = (3, 9, 17, 0), 17
    mask = torch.arange(width) >= width - torch.tensor(lengths).view(-1, 1)
    x = tokens(4, width).requires_grad_()
    y, state = layer(x, attention_mask=mask, return_state=True)
    for n, length in enumerate(lengths):
        alone, want = layer(x[n : n + 1, width - length :], return_state=True)
        assert rel(y[n : n + 1, width - length :], alone) < SAME
        assert not y[n, : width - length].any()
        for got, wish in zip(rows_of(state, n), rows_of(want, 0), strict=True):
            assert rel(got, wish) < SAME
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert not dx[~mask].any() and bool(dx[mask].any())

    poisoned = torch.where(mask.unsqueeze(-1), x, torch.nan)
    again, state2 = layer(poisoned, attention_mask=mask, return_state=True)
    assert torch.equal(again, y)
    assert all(torch.equal(p, q) for p, q in zip(parts(state2), parts(state), strict=True))

    more = tokens(4, 5, seed=4)  # rows of different lengths go on together, several tokens and one
    with torch.no_grad():
        for piece in (more, more[:, :1]):
            y2, _ = layer(piece, state=state, return_state=True)
            for n, length in enumerate(lengths):
                whole, _ = layer(torch.cat([x[n : n + 1, width - length :], piece[n : n + 1]], 1))
                assert rel(y2[n : n + 1], whole[:, length:]) < SAME


@torch.no_grad()
def test_left_padded_piece_continues_a_state(layer: nn.Module) -> None:
    x, more = tokens(2, 6), tokens(2, 4, seed=2)
    _, state = layer(x, return_state=True)
    mask = torch.tensor([[False, False, False, True], [True] * 4])
    y, final = layer(more, state=state, attention_mask=mask, return_state=True)
    for n, real in enumerate((1, 4)):
        whole, want = layer(torch.cat([x[n : n + 1], more[n : n + 1, 4 - real :]], 1), return_state=True)
        assert rel(y[n : n + 1, 4 - real :], whole[:, 6:]) < SAME
        for got, wish in zip(rows_of(final, n), rows_of(want, 0), strict=True):
            assert rel(got, wish) < SAME


@torch.no_grad()
def test_a_mask_of_ones_never_overrides_boundaries(layer: nn.Module) -> None:
    x, cu = tokens(1, 40), torch.tensor([0, 13, 40])
    ones = torch.ones(1, 40, dtype=torch.bool)
    assert torch.equal(layer(x, cu_seqlens=cu, attention_mask=ones)[0], layer(x, cu_seqlens=cu)[0])
    assert not torch.equal(layer(x, cu_seqlens=cu)[0], layer(x)[0])
    ones[0, 0] = False
    with pytest.raises(ValueError, match="attention_mask with cu_seqlens"):
        layer(x, cu_seqlens=cu, attention_mask=ones)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("length", [1, 63, 65])
def test_gradients_exist_in_every_mode(layer: nn.Module, training: bool, length: int) -> None:
    """Also for one token with a state in eval mode, where without autograd the decoding step would run."""
    layer.train(training)
    x = tokens(2, length + 8)
    _, state = layer(x[:, :8], return_state=True)
    y, _ = layer(x[:, 8:], state=state, return_state=True)
    got = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
    want = torch.autograd.grad(layer(x)[0][:, 8:].square().sum(), list(layer.parameters()))
    for (name, _), g, w in zip(layer.named_parameters(), got, want, strict=True):
        assert g.any(), f"no gradient reaches {name}"
        assert rel(g, w) < 1e-4, name


@torch.no_grad()
def test_states_are_values(layer: nn.Module) -> None:
    """A state may be continued twice, and is the same afterwards."""
    x, left, right = tokens(2, 10), tokens(2, 4, seed=1), tokens(2, 4, seed=2)
    _, state = layer(x, return_state=True)
    for _ in range(2):  # the second time the state sits in a buffer with room behind it
        before = [p.clone() for p in parts(state)]
        a, sa = layer(left, state=state, return_state=True)
        b, sb = layer(right, state=state, return_state=True)
        c, _ = layer(left[:, :1], state=state)
        a2, sa2 = layer(left, state=sa, return_state=True)
        b2, _ = layer(left, state=sb, return_state=True)
        assert all(torch.equal(p, q) for p, q in zip(parts(state), before, strict=True))
        assert rel(layer(left, state=state)[0], a) < SAME and rel(layer(right, state=state)[0], b) < SAME
        assert rel(c, a[:, :1]) < SAME
        assert rel(layer(left, state=sa)[0], a2) < SAME and rel(layer(left, state=sb)[0], b2) < SAME
        state = sa2


@torch.no_grad()
def test_wrong_states_are_refused(layer: nn.Module) -> None:
    x = tokens(2, 4)
    _, state = layer(x, return_state=True)
    with pytest.raises(ValueError, match="3 rows"):
        layer(tokens(3, 4), state=state)
    other = KDAState(*[torch.zeros(2, 1, 1, 1)] * 4) if isinstance(state, MLAState) else MLAState(x, torch.ones(2))
    with pytest.raises(ValueError, match=type(other).__name__):
        layer(x, state=other)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"cu_seqlens": torch.tensor([0, 3, 9])}, "last value T = 10"),
        ({"cu_seqlens": torch.tensor([0, 7, 3, 10])}, "never decrease"),
        ({"cu_seqlens": torch.tensor([0.0, 10.0])}, "int32 or int64"),
        ({"cu_seqlens": torch.tensor([10])}, "N >= 1"),
        ({"attention_mask": torch.tensor([[True] * 9 + [False]])}, "padding on the left only"),
        ({"attention_mask": torch.ones(1, 9, dtype=torch.bool)}, r"\[B, T\] = \[1, 10\]"),
        ({"attention_mask": torch.ones(1, 10)}, "a bool tensor"),
    ],
)
def test_bad_batches_are_refused(layer: nn.Module, bad: dict[str, Tensor], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        layer(tokens(1, 10), **bad)


def test_a_sequence_without_its_batch_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"x\.shape: expected \[B, T, hidden_size\] = \[B, T, 64\], received \[10, "):
        layer(tokens(1, 10)[0])


def test_another_width_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"x\.shape: expected .* = \[B, T, 64\], received \[1, 10, 32\]"):
        layer(tokens(1, 10)[..., :32])


@pytest.mark.parametrize("kind", [KimiDeltaAttention, GatedMLA])
def test_sizes_in_place_of_a_config_are_refused_by_name(kind: type[nn.Module]) -> None:
    with pytest.raises(TypeError, match=r"config: expected a ModelConfig, .* received int without hidden_size, "):
        kind(64, 2)


def test_packing_needs_one_row(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match="B = 1"):
        layer(tokens(2, 10), cu_seqlens=torch.tensor([0, 4, 10]))

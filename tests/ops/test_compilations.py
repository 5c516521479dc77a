"""One call of a kind compiles all that later calls of the kind need: other lengths, batches and packs, by Triton's own rules of
specialisation (sizes divisible by 16, equal to 1, beyond 32 bits), on a card that compiles nothing (`fake_cuda.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from fake_cuda import SMS, Card, fake_card

import openkda.ops.kda.triton as kda_kernels
import openkda.ops.kda_block.triton as block_kernels
import openkda.ops.norm.triton as norm_kernels
import openkda.ops.short_conv.triton as conv_kernels
from openkda.ops.kda.api import kda
from openkda.ops.kda.call import CALLS as KDA_CALLS
from openkda.ops.kda.gate import BoundedGate, SoftplusGate
from openkda.ops.kda_block.api import BlockState, BlockWeights, kda_block
from openkda.ops.kda_block.call import CALLS as BLOCK_CALLS
from openkda.ops.norm.api import CALLS as NORM_CALLS
from openkda.ops.norm.api import gated_rms_norm, rms_norm
from openkda.ops.short_conv.api import CALLS as CONV_CALLS
from openkda.ops.short_conv.api import short_convs
from openkda.ops.triton import ahead

BF16, F32 = torch.bfloat16, torch.float32
ALL_CALLS = (KDA_CALLS, BLOCK_CALLS, NORM_CALLS, CONV_CALLS)
DENSE = (
    (1, 40),
    (1, 17),
    (1, 333),
    (2, 100),
    (3, 64),
    (2, 33),
    (1, 1),
    (5, 1),
    (2, 3),
    (1, 4),
    (2, 5),
    (1, 16),
    (132, 20),
)
PACKS = ((30, 10), (5, 0, 70, 1, 33), (129, 64), (17,) * 11, (1,) * 16, (40,), (1,), (3,) * 40, (0, 0, 2))
SIZES = ((2, 2, 128, 128), (3, 6, 20, 24), (1, 1, 36, 17), (16, 16, 64, 64), (2, 2, 256, 16))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    for module in (kda_kernels, block_kernels, norm_kernels, conv_kernels):
        monkeypatch.setattr(module, "triton_refusals", lambda x: [])
    for known in ALL_CALLS:
        known.forget()
    monkeypatch.setattr(ahead, "ANY_DEVICE", True)
    monkeypatch.setattr(ahead, "ENABLED", True)
    monkeypatch.setattr(ahead, "_seen", set())
    with fake_card() as card, torch.no_grad():
        yield card
    for known in ALL_CALLS:
        known.forget()


def new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def later(card: Card, call: Callable[..., Any], first: Any, rest: tuple[Any, ...]) -> list[tuple[Any, list[str]]]:
    """What each of `rest` compiled after `first` had run."""
    call(first)
    found = []
    for sizes in rest:
        before = len(card.compiled)
        call(sizes)
        found.append((sizes, card.compiled[before:]))
    return [f for f in found if f[1]]


def forward(
    H: int, HV: int, K: int, V: int, impl: str, states: bool = True, gate: str = "bounded"
) -> Callable[[Any], Any]:
    def call(sizes: tuple[int, ...], packed: bool = False) -> None:
        B, T = (1, sum(sizes)) if packed else sizes
        N = len(sizes) if packed else B
        cu = torch.tensor([0, *sizes]).cumsum(0) if packed else None
        a, dt = new(HV, dtype=F32), new(HV, K, dtype=F32)
        made = BoundedGate(-5.0, a, dt) if gate == "bounded" else SoftplusGate(a, dt)
        kda(
            new(B, T, H, K), new(B, T, H, K), new(B, T, HV, V), new(B, T, HV, K), new(B, T, HV), gate=made, cu_seqlens=cu,
            initial_state=new(N, HV, K, V, dtype=F32) if states else None, output_final_state=states, use_qk_l2norm=True,
            use_beta_sigmoid=True, impl=impl,
        )  # fmt: skip

    return call


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("states", [True, False])
def test_forward(card: Card, sizes: tuple[int, int, int, int], states: bool) -> None:
    call = forward(*sizes, impl="triton", states=states)
    assert not later(card, call, DENSE[0], DENSE[1:])
    assert not later(card, lambda lengths: call(lengths, True), PACKS[0], PACKS[1:])
    assert card.kernels


def test_what_fails_for_other_sizes_is_no_error_yet(
    card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, and raised when it is launched."""
    make = card.compile

    def compile(fn: Any, *rest: Any) -> Any:
        if fn.__name__ == "scan_kernel":
            raise RuntimeError("too large for this card")
        return make(fn, *rest)

    monkeypatch.setattr(card, "compile", compile)
    call = forward(2, 2, 64, 64, impl="triton")
    call((1, 2))
    assert "too large" in caplog.text and [name for name, *_ in card.launches] == ["recurrent_kernel"]
    with pytest.raises(RuntimeError, match="too large"):
        call((1, 40))


def test_it_can_be_switched_off(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "ENABLED", False)
    forward(2, 2, 64, 64, impl="triton")((1, 40))
    assert card.compiled == card.alone == ["prepare_kernel", "scan_kernel"]


@pytest.fixture
def hopper(card: Card, monkeypatch: pytest.MonkeyPatch) -> Card:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")
    import openkda.ops.kda.hopper as implementation
    import openkda.ops.kda.hopper.launch as module

    monkeypatch.setattr(implementation, "_device_refusals", lambda device: [])
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_sm_count", lambda index: SMS)
    monkeypatch.setattr("openkda.ops.kda.hopper.walks._sm_count", lambda index: SMS)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=card))
    return card


@pytest.mark.parametrize("heads", [(80, 80), (48, 48), (12, 12), (4, 8), (2, 2)], ids=str)
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_forward_on_hopper(hopper: Card, heads: tuple[int, int], states: bool, gate: str) -> None:
    call = forward(*heads, 128, 128, impl="hopper", states=states, gate=gate)
    dense = (*(s for s in DENSE if s[1] > 16), (1, 4096), (1, 2000), (4, 1024))
    assert not later(hopper, call, dense[0], dense[1:])
    assert not later(hopper, lambda lengths: call(lengths, True), PACKS[0], (*PACKS[1:], (64,) * 100, (2000, 30)))
    assert hopper.kernels and not hopper.alone


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_training(hopper: Card, impl: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a first step are compiled side by side, none of them twice, and serve other lengths."""
    from openkda.ops.kda.hopper import backward as host

    for name in ("fits", "fits_products", "fits_walks"):
        monkeypatch.setattr(host, name, lambda *a: impl == "hopper")

    def step(T: int) -> None:
        x = [new(1, T, 2, 128).requires_grad_() for _ in range(4)]
        rates = new(2, dtype=F32).requires_grad_(), new(2, 128, dtype=F32).requires_grad_()
        made = BoundedGate(-5.0, *rates) if gate == "bounded" else SoftplusGate(*rates)
        options = {"use_qk_l2norm": True, "use_beta_sigmoid": True}
        with torch.enable_grad():
            kda(*x, new(1, T, 2), gate=made, impl="triton", **options).output.sum().backward()

    before = []
    for T in (40, 64, 130, 33):
        step(T)
        before.append(len(hopper.compiled))
    assert not hopper.alone and len(set(before)) == 1 and before[0] >= 7


def block(H: int, HV: int, K: int, V: int, W: int, T: int) -> Callable[[int], Any]:
    def call(N: int) -> None:
        widths = (H * K, H * K, HV * V)
        tokens = (*(new(N, T, n) for n in widths), new(N, T, HV, K), new(N, T, HV), new(N, T, HV, V))
        weights = BlockWeights(*(new(n, W, dtype=F32) for n in widths), new(V, dtype=F32), 1e-5)
        pool = max(N, 3)
        state = BlockState(new(pool, HV, K, V, dtype=F32), *(new(pool, n, W - 1) for n in widths))
        gate = BoundedGate(-5.0, new(HV, dtype=F32), new(HV, K, dtype=F32))
        kda_block(*tokens, weights=weights, state=state, gate=gate, slots=torch.arange(N), impl="triton")

    return call


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
@pytest.mark.parametrize("T", [1, 3])
def test_decoding(card: Card, sizes: tuple[int, int, int, int], T: int) -> None:
    call = block(*sizes, 4, T)
    assert not later(card, call, 3, (1, 2, 16, 40, 300))
    assert card.kernels


def test_drafted_tokens_of_any_number(card: Card) -> None:
    for sizes in SIZES[:3]:
        assert not later(card, lambda T, s=sizes: block(*s, 4, T)(2), 2, (3, 4, 7, 16, 64))


@pytest.mark.parametrize("heads", [(96, 96), (2, 4)], ids=str)
def test_decoding_on_hopper(card: Card, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")
    from openkda.ops.kda_block import hopper as implementation

    monkeypatch.setattr(implementation, "fits", lambda device, K, V: True)
    assert not later(card, block(*heads, 128, 128, 4, 1), 3, (1, 2, 16, 40, 200))


@pytest.mark.parametrize("width", [64, 20, 17, 1])
@pytest.mark.parametrize("states", [True, False])
def test_convolutions(card: Card, width: int, states: bool) -> None:
    def call(sizes: tuple[int, ...], packed: bool = False) -> None:
        B, T = (1, sum(sizes)) if packed else sizes
        N = len(sizes) if packed else B
        xs, ws = [new(B, T, width)] * 3, [new(width, 4, dtype=F32)] * 3
        cu = torch.tensor([0, *sizes]).cumsum(0) if packed else None
        old = [new(N, width, 3)] * 3 if states else None
        short_convs(xs, ws, initial_states=old, output_final_state=True, cu_seqlens=cu, impl="triton")

    assert not later(card, call, DENSE[0], DENSE[1:])
    assert not later(card, lambda lengths: call(lengths, True), PACKS[0], PACKS[1:])
    assert card.kernels


@pytest.mark.parametrize("width", [64, 20, 17])
def test_norms(card: Card, width: int) -> None:
    def call(sizes: tuple[int, int]) -> None:
        x, w = new(*sizes, 3, width), new(width, dtype=F32)
        rms_norm(x, w, 1e-5, impl="triton"), gated_rms_norm(x, x, w, 1e-5, impl="triton")

    assert not later(card, call, DENSE[0], DENSE[1:])
    assert card.kernels

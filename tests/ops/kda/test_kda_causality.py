"""The future never reaches the past: not by a bit, not through the gradient, not as an infinity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openkda.ops.kda.gate import BoundedGate, SoftplusGate
from openkda.testing.inputs import KDAInputs, make_inputs
from openkda.testing.runs import gradients, outputs

TOKENS = ("q", "k", "v", "g", "beta")
SIZES = {"q": (-0.5, 0.9), "k": (-0.15, 0.17), "v": (-0.5, 0.9), "g": (-20.0, 20.0), "beta": (0.1, 0.9)}  # |k| < 1


def inputs(T: int, gate: str | None) -> KDAInputs:
    """Moderate decays, b = 1: every product in a chunk matters, none is lost in another's rounding."""
    x = make_inputs(0, T=T, H=2, K=32, V=16, gate=gate)
    gen = torch.Generator().manual_seed(1)
    x.g = -0.7 * (0.75 + 0.25 * torch.rand(x.g.shape, generator=gen))
    x.beta = torch.ones_like(x.beta)
    if gate is not None:
        A_log = torch.empty(2).uniform_(1, 16, generator=gen).log()
        dt_bias = 0.1 * torch.rand(2, 32, generator=gen) - 0.05
        x.gate = BoundedGate(-5.0, A_log, dt_bias) if gate == "bounded" else SoftplusGate(A_log, dt_bias)
    x.do[:] = torch.randn(x.do.shape, generator=gen)
    return x


def with_future(x: KDAInputs, P: int, name: str, size: float) -> KDAInputs:
    changed = getattr(x, name).clone()
    changed[:, P:] = size if name != "g" or x.gate is not None else -abs(size)
    return replace(x, **{name: changed})


def seen_until(x: KDAInputs, P: int) -> KDAInputs:
    """The loss reads only o[:, :P]."""
    do = x.do.clone()
    do[:, P:] = 0
    return replace(x, do=do, dS=torch.zeros_like(x.dS))


@pytest.mark.parametrize("gate", ["bounded", "softplus", None])
@pytest.mark.parametrize("T", [17, 22, 31, 33, 49, 65])
def test_future_changes_no_bit_of_the_past(gate: str | None, T: int) -> None:
    x = inputs(T, gate)
    points = sorted({P for P in (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, T - 2, T - 1) if 0 < P < T})
    for P in points:
        for name in TOKENS:
            a, b = (with_future(x, P, name, size) for size in SIZES[name])
            one, two = (outputs(y, impl="chunkwise")["o"][:, :P] for y in (a, b))
            assert torch.equal(one, two), f"{name} at {P}"


@pytest.mark.parametrize("gate", ["bounded", "softplus", None])
@pytest.mark.parametrize("T", [22, 65])
def test_future_changes_no_bit_of_the_past_gradient(gate: str | None, T: int) -> None:
    x = inputs(T, gate)
    for P in {1, 15, 16, 21, T // 2, T - 1}:
        for name in TOKENS:
            a, b = (gradients(seen_until(with_future(x, P, name, s), P), impl="chunkwise") for s in SIZES[name])
            for n in TOKENS:
                assert torch.equal(a[f"d{n}"][:, :P], b[f"d{n}"][:, :P]), f"d{n} changed with {name} from {P} on"
                assert not bool(a[f"d{n}"][:, P:].any()), f"d{n} reaches past {P}"
            assert torch.equal(a["dinitial_state"], b["dinitial_state"])


@pytest.mark.parametrize("gate", ["bounded", "softplus", None])
@pytest.mark.parametrize("P", [1, 15, 16, 17, 47, 63, 64, 65])
def test_huge_future_values(gate: str | None, P: int) -> None:
    """1e30 everywhere from P on overflows to inf and NaN there; before P nothing moves."""
    x = inputs(130, gate)
    huge, zero = x, x
    for name in ("q", "k", "v", "beta"):
        huge, zero = with_future(huge, P, name, 1e30), with_future(zero, P, name, 0.0)
    got, want = (outputs(y, impl="chunkwise")["o"] for y in (huge, zero))
    assert bool(torch.isfinite(got[:, :P]).all())
    assert torch.equal(got[:, :P], want[:, :P])
    assert not bool(torch.isfinite(got[:, P:]).all())  # the overflow did happen


@pytest.mark.parametrize("gate", ["bounded", "softplus", None])
@pytest.mark.parametrize("P", [1, 15, 16, 17, 47, 63, 64, 65, 128])
def test_no_gradient_comes_out_of_what_overflowed_later(gate: str | None, P: int) -> None:
    """1e30 from P on, a loss of the outputs before: 0 times infinity is NaN, in every sum over the chunk and its state."""
    x = inputs(130, gate)
    for names in (("q", "k", "v", "beta"), ("k", "beta"), ("k",), ("v", "beta")):
        huge, zero = x, x
        for name in names:
            huge, zero = with_future(huge, P, name, 1e30), with_future(zero, P, name, 0.0)
        got, want = (gradients(seen_until(y, P), impl="chunkwise") for y in (huge, zero))
        for name in want.keys() - {"o", "S", *(f"d{n}" for n in TOKENS)}:
            assert torch.equal(got[name], want[name]), f"{name} with {names}"
        for name in TOKENS:
            assert torch.equal(got[f"d{name}"][:, :P], want[f"d{name}"][:, :P]), f"d{name} with {names}"
            assert not bool(got[f"d{name}"][:, P:].any()), f"d{name} with {names}"


def test_only_what_no_gradient_reaches_is_left_out() -> None:
    """Grouped heads, two rows, segments of one chunk: row 0 is read until 70, row 1 to its end, and its second head nowhere."""
    x = make_inputs(7, B=2, T=200, H=2, HV=4, K=16, gate="softplus")
    x.do[0, 70:], x.do[:, :, 1] = 0, 0
    x.dS[0], x.dS[:, 1] = 0, 0
    y = replace(x, **{n: getattr(x, n).clone() for n in ("q", "k", "v", "beta")})
    for name in ("q", "k", "v", "beta"):
        getattr(y, name)[0, 70:] = 1e30
    got, want = gradients(y, impl="chunkwise"), gradients(x, impl="chunkwise")
    for name in TOKENS:
        assert torch.equal(got[f"d{name}"][1], want[f"d{name}"][1])
        assert torch.equal(got[f"d{name}"][0, :70], want[f"d{name}"][0, :70])
        assert not bool(got[f"d{name}"][0, 70:].any())
    assert torch.equal(got["dinitial_state"], want["dinitial_state"])


@pytest.mark.parametrize("gate", ["bounded", "softplus", None])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_later_token_that_is_no_number(gate: str | None, value: float) -> None:
    """Each input alone, from token 40 on: the tiles before that token's hold what they would have held."""
    x = inputs(70, gate)
    want = outputs(x, impl="chunkwise")["o"][:, :32]
    for name in TOKENS:
        y = with_future(x, 40, name, value)
        got = outputs(y, impl="chunkwise")["o"][:, :32]
        torch.testing.assert_close(got, want, msg=lambda m, name=name: f"{name}: {m}")
        found = gradients(seen_until(y, 32), impl="chunkwise")
        assert all(bool(torch.isfinite(g).all()) for n, g in found.items() if n not in ("o", "S")), name


def test_neighbour_of_nan_in_the_pack_and_in_the_batch() -> None:
    x = make_inputs(5, T=0, H=2, K=16, lengths=(70, 40, 64))
    y = make_inputs(5, T=0, H=2, K=16, lengths=(70, 40, 64))
    for name in TOKENS:
        getattr(y, name)[:, 70:110] = float("nan")
    a, b = gradients(x, impl="chunkwise"), gradients(y, impl="chunkwise")
    for n in ("o", *(f"d{t}" for t in TOKENS)):
        assert torch.equal(a[n][:, :70], b[n][:, :70])
        assert torch.equal(a[n][:, 110:], b[n][:, 110:])
    for n in ("S", "dinitial_state"):
        assert torch.equal(a[n][[0, 2]], b[n][[0, 2]])
    x, y = make_inputs(6, B=3, T=70, H=2, K=16), make_inputs(6, B=3, T=70, H=2, K=16)
    for name in TOKENS:
        getattr(y, name)[1] = float("nan")
    a, b = gradients(x, impl="chunkwise"), gradients(y, impl="chunkwise")
    for n in ("o", "S", "dinitial_state", *(f"d{t}" for t in TOKENS)):
        assert torch.equal(a[n][[0, 2]], b[n][[0, 2]])

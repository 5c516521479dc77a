"""Stretches of a sequence side by side, each from the state that really enters it: outputs, states, gradients of the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.ops.kda.api import kda
from openkda.ops.kda.two_level import entering_states, kda_stretch
from openkda.testing.compare import check_close
from openkda.testing.inputs import KDAInputs, make_inputs

TOKENS = ("q", "k", "v", "g", "beta")


def whole(x: KDAInputs) -> tuple[Tensor, Tensor]:
    out = kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs())
    assert out.final_state is not None
    return out.output, out.final_state


def by_stretches(x: KDAInputs, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """As ranks would, which hold nothing of one another but their `Stretch`."""
    rows = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, x.q.shape[1]], strict=True)]
    parts = [replace(x, **{n: getattr(x, n)[:, r] for n in TOKENS}) for r in rows]
    options: dict[str, Any] = {"gate": x.gate, **x.options}
    stretches = [kda_stretch(p.k, p.v, p.g, p.beta, **options) for p in parts]
    states = entering_states(stretches, x.initial_state)
    outputs = [whole(replace(p, initial_state=S)) for p, S in zip(parts, states, strict=False)]
    check_close(
        "the last stretch's state and the merged one",
        outputs[-1][1],
        states[-1],
        2e-3 if x.q.dtype.itemsize == 2 else 1e-5,
    )
    return torch.cat([o for o, _ in outputs], 1), states[-1]


def even(T: int, count: int) -> list[int]:
    return [T * i // count for i in range(1, count)]


@pytest.mark.parametrize("decay", [-1e-4, -3.0])
def test_slow_and_fast_decay_in_any_number_of_stretches(decay: float) -> None:
    """The error does not grow with their number: nothing of the state is thrown away, and nothing squared."""
    x = make_inputs(0, T=1024, H=2, HV=4, K=16, V=24, gate=None)
    x.g = decay * (0.5 + torch.rand(x.g.shape, generator=torch.Generator().manual_seed(1)))
    x.initial_state = 10 * x.initial_state  # type: ignore[operator]
    with torch.no_grad():
        want = whole(x.to(dtype=torch.float64))
        for cuts in (even(1024, 4), even(1024, 8), [1, 2, 700]):
            for a, b in zip(by_stretches(x, cuts), want, strict=True):
                check_close(f"{len(cuts) + 1} stretches", a, b, 2e-5)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_gradients_cross_the_cuts(gate: str) -> None:
    x = make_inputs(2, B=2, T=70, K=8, gate=gate, use_qk_l2norm=True, use_beta_sigmoid=True).to(dtype=torch.float64)
    x.requires_grad_()
    leaves = list(x.tensors().values())
    found = [torch.autograd.grad(ends, leaves, [x.do, x.dS]) for ends in (whole(x), by_stretches(x, [13, 64]))]
    for name, a, b in zip(x.tensors(), *found, strict=True):
        check_close(name, b, a, 1e-10)


def test_members_of_a_pack() -> None:
    x = make_inputs(3, lengths=(5, 0, 40, 1), H=1, HV=2, K=8, V=16).to(dtype=torch.float64)
    with torch.no_grad():
        one = kda_stretch(x.k, x.v, x.g, x.beta, gate=x.gate, cu_seqlens=x.options["cu_seqlens"])
        assert x.initial_state is not None
        check_close("states", entering_states([one], x.initial_state)[1], whole(x)[1], 1e-12)
        assert (
            torch.equal(one.transition[1], torch.eye(8, dtype=torch.float64).expand(2, 8, 8)) and not one.own[1].any()
        )


def test_states_of_other_sequences_are_refused() -> None:
    """Torch would spread one state over all of them."""
    x = make_inputs(5, B=3, T=9, H=2, K=8, V=16)
    three, one = (kda_stretch(x.k[:n], x.v[:n], x.g[:n], x.beta[:n], gate=x.gate) for n in (3, 1))
    S = torch.zeros(3, 2, 8, 16)
    for stretches, state, error, message in [
        ([], None, ValueError, "at least one"),
        (
            [three, one],
            None,
            ValueError,
            r"stretches\[1\].own.shape: expected \[3, 2, 8, 16\], received \[1, 2, 8, 16\]",
        ),
        ([three], S[:1], ValueError, r"initial_state.shape: expected \[3, 2, 8, 16\], received \[1, 2, 8, 16\]"),
        ([three], S[0], ValueError, "initial_state.shape"),
        ([three], S[..., :1], ValueError, "initial_state.shape"),
        ([three], S.double(), TypeError, "initial_state.dtype: expected torch.float32, received torch.float64"),
    ]:
        with pytest.raises(error, match=message):
            entering_states(stretches, state)
    assert len(entering_states((three, three), S)) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shift", [-6.0, 0.0])
def test_on_a_gpu(shift: float) -> None:
    """bfloat16, with the kernels that run there by themselves."""
    x = make_inputs(4, T=1024, H=2, K=128, use_qk_l2norm=True, use_beta_sigmoid=True, unit_keys=False)
    x.g = x.g + shift
    x = x.to(dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        want = whole(x.to(dtype=torch.float64))
        for count in (2, 4, 8):
            for limit, a, b in zip((3e-3, 1e-3), by_stretches(x, even(1024, count)), want, strict=True):
                check_close(f"{count} stretches", a, b, limit)

"""Where there are no values: fake and meta tensors get their shapes, a traced pool is not looked at, and nothing is read."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from openkda.ops.kda.api import KDAOutput, kda, kda_step
from openkda.testing.compare import check_close
from openkda.testing.inputs import KDAInputs, make_inputs

CASES: dict[str, dict[str, Any]] = {
    "batch": {"B": 2, "T": 20},
    "pack": {"lengths": (3, 0, 17)},
    "positions": {"B": 2, "T": 20, "state_positions": torch.tensor([3, 25])},
    "normalised": {"B": 2, "T": 20, "use_qk_l2norm": True, "gate": None},
    "v first": {"B": 2, "T": 20, "state_v_first": True, "initial_state": False},
}


def run(x: KDAInputs) -> KDAOutput:
    return kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs())


def moved(x: KDAInputs, change: Any) -> KDAInputs:
    """x with every tensor through `change`."""
    gate = x.gate
    if gate is not None:
        gate = type(gate)(**{n: change(t) if isinstance(t, Tensor) else t for n, t in vars(gate).items()})
    options = {n: change(o) if isinstance(o, Tensor) else o for n, o in x.options.items()}
    own = {n: change(t) if isinstance(t, Tensor) else t for n, t in vars(x).items()}
    return KDAInputs(**{**own, "gate": gate, "options": options})


def shapes(out: KDAOutput) -> list[Any]:
    return [None if t is None else (tuple(t.shape), t.dtype) for t in out]


@pytest.mark.parametrize("case", CASES)
def test_fake_and_meta_tensors_get_their_shapes(case: str) -> None:
    x = make_inputs(0, H=2, HV=4, K=8, V=6, **CASES[case])
    want = shapes(run(x))
    assert shapes(run(moved(x, lambda t: t.to("meta")))) == want
    with FakeTensorMode() as mode:
        assert shapes(run(moved(x, mode.from_tensor))) == want
    assert shapes(run(moved(x, FakeTensorMode().from_tensor))) == want  # outside their mode


def test_fake_step() -> None:
    x = make_inputs(0, B=2, T=1, H=2, HV=4, K=8, V=6, use_qk_l2norm=True)
    tokens = [t[:, 0] for t in (x.q, x.k, x.v, x.g, x.beta)]
    mode = FakeTensorMode()
    for place, inside in ((mode.from_tensor, mode), (lambda t: t.to("meta"), contextlib.nullcontext())):
        assert x.initial_state is not None
        with inside:
            options: dict[str, Any] = {"gate": moved(x, place).gate, "use_qk_l2norm": True}
            o, state = kda_step(*map(place, tokens), place(x.initial_state), **options)
        assert o.shape == (2, 4, 6) and state.shape == (2, 4, 8, 6)


def test_a_pool_in_a_full_graph() -> None:
    x = make_inputs(0, B=2, T=20, H=2, HV=4, K=8, V=6)
    tokens, slots = (x.q, x.k, x.v, x.g, x.beta), torch.tensor([3, -1])
    start = torch.randn(5, 4, 8, 6)

    def whole(pool: Tensor, slots: Tensor) -> Tensor:
        return kda(*tokens, gate=x.gate, initial_state=pool, state_indices=slots).output

    def step(pool: Tensor, slots: Tensor) -> Tensor:
        return kda_step(*(t[:, 0] for t in tokens), pool, gate=x.gate, state_indices=slots)[0]

    for f in (whole, step):
        a, b = start.clone(), start.clone()
        with torch.no_grad():
            check_close("output", torch.compile(f, backend="aot_eager", fullgraph=True)(a, slots), f(b, slots), 1e-6)
        check_close("pool", a, b, 1e-6)
        assert not torch.equal(a, start)


def test_a_scale_may_be_a_symbol() -> None:
    x = make_inputs(0, T=20, K=8)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def f(scale: float) -> Tensor:
        return kda(x.q, x.k, x.v, x.g, x.beta, gate=x.gate, scale=scale).output

    for scale in (0.25, 0.75):
        check_close("output", f(scale), kda(x.q, x.k, x.v, x.g, x.beta, gate=x.gate, scale=scale).output, 1e-6)

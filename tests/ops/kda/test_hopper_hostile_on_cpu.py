"""Hostile calls of the Hopper kernels' own source on a CPU (`hopper_on_cpu.py`): values at their ends, memory laid out in every
way, and how far what is not finite reaches; each through `kda`, forward and backward, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import backward_checks as checks

from openkda.ops.kda.hopper import SCALES, TRITON_RELEASE, _triton_release

if _triton_release() != TRITON_RELEASE:
    pytest.skip(f"Gluon of Triton {TRITON_RELEASE}", allow_module_level=True)
from hopper_on_cpu import hopper_on_cpu

from openkda.ops.kda.api import kda
from openkda.ops.kda.hopper import launch, walks
from openkda.testing.compare import rel
from openkda.testing.inputs import KDAInputs, make_inputs
from openkda.testing.runs import gradients, outputs

SIZES: dict[str, Any] = {"T": 70, "H": 1, "K": 128, "gate": "bounded"}


def inputs(seed: int = 1, **sizes: Any) -> KDAInputs:
    options = {"use_qk_l2norm": True, "use_beta_sigmoid": True, "unit_keys": False}
    return make_inputs(seed, **options | SIZES | sizes).to(dtype=torch.bfloat16)


def on_the_cpu(x: KDAInputs, **options: Any) -> dict[str, Tensor]:
    with hopper_on_cpu(**options):
        return gradients(x, impl="hopper")


def hold(name: str, x: KDAInputs, got: dict[str, Tensor]) -> None:
    want = checks.reference(x)
    assert rel(got["o"], want["o"]) <= 3e-3 and rel(got["S"], want["S"]) <= 1e-3, name
    checks.hold(name, x, {n: t for n, t in got.items() if n[0] == "d"}, want)


def fill(name: str, value: float, rows: slice = slice(None)) -> Callable[[KDAInputs], None]:
    return lambda x: getattr(x, name)[:, rows].fill_(value)


def scaled(value: float, *names: str, rows: slice = slice(None)) -> Callable[[KDAInputs], None]:
    def change(x: KDAInputs) -> None:
        for n in names:
            getattr(x, n)[:, rows].mul_(value)

    return change


def rates(value: float) -> Callable[[KDAInputs], None]:
    return lambda x: x.gate.A_log.fill_(value)  # type: ignore[union-attr]


VALUES: dict[str, Callable[[KDAInputs], object]] = {
    "writes nothing": fill("beta", -1e4),
    "hardly writes": fill("beta", -14.0),
    "some write nothing": fill("beta", -60.0, slice(0, None, 2)),
    "writes all": fill("beta", 1e4),
    "rates of e^90": rates(90.0),
    "rates of e^-90": rates(-90.0),
    "forgets nothing": fill("g", -1e4),
    "forgets all": fill("g", 1e4),
    "forgets all in between": fill("g", 3e38, slice(40, 60)),
    "keys of zero": fill("k", 0.0, slice(3, 40)),
    "denormal keys": scaled(1e-39, "k", rows=slice(3, 40)),
    "denormal queries": scaled(1e-39, "q", rows=slice(3, 40)),
    "long keys and queries": scaled(1e17, "q", "k", rows=slice(3, 40)),
    "nothing upstream": scaled(0.0, "do", "dS"),
    "huge upstream": scaled(1e30, "do", "dS"),
    "tiny upstream": scaled(1e-30, "do", "dS"),
    "little of the output": scaled(1e-5, "do"),
    "little of half the output": scaled(1e-5, "do", rows=slice(0, 40)),
    "huge values": scaled(1e20, "v", "initial_state"),  # the forward's scales end at 2^71
    "no values": scaled(0.0, "v", "initial_state"),
}


@pytest.mark.parametrize("name, gate", [(name, ("bounded", "softplus")[i % 2]) for i, name in enumerate(VALUES)])
def test_values(name: str, gate: str) -> None:
    x = inputs(gate=gate)
    VALUES[name](x)
    hold(name, x, on_the_cpu(x))


@pytest.mark.parametrize("schedule, gate", [("fused", "bounded"), ("two_pass", "bounded"), ("two_pass", "softplus")])
def test_scales_that_leave_queries_their_bits(schedule: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float16 keeps queries with the scale inside: at the ends of what is taken, queries along one channel included; beyond
    them the call is another's (a scale of 1e-6 once gave an output 40 % off)."""
    monkeypatch.setattr(launch, "choose", lambda *sizes: schedule)
    x = inputs(gate=gate)
    x.q[:, ::3, :, 1:], x.k[:, ::5, :, 1:] = 0, 0
    for scale in (*SCALES, -SCALES[0], -1.0):
        x.options["scale"] = scale
        y = x.to(dtype=torch.float64)
        with hopper_on_cpu():
            got = kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), impl="hopper")
        want = kda(y.q, y.k, y.v, y.g, y.beta, **y.kwargs(), impl="reference")
        assert rel(got.output, want.output) <= 3e-3, scale
    for scale in (0.0, 1e-4, -1e-4, 1e4):
        x.options["scale"] = scale
        with hopper_on_cpu(), pytest.raises(NotImplementedError, match="a scale of 2"):
            kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), impl="hopper")


@pytest.mark.parametrize("keep", [False, True], ids=["computed again", "kept"])
@pytest.mark.parametrize("form", ["transposed", "expanded", "every other"])
def test_states_of_any_layout(form: str, keep: bool) -> None:
    """One row expanded over a batch is how a learned first state comes."""
    x = inputs(B=2, T=70, recompute=not keep)
    for n in ("initial_state", "dS"):
        t = getattr(x, n)
        if form == "transposed":
            t = t.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif form == "expanded":
            t = t[:1].expand_as(t)
        else:
            t = torch.stack([t, torch.full_like(t, float("nan"))], 2)[:, :, 0]
        setattr(x, n, t)
    hold(form, x, on_the_cpu(x))


@pytest.mark.parametrize("keep", [False, True], ids=["computed again", "kept"])
def test_kernels_go_to_the_device_of_the_tensors(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is current: here number 3, and None is a CPU's."""
    now: list[int | None] = [3]

    @contextmanager
    def device(other: torch.device) -> Iterator[None]:
        now.append(other.index)
        yield
        now.pop()

    x = inputs(T=20, recompute=not keep).requires_grad_()
    with hopper_on_cpu() as names, monkeypatch.context() as inner:  # undone before the other
        inner.setattr(torch.cuda, "current_device", lambda: now[-1])
        inner.setattr(torch.cuda, "device", device)
        seen: list[int | None] = []
        for module in (launch, walks):
            run = module._launch
            inner.setattr(module, "_launch", lambda *a, run=run, **o: (seen.append(now[-1]), run(*a, **o)))
        kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), impl="hopper")
        assert len(names) == len(seen) == 2 and set(seen) == {None}


@pytest.mark.parametrize(
    "sizes",
    [{"lengths": (0, 1, 63, 64, 65, 0)}, {"lengths": (127, 0, 2)}, {"T": 17}, {"B": 2, "T": 65, "HV": 2}],
    ids=str,
)
@pytest.mark.parametrize("keep", [False, True], ids=["computed again", "kept"])
def test_shapes_on_memory_of_any_content(sizes: dict[str, Any], keep: bool) -> None:
    """Half a head a program and whole heads give the same bits, whatever lay in the memory before."""
    x = inputs(recompute=not keep, **sizes)
    got = on_the_cpu(x)
    hold(str(sizes), x, got)
    other = on_the_cpu(x, processors=1, poison=1e4)
    assert all(torch.equal(got[n], other[n]) for n in got)


@pytest.mark.parametrize("name, value", [("do", float("inf")), ("v", float("inf")), ("g", float("nan"))])
def test_what_is_not_finite_stays_in_its_head_and_row_of_the_batch(name: str, value: float) -> None:
    x = inputs(B=2, T=80, H=2)
    want = on_the_cpu(x)
    getattr(x, name)[1, 50, 1, 5] = value
    got = on_the_cpu(x)
    for n in checks.TOKENS:
        a, b = got[f"d{n}"], want[f"d{n}"]
        assert torch.equal(a[0], b[0]) and torch.equal(a[1, :, 0], b[1, :, 0]), n
        if name == "do":  # and tokens of later chunks know nothing of it
            assert torch.equal(a[1, 64:], b[1, 64:]), n
    assert torch.equal(got["dinitial_state"][0], want["dinitial_state"][0])
    assert torch.equal(got["ddt_bias"][0], want["ddt_bias"][0])
    assert not bool(got["dk"].isfinite().all()) and not bool(got["dA_log"].isfinite().all())


@pytest.mark.parametrize("gate, schedule", [("bounded", "two_pass"), ("bounded", "fused"), ("softplus", "two_pass")])
def test_later_tokens_change_no_bit_of_near_equal_keys(
    gate: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of such keys have factors of their own (`apart.py`): no token of them feels one behind it, whether that is near or
    makes the tile so."""
    monkeypatch.setattr(launch, "choose", lambda *sizes: schedule)
    near = inputs(gate=gate, near_equal_keys=True, decay="slow")
    far = inputs(2, gate=gate, decay="slow")
    far.beta = near.beta
    for x, other in ((near, far), (far, near)):
        with hopper_on_cpu():
            want = outputs(x, impl="hopper")["o"]
        for P in (8, 15, 31, 62, 63):
            for n in ("k", "g"):
                y = x.to()
                getattr(y, n)[:, P:] = getattr(other, n)[:, P:]
                with hopper_on_cpu():
                    got = outputs(y, impl="hopper")["o"]
                assert torch.equal(got[:, :P], want[:, :P]), f"{n} from token {P} on"

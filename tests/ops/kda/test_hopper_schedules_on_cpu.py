"""Windows and segments of the Hopper forward on a CPU: the host code over the kernels' own source, fresh memory full of NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from hopper_on_cpu import hopper_on_cpu

from openkda.ops.kda.api import KDAOutput, kda
from openkda.ops.kda.hopper import TRITON_RELEASE, _triton_release

if _triton_release() != TRITON_RELEASE:
    pytest.skip(f"Gluon of Triton {TRITON_RELEASE}", allow_module_level=True)
from openkda.ops.kda.hopper import launch, schedule
from openkda.testing.compare import check_close
from openkda.testing.inputs import KDAInputs, make_inputs

OPTIONS = {"H": 1, "HV": 2, "K": 128, "use_qk_l2norm": True, "use_beta_sigmoid": True, "unit_keys": False}


def run(
    monkeypatch: pytest.MonkeyPatch, x: KDAInputs, kind: Any, plan: tuple[int, ...] = (), beside: bool = True
) -> tuple[KDAOutput, str]:
    """The call, by this schedule and in windows of so many chunks; and the kernels that it launched."""
    windows = tuple(schedule.Window(n, i % 2 == 1, beside) for i, n in enumerate(plan))
    monkeypatch.setattr(launch, "choose", lambda *sizes: kind)
    monkeypatch.setattr(launch, "windows", lambda chunks, *sizes: windows or (schedule.Window(chunks, True),))
    with hopper_on_cpu() as names:
        out = kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), impl="hopper")
    return out, " ".join(n.removeprefix("kda_").split("_")[0] for n in names)


def same(a: KDAOutput, b: KDAOutput) -> bool:
    assert a.final_state is not None and b.final_state is not None
    return torch.equal(a.output, b.output) and torch.equal(a.final_state, b.final_state)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("fits", [True, False])
def test_windows_change_no_bit(monkeypatch: pytest.MonkeyPatch, gate: str, fits: bool) -> None:
    x = make_inputs(5, T=330, gate=gate, decay="slow", **OPTIONS).to(dtype=torch.bfloat16)
    whole, names = run(monkeypatch, x, "two_pass")
    assert names == "prepare scan"
    if not fits:
        monkeypatch.setattr(schedule, "WORKSPACE", 4 * 2 * schedule.SLOT_BYTES)
    for plan in ((2, 2, 2),) if not fits else ((2, 1, 3), (1, 1, 1, 1, 1, 1)):
        found, names = run(monkeypatch, x, "two_pass", plan)
        assert names == " ".join(["prepare scan"] * len(plan)) and same(found, whole)
    assert fits or same(run(monkeypatch, x, "two_pass", (4, 2), beside=False)[0], whole)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_a_pack_of_one_is_its_sequence(monkeypatch: pytest.MonkeyPatch, gate: str) -> None:
    """What a server sends for one prompt: in windows or segments, which packs cannot be cut into; and beyond the workspace."""
    x = make_inputs(7, lengths=(330,), gate=gate, decay="random", **OPTIONS).to(dtype=torch.bfloat16)
    y = x.to()
    del y.options["cu_seqlens"]
    assert x.options["cu_seqlens"].tolist() == [0, 330]
    for kind, plan, kernels in (
        ("two_pass", (2, 4), "prepare scan prepare scan"),
        (("segments", 3), (), "prepare ends prepare merge scan"),
    ):
        found, names = run(monkeypatch, x, kind, plan)
        assert names == kernels and same(found, run(monkeypatch, y, kind, plan)[0])
    monkeypatch.setattr(schedule, "WORKSPACE", 4 * 2 * schedule.SLOT_BYTES)
    assert same(run(monkeypatch, x, "two_pass", (2, 2, 2))[0], run(monkeypatch, y, "two_pass", (2, 2, 2))[0])


@pytest.mark.parametrize("batch, T, count, tail", [(1, 330, 3, " prepare"), (1, 129, 2, " prepare"), (2, 256, 2, "")])
def test_segments_against_the_loop(monkeypatch: pytest.MonkeyPatch, batch: int, T: int, count: int, tail: str) -> None:
    """Of one sequence the last segment is prepared beside the ends of the others; its scan gives the final state."""
    x = make_inputs(6, T=T, B=batch, gate="bounded", decay="random", **OPTIONS).to(dtype=torch.bfloat16)
    wide = x.to(dtype=torch.float64)
    want = kda(wide.q, wide.k, wide.v, wide.g, wide.beta, **wide.kwargs(), impl="reference")
    found, names = run(monkeypatch, x, ("segments", count))
    assert names == f"prepare ends{tail} merge scan"
    check_close("output", found.output, want.output, 3e-3)
    assert found.final_state is not None
    check_close("state", found.final_state, want.final_state, 1e-3)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(x, name)[:, T - 1] = 3.0
    later, _ = run(monkeypatch, x, ("segments", count))
    assert torch.equal(later.output[:, : T - 1], found.output[:, : T - 1]) and not same(later, found)

"""The scan that norms its output, on a CPU: its own source against the plain scan and a norm, and no two roles touch a byte in
no order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import gluon_clocks_on_cpu as on_cpu
import hopper_on_cpu as host
from hopper_on_cpu import hopper_on_cpu

from openkda.ops.kda.api import BoundedGate
from openkda.ops.kda.hopper import BOUNDED, TRITON_RELEASE, _triton_release

if _triton_release() != TRITON_RELEASE:
    pytest.skip(f"Gluon of Triton {TRITON_RELEASE}", allow_module_level=True)
from openkda.ops.kda.hopper import launch, schedule
from openkda.ops.norm.api import gated_rms_norm
from openkda.testing.inputs import KDAInputs, make_inputs

OPTIONS = {"K": 128, "use_qk_l2norm": True, "use_beta_sigmoid": True, "unit_keys": False, "gate": "bounded"}
EPS = 1e-5
SIZES: dict[str, dict[str, Any]] = {
    "one chunk": {"T": 64, "H": 1},
    "few tokens": {"T": 17, "H": 1},
    "long": {"T": 449, "H": 1, "HV": 2},
    "rows": {"T": 130, "B": 2, "H": 1},
    "pack": {"lengths": (0, 1, 66, 130, 0), "H": 1},
}


def drawn(x: KDAInputs) -> tuple[Tensor, Tensor]:
    """The norm's gate, one of three tensors side by side, and its weight."""
    generator = torch.Generator().manual_seed(3)
    wide = 4 * torch.randn(*x.v.shape[:2], 3 * x.v.shape[2], 128, generator=generator)
    return wide.bfloat16()[:, :, x.v.shape[2] : 2 * x.v.shape[2]], 1 + 0.3 * torch.randn(128, generator=generator)


def run(x: KDAInputs, norm: launch.Norm | None, plan: tuple[Any, ...] = ()) -> tuple[Tensor, Tensor, list[str]]:
    assert isinstance(x.gate, BoundedGate)
    with hopper_on_cpu() as names, pytest.MonkeyPatch.context() as patch:
        if plan:
            patch.setattr(launch, "windows", lambda *sizes: plan)
        o, st = launch.forward(
            x.q, x.k, x.v, x.g, x.beta.contiguous(), x.gate.A_log.float(), x.gate.dt_bias.float().flatten(), scale=128**-0.5,
            lower_bound=x.gate.lower_bound, initial_state=x.initial_state, final_state=True, gate=BOUNDED,
            cu_seqlens=x.options.get("cu_seqlens"), schedule="two_pass", norm=norm,
        )  # fmt: skip
    assert st is not None
    return o, st, names


@pytest.mark.parametrize("name", SIZES)
def test_is_the_norm_behind_the_scan(name: str) -> None:
    """The same states to the bit; outputs as close as one rounding of bfloat16 of a sum taken in another order."""
    x = make_inputs(5, decay="random", **OPTIONS | SIZES[name]).to(dtype=torch.bfloat16)
    gate, weight = drawn(x)
    o, states, _ = run(x, None)
    want = gated_rms_norm(o, gate, weight, EPS)
    y, st, names = run(x, launch.Norm(gate, weight, EPS))
    assert names == ["kda_prepare_kernel", "kda_normed_scan_kernel"]
    assert torch.equal(st, states)
    assert bool(((y.float() - want.float()).abs() <= 2**-7 * want.float().abs()).all())
    assert (y != want).float().mean() < 1e-2
    if "T" in SIZES[name] and SIZES[name].get("B", 1) == 1:
        chunks = -(-SIZES[name]["T"] // 64)
        for width in {1, max(chunks - 1, 1)}:
            plan = tuple(schedule.Window(min(width, chunks - c), False) for c in range(0, chunks, width))
            again, st, _ = run(x, launch.Norm(gate, weight, EPS), plan)
            assert torch.equal(again, y) and torch.equal(st, states)


@pytest.mark.parametrize(
    "statement",
    ["mbarrier.wait(gate_full.index(st), phase)", "mbarrier.wait(o_ready.index(st), phase)",
     "mbarrier.wait(bars[3].index(st), phase ^ 1)"],
)  # fmt: skip
def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch, statement: str) -> None:
    """The detector itself."""
    kernels = on_cpu.load(*host._FORWARD, without=statement)
    monkeypatch.setattr(host, "_kernels", lambda: kernels)
    x = make_inputs(5, T=449, H=1, decay="random", **OPTIONS).to(dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="a race"):
        run(x, launch.Norm(*drawn(x), EPS))

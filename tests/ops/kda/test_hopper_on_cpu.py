"""The Hopper forward's own source on a CPU: against the float64 loop, and no two roles touch a byte in no order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import gluon_clocks_on_cpu as on_cpu

from openkda.ops.kda.api import BoundedGate, kda
from openkda.ops.kda.hopper import TRITON_RELEASE, _triton_release

if _triton_release() != TRITON_RELEASE:
    pytest.skip(f"Gluon of Triton {TRITON_RELEASE}", allow_module_level=True)
from openkda.ops.kda.hopper import (
    apart,
    chains,
    factors,
    forward,
    fused_factors,
    fused_state,
    instructions,
    launch,
    prepare,
    scan,
    state,
)
from openkda.testing.compare import check_close, rel
from openkda.testing.inputs import KDAInputs, make_inputs

MODULES = (instructions, factors, apart, chains, state, prepare, scan, fused_factors, fused_state, forward)
HEADS: dict[str, Any] = {
    "H": 1,
    "K": 128,
    "gate": "bounded",
    "use_qk_l2norm": True,
    "use_beta_sigmoid": True,
    "unit_keys": False,
}
CASES: dict[str, dict[str, Any]] = {
    "partial": {"T": 150, "decay": "random"},
    "grouped": {"T": 70, "HV": 2, "decay": "slow"},
    "pack": {"lengths": (0, 1, 66, 130), "decay": "random"},
    "near": {"T": 193, "decay": "slow", "near_equal_keys": True},
    "fast": {"T": 128, "decay": "fast"},
}


def inputs(name: str) -> KDAInputs:
    return make_inputs(5, **HEADS | CASES[name]).to(dtype=torch.bfloat16)


def on_the_cpu(
    x: KDAInputs, schedule: str, parts: bool, load: Any = on_cpu.load, **changes: str
) -> tuple[Tensor, Tensor]:
    kernels = load(*MODULES, **changes)
    assert isinstance(x.gate, BoundedGate)
    (B, T, H, _), HV, cu = x.q.shape, x.v.shape[2], x.options.get("cu_seqlens")
    n = B if cu is None else len(cu) - 1
    rows = lambda t, columns: on_cpu.Matrix(t.reshape(T, -1), (64, columns))  # noqa: E731
    o, st = torch.zeros_like(x.v), torch.full((n, HV, 128, 128), float("nan"))
    s0 = torch.zeros_like(st) if x.initial_state is None else x.initial_state.float()
    ranks = torch.full((chains.MARKS.value + 4 * n * HV,), -1, dtype=torch.int32)
    q, k, v, g, beta = (t.contiguous() for t in (x.q, x.k, x.v, x.g, x.beta))
    rates = x.gate.A_log.float(), x.gate.dt_bias.float().reshape(-1)
    tail = (128**-0.5, x.gate.lower_bound)
    if schedule == "fused":
        if cu is not None:
            on_cpu.run(kernels["kda_ranks_kernel"], 1, [ranks, cu.int(), n, 16])
        for again in (False, True) if parts else (False,):
            on_cpu.run(kernels["kda_forward_kernel"], 2, [
                rows(q, 128), rows(k, 128), rows(g, 128), rows(v, 64), rows(o, 64), o, beta, *rates, s0, st, ranks,
                HV, HV // H, T, n * HV, *tail, 1, True, cu is not None, again,
            ])  # fmt: skip
        return o, st
    if schedule == "windows":
        in_windows(x, kernels, parts, s0, o, st)
        return o, st
    slots = launch.slots(T, n, cu is not None) * HV
    wide, quarters = torch.zeros(slots * 192, 128).half(), torch.zeros(slots * 192, 32).half()
    prepared = on_cpu.Matrix(wide, (64, 128)), on_cpu.Matrix(quarters, (32, 32))
    decay, bounds = torch.zeros(slots, 128), ranks if cu is None else cu.int()
    on_cpu.run(kernels["kda_prepare_kernel"], slots, [
        rows(q, 128), rows(k, 128), rows(g, 128), *prepared, decay, ranks, beta, *rates, bounds, HV, HV // H, T, n,
        0, *tail, cu is not None, 16, cu is None, parts,
    ])  # fmt: skip
    on_cpu.run(kernels["kda_scan_kernel"], n * HV, [
        *prepared, rows(v, 64), rows(o, 64), decay, ranks, o, s0, st, HV, T, T, 0, 1, 1, 0, cu is not None, False,
    ])  # fmt: skip
    return o, st


def in_windows(x: KDAInputs, kernels: dict[str, Any], parts: bool, s0: Tensor, o: Tensor, st: Tensor) -> None:
    """`launch._windows` with windows of one chunk, each prepared as early as it may be: before the one in front is scanned."""
    (_, T, H, _), HV = x.q.shape, x.v.shape[2]
    assert isinstance(x.gate, BoundedGate)
    rows = lambda t, columns: on_cpu.Matrix(t.reshape(T, -1), (64, columns))  # noqa: E731
    beta = x.beta.contiguous()
    rates = x.gate.A_log.float(), x.gate.dt_bias.float().reshape(-1)
    ready: list[Any] = []

    def prepared(first: int) -> Any:
        w = (
            on_cpu.Matrix(torch.zeros(HV * 192, 128).half(), (64, 128)),
            on_cpu.Matrix(torch.zeros(HV * 192, 32).half(), (32, 32)),
        )
        decay = torch.zeros(HV, 128)
        on_cpu.run(kernels["kda_prepare_kernel"], HV, [
            rows(x.q, 128), rows(x.k, 128), rows(x.g, 128), *w, decay, beta, beta, *rates, beta, HV, HV // H, T, 1,
            first, 128**-0.5, x.gate.lower_bound, False, 16, True, parts,
        ])  # fmt: skip
        return *w, decay

    ready.append(prepared(0))
    for first in range(0, T, 64):
        if first + 64 < T:
            ready.append(prepared(first + 64))
        *w, decay = ready.pop(0)
        on_cpu.run(kernels["kda_scan_kernel"], HV, [
            *w, rows(x.v, 64), rows(o, 64), decay, beta, o, s0 if first == 0 else st, st, HV, 64, T, first, 1, 1, 1, False,
            False,
        ])  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_the_loop(name: str) -> None:
    x = inputs(name)
    wide = x.to(dtype=torch.float64)
    want = kda(wide.q, wide.k, wide.v, wide.g, wide.beta, **wide.kwargs(), impl="reference")
    found = [on_the_cpu(x, schedule, True) for schedule in ("fused", "two_pass")]
    for o, S in found:
        check_close("output", o, want.output, 3e-3)
        check_close("state", S, want.final_state, 1e-3)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "one arithmetic"
    if x.options.get("cu_seqlens") is None:
        assert all(torch.equal(a, b) for a, b in zip(on_the_cpu(x, "windows", True), found[1], strict=True))


def test_the_other_basis_is_what_helps() -> None:
    x = inputs("near")
    wide = x.to(dtype=torch.float64)
    want = kda(wide.q, wide.k, wide.v, wide.g, wide.beta, **wide.kwargs(), impl="reference")
    errors = [rel(on_the_cpu(x, "two_pass", parts)[1], want.final_state) for parts in (False, True)]
    assert errors[0] > 4 * errors[1], errors


@pytest.mark.parametrize("schedule", ["two_pass", "fused"])
@pytest.mark.parametrize("before, after", [("near", "near"), ("near", "far"), ("far", "near")])
def test_no_token_of_near_keys_feels_one_behind_it(schedule: str, before: str, after: str) -> None:
    """Tiles take their other basis from their own tokens: at every place of a tile, whatever comes behind."""
    sets = {n: make_inputs(7, **HEADS, T=128, decay="slow", near_equal_keys=n == "near").to(dtype=torch.bfloat16)
            for n in ("near", "far")}  # fmt: skip
    x, y = sets[before], sets[after]
    if before == after:
        y = make_inputs(8, **HEADS, T=128, decay="random").to(dtype=torch.bfloat16)
        y.k = x.k.flip(1)
    want, _ = on_the_cpu(x, schedule, True)
    for P in (*range(1, 18), 30, 31, 32, 46, 47, 62, 63, 64, 78, 79, 80, 126, 127):
        late = KDAInputs(**vars(x))
        for n in ("q", "k", "v", "g", "beta"):
            setattr(late, n, torch.cat([getattr(x, n)[:, :P], getattr(y, n)[:, P:]], 1))
        assert torch.equal(on_the_cpu(late, schedule, True)[0][:, :P], want[:, :P]), P


@pytest.mark.parametrize(
    "statement",
    ["mbarrier.wait(t_ready.index(st), phase)", "mbarrier.wait(kt_read.index(0), even)", "tma.store_wait(0)",
     "mbarrier.wait(ready.index(st), phase)", "mbarrier.wait(kq_ready.index(other), turned)",
     "mbarrier.wait(g_full.index(st), phase)"],
)  # fmt: skip
def test_a_missing_wait_is_found(statement: str) -> None:
    """The detector itself."""
    with pytest.raises(AssertionError, match="a race"):
        on_the_cpu(make_inputs(5, **HEADS, T=300).to(dtype=torch.bfloat16), "fused", True, without=statement)

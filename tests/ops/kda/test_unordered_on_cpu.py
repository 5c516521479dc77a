"""Barriers that are left out of Hopper kernels order nothing: warp by warp on a CPU; the compiler says which they are."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from openkda.ops.kda.hopper import TRITON_RELEASE, _triton_release

if _triton_release() != TRITON_RELEASE:
    pytest.skip(f"Gluon of Triton {TRITON_RELEASE}", allow_module_level=True)
import gluon_warps_on_cpu as warps
import hopper_on_cpu
import test_hopper
import test_hopper_schedules_on_cpu
import test_hopper_walks
from marks_taken import Place, marks
from test_hopper_on_cpu import HEADS, on_the_cpu

from openkda.ops.kda.hopper import unordered
from openkda.ops.kda.hopper.factors import FR, LPAIR, M3
from openkda.ops.kda.hopper.forward import kda_forward_kernel
from openkda.ops.kda.hopper.prepare import kda_prepare_kernel
from openkda.ops.kda.hopper.scan import kda_ends_kernel, kda_scan_kernel
from openkda.ops.kda.hopper.unordered import leave_out
from openkda.testing.inputs import KDAInputs, make_inputs

FUSED = {"STATE_IN": 1, "STATE_OUT": True, "VARLEN": True}
KERNELS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "fused": [(kda_forward_kernel, FUSED | {"AGAIN": again}) for again in (False, True)],
    "two_pass": [
        (kda_prepare_kernel, {"VARLEN": True, "NP": 64, "LAST_FIRST": False, "APART": True}),
        (kda_scan_kernel, {"VARLEN": True, "SPLIT": False}),
    ],
    "segments": [
        (kda_prepare_kernel, {"VARLEN": False, "NP": 64, "LAST_FIRST": True, "APART": True}),
        (kda_prepare_kernel, {"VARLEN": False, "NP": 64, "LAST_FIRST": False, "APART": True}),
        (kda_ends_kernel, {}),
        *((kda_scan_kernel, {"VARLEN": False, "SPLIT": split}) for split in (False, True)),
    ],
    "walks": [test_hopper_walks.compiled(which, split) for which in ("replay", "reverse") for split in (False, True)],
}
PACKS: dict[str, dict[str, Any]] = {  # all of them packs, as what is compiled
    "short": {"lengths": (0, 1, 66, 130), "decay": "random"},
    "long": {"lengths": (400, 70), "decay": "fast"},
    "near": {"lengths": (193, 40), "decay": "slow", "near_equal_keys": True},
}


@cache
def marks_of(schedule: str) -> list[tuple[tuple[Place, ...], bool]]:
    signature = test_hopper_walks.signature() if schedule == "walks" else test_hopper._signature()
    return [m for kernel, constants in KERNELS[schedule] for m in marks(kernel, signature, constants)]


def inputs(name: str) -> KDAInputs:
    return make_inputs(5, **HEADS | PACKS[name]).to(dtype=torch.bfloat16)


def under_the_law(name: str, schedule: str, **changes: str) -> tuple[torch.Tensor, torch.Tensor]:
    return on_the_cpu(inputs(name), schedule, True, partial(warps.load, marks=marks_of(schedule)), **changes)


@pytest.mark.parametrize("schedule", ["fused", "two_pass"])
@pytest.mark.parametrize("name", PACKS)
def test_what_is_left_out_orders_nothing(name: str, schedule: str) -> None:
    found, plain = under_the_law(name, schedule), on_the_cpu(inputs(name), schedule, True)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_nor_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_on_cpu.roles, "load", partial(warps.load, marks=marks_of("segments")))
    monkeypatch.setattr(hopper_on_cpu, "_kernels", cache(hopper_on_cpu._kernels.__wrapped__))
    x = make_inputs(5, **HEADS | {"T": 330, "HV": 2, "decay": "random"}).to(dtype=torch.bfloat16)
    _, names = test_hopper_schedules_on_cpu.run(monkeypatch, x, ("segments", 3))
    assert names == "prepare ends prepare merge scan"


@pytest.mark.parametrize("split", [False, True])
def test_nor_in_the_walks_of_the_backward(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_hopper_walks.on_cpu, "load", partial(warps.load, marks=marks_of("walks")))
    test_hopper_walks.test_on_a_cpu(194, 1, test_hopper_walks.PACK, True, split)
    test_hopper_walks.test_on_a_cpu(330, 1, None, False, split)


BARRIER = "gl.thread_barrier()"
LEFT_OUT = {
    "tile sums are read by channel": "x = x_s._reinterpret(gl.float32, [4, 4, 32], FLAT3).permute((1, 0, 2)).load(LT)",
    "anchors lie where tile sums were": "_store_slices(xb_s,",
    "columns are read by two warps": "halves.index(0).store(",
}
MISSING = {
    "ready": f"{BARRIER}\n            mbarrier.arrive(ready.index(st), count=1)",
    "T": f"    fence_async_shared()\n    {BARRIER}\n\n",
    "Kt read": f"{BARRIER}\n                mbarrier.arrive(kt_read.index(0), count=1)",
    "output": f"{BARRIER}\n        tma.async_copy_shared_to_global(o_desc",
    "clean": f"smem.store(clean)\n    {BARRIER}",
    "bias": f"{BARRIER}\n        chunks =",
    "chain": f"next_s.index(turn & 1).store(entry)\n    {BARRIER}",
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_mark_too_many_is_found(what: str) -> None:
    """The law itself."""
    with pytest.raises(AssertionError, match="no barrier between warps"):
        under_the_law("short", "fused", without=LEFT_OUT[what], instead=f"unordered(); {LEFT_OUT[what]}")


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_barrier_is_found(what: str) -> None:
    with pytest.raises(AssertionError, match=r"no barrier between warps|not behind a barrier"):
        under_the_law("long", "fused", without=MISSING[what], instead=MISSING[what].replace(BARRIER, "pass"))


def test_every_mark_takes_a_barrier() -> None:
    """At each place in the sources, in some kernel."""
    taken: dict[Place, bool] = {}
    for schedule in KERNELS:
        for calls, took in marks_of(schedule):
            taken[calls[0]] = taken.get(calls[0], False) or took
    assert len(taken) > 20 and all(taken.values()), [at for at, took in taken.items() if not took]


def test_who_holds_an_element() -> None:
    """A row of the tile's warp; channels by warp; and a tile that both warps of a pair hold."""
    real = {
        n: getattr(warps._language, n) for n in ("NVMMADistributedLayout", "BlockedLayout", "DistributedLinearLayout")
    }

    def again(layout: Any) -> Any:
        return real[type(layout).__name__](**{n: v for n, v in vars(layout).items() if n != "rank"})

    tile = torch.tensor([1, 2, 4, 8])
    assert torch.equal(warps.held(again(M3.value), [4, 16, 8]), tile[:, None, None].expand(4, 16, 8))
    assert torch.equal(warps.held(again(FR.value), [4, 128]), tile.repeat_interleave(32).expand(4, 128))
    assert torch.equal(
        warps.held(again(LPAIR.value), [2, 16, 16]), torch.tensor([3, 12])[:, None, None].expand(2, 16, 16)
    )


MARK = "\t// begin inline asm\n\t// openkda: unordered %r1\n\t// end inline asm"


def test_leave_out() -> None:
    store, barrier, add = "\tst.shared.b32 [%r2], %r3;", "\tbar.sync \t2, 128;", "\tadd.s32 %r2, %r2, 1;"
    text = lambda *lines: "\n".join(lines)  # noqa: E731
    left = text(*(line for line in MARK.split("\n") if "openkda" not in line))
    assert leave_out(text(store, barrier, store)) == text(store, barrier, store)
    assert leave_out(text(store, MARK, add, barrier, store)) == text(store, left, add, store)
    for between in (store, "\tmbarrier.arrive.shared.b64 _, [%r4];", "$L__BB0_1:", "\t@%p1 bra $L__BB0_2;"):
        assert leave_out(text(store, MARK, between, barrier, store)) == text(store, left, between, barrier, store)
    assert leave_out(text(MARK, "\tbar.sync \t0;", store)) == text(left, "\tbar.sync \t0;", store), (
        "kernels without roles share functions with marks, and need some of those barriers"
    )
    one = leave_out(text(MARK, barrier, barrier, store))
    assert one == text(left, barrier, store) == leave_out(one), "one each, however often"


def test_stages_of_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks at Triton's stages before this package is imported still does, and another backend has no PTX."""
    from triton import knobs

    seen: list[Any] = []
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *given: seen.append(given))
    unordered.install()
    ptx = "\n".join([MARK, "\tbar.sync \t2, 128;", "\tst.shared.b32 [%r2], %r3;"])
    stages: dict[str, Any] = {"ptx": lambda source, metadata: ptx + source}
    hook: Any = knobs.runtime.add_stages_inspection_hook
    hook("backend", stages, {"num_warps": 4}, "gluon", 90)
    assert seen == [("backend", stages, {"num_warps": 4}, "gluon", 90)]
    assert stages["ptx"]("!", {}) == leave_out(ptx) + "!" != ptx + "!"
    hook("backend", {"amdgcn": None}, {}, "triton", None)
    unordered.install()
    assert knobs.runtime.add_stages_inspection_hook is hook
    # As behind a scope that the first import was in.
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    unordered.install()
    assert knobs.runtime.add_stages_inspection_hook is not None


def test_an_exchange_behind_another_needs_a_barrier() -> None:
    """The law itself: scratch memory is written again only where all have read it."""
    order = warps._Order()
    memory = warps.Bytes(4, 0)
    order.exchange()
    order.exchange()  # Triton's barrier
    order.marked = True
    order.touch(memory, torch.arange(4), torch.full((4,), 1), write=True)
    with pytest.raises(AssertionError, match="no barrier between two exchanges"):
        order.exchange()

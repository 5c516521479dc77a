"""The host side of the Hopper forward, on the CPU: which schedule runs, and what each launch hands to its kernel."""

from __future__ import annotations

import contextlib
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openkda.ops.kda.hopper import schedule
from openkda.ops.kda.hopper.schedule import (
    SLOT_BYTES,
    WORKSPACE,
    choose,
    fits_workspace,
    is_split,
    segment_tokens,
    slots,
)

sys.path.append(str(Path(__file__).parents[1]))  # fake_cuda

SMS = 132


@pytest.mark.parametrize(
    "tokens, sequences, heads, packed, schedule",
    [(8192, 1, 96, False, "two_pass"), (8192, 8, 96, True, "fused"), (8192, 6, 96, True, "fused"),
     (8192, 8, 64, True, "fused"), (8192, 8, 32, True, "fused"), (8192, 8, 12, True, "two_pass"),
     (8192, 1, 64, False, "two_pass"), (8192, 1, 32, False, "two_pass"),
     (32768, 1, 32, False, "two_pass"), (8192, 1, 24, False, "two_pass"), (8192, 1, 12, False, ("segments", 5)),
     (8192, 1, 16, False, ("segments", 4)), (8192, 1, 1, False, ("segments", 8)), (4096, 1, 12, False, ("segments", 5)),
     (65536, 1, 16, False, ("segments", 5)), (65536, 1, 12, False, ("segments", 11))],
)  # fmt: skip
def test_the_fastest_measured_schedule_runs(
    tokens: int, sequences: int, heads: int, packed: bool, schedule: Any
) -> None:
    assert choose(tokens, sequences, heads, packed, SMS) == schedule


def test_every_choice_can_run() -> None:
    """Segments divide the sequences of a batch, packs are never cut, and the workspace keeps to its ceiling or windows."""
    for tokens in (17, 64, 1000, 8192, 65537, 300_000):
        for sequences in (1, 3, 64):
            for heads in (1, 12, 96):
                for packed in (False, True):
                    schedule = choose(tokens, sequences, heads, packed, SMS)
                    fits = slots(tokens, sequences, packed) * heads * SLOT_BYTES <= WORKSPACE
                    assert fits or schedule == "fused" or (schedule == "two_pass" and sequences == 1 and not packed)
                    if isinstance(schedule, tuple):
                        length = segment_tokens(tokens, schedule[1])
                        assert not packed and schedule[1] >= 2 and length % 64 == 0
                        assert (schedule[1] - 1) * length < tokens <= schedule[1] * length
                        assert sequences == 1 or tokens % length == 0


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launch module with a device of 132 SMs and kernels that keep their arguments by name."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")
    from openkda.ops.kda.hopper import launch as module

    calls: list[tuple[str, int, dict[str, Any]]] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.name, self.names = kernel.fn.__name__, kernel.arg_names

        def keep(self, grid: tuple[int, int], args: tuple[Any, ...]) -> None:
            assert len(args) == len(self.names)
            calls.append((self.name, grid[0] * grid[1], dict(zip(self.names, args, strict=True))))

        def __getitem__(self, grid: tuple[int, int]) -> Any:
            def compile_and_launch(*args: Any, num_warps: int, **options: int) -> Any:
                self.keep(grid, args)
                return SimpleNamespace(
                    run=self, function=0, packed_metadata=None, metadata=SimpleNamespace(tensordesc_meta=meta)
                )

            meta = ({},) * sum(n.endswith("_desc") for n in self.names)
            return compile_and_launch

        def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
            self.keep((x, y), rest[6:])  # stream, function, metadata twice, two hooks

    kernels = (
        "kda_prepare_kernel",
        "kda_ends_kernel",
        "kda_scan_kernel",
        "kda_ranks_kernel",
        "kda_forward_kernel",
        "merge_segments_kernel",
    )
    for name in kernels:
        monkeypatch.setattr(module, name, Recorder(getattr(module, name)))
    active = SimpleNamespace(get_current_stream=lambda index: 0)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_sm_count", lambda index: SMS)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU device
    return SimpleNamespace(module=module, calls=calls)


def arguments(lengths: tuple[int, ...], H: int, HV: int, batch: int = 1) -> dict[str, Any]:
    T = sum(lengths)
    tokens = {n: torch.zeros(batch, T, H, 128, dtype=torch.bfloat16) for n in ("q", "k")}
    tokens |= {n: torch.zeros(batch, T, HV, 128, dtype=torch.bfloat16) for n in ("v", "g")}
    packed = len(lengths) > 1
    return tokens | {
        "beta": torch.zeros(batch, T, HV), "a_log": torch.zeros(HV), "dt_bias": torch.zeros(HV * 128),
        "initial_state": torch.zeros(len(lengths) if packed else batch, HV, 128, 128),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0) if packed else None,
    }  # fmt: skip


def seen(value: Any) -> Any:
    """What a kernel reads of an argument, whichever way it was passed."""
    if hasattr(value, "block_shape"):
        return value.base.dtype, value.shape, value.strides, value.block_shape, value.layout
    return "pointer" if hasattr(value, "data_ptr") else value


@pytest.mark.parametrize(
    "schedule, lengths, batch, kernels",
    [("fused", (200,), 2, "forward forward"), ("fused", (3, 0, 90), 1, "ranks forward forward"),
     ("two_pass", (200,), 2, "prepare scan"), ("two_pass", (3, 0, 90), 1, "prepare scan"),
     (("segments", 3), (330,), 1, "prepare ends prepare merge scan")],
)  # fmt: skip
def test_the_short_launch_passes_what_the_compiling_one_does(
    launch: Any, schedule: Any, lengths: tuple[int, ...], batch: int, kernels: str
) -> None:
    inputs = arguments(lengths, 2, 4, batch)
    runs = []
    for _ in range(2):
        launch.calls.clear()
        launch.module.forward(**inputs, scale=0.5, lower_bound=-5.0, final_state=True, schedule=schedule)
        runs.append(list(launch.calls))
    assert [name.removeprefix("kda_").split("_")[0] for name, _, _ in runs[0]] == kernels.split()
    for (name, grid, first), (_, again, second) in zip(*runs, strict=True):
        assert grid == again
        for key, value in first.items():
            if key.endswith("_ptr"):
                assert hasattr(value, "data_ptr") or isinstance(value, int), (name, key)
                assert isinstance(second[key], int), (name, key)
            else:
                assert key.endswith("_desc") == hasattr(value, "block_shape"), (name, key)
                assert seen(value) == seen(second[key]), (name, key)
        assert second.get("beta_ptr", inputs["beta"].data_ptr()) == inputs["beta"].data_ptr()


def test_segments_cover_the_sequence(launch: Any) -> None:
    inputs = arguments((330,), 1, 1)
    launch.module.forward(**inputs, scale=0.5, lower_bound=-5.0, schedule=("segments", 3))
    (_, programs, early), (_, ends, local), (_, others, late), _, (_, scans, last) = launch.calls
    assert (programs, early["T"], early["first"], others, late["first"]) == (4, 330, 0, 2, 256)
    assert (ends, local["T"], local["rows"], local["ranges"]) == (4, 128, 330, 3)  # halves of all ranges but the last
    assert (scans, last["T"], last["rows"], last["ranges"]) == (6, 128, 330, 0)
    begin, behind = (c["dec_ptr"].data_ptr() for c in (early, late))
    assert behind - begin == 4 * 512 and last["dec_ptr"].data_ptr() == begin


@pytest.mark.parametrize("beside", [True, False])
def test_a_long_sequence_is_cut_into_windows(launch: Any, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    """That do not all fit the workspace: prepared beside a scan every other one lies in the same place, else each of them."""
    monkeypatch.setattr(schedule, "WORKSPACE", 4 * SLOT_BYTES)
    monkeypatch.setattr(launch.module, "windows", lambda *sizes: (schedule.Window(2, True, beside),) * 3)
    inputs = arguments((330,), 1, 1)
    launch.module.forward(**inputs, scale=0.5, lower_bound=-5.0, schedule="two_pass")
    names, _, calls = zip(*launch.calls, strict=True)
    assert names == ("kda_prepare_kernel", "kda_scan_kernel") * 3
    assert [(c["T"], c["rows"], c["first"], c["enters"], c["ranges"], c["beside"]) for c in calls[1::2]] == [
        (128, 330, 0, 1, 1, beside), (128, 330, 128, 1, 1, beside), (128, 330, 256, 1, 1, 0),
    ]  # fmt: skip
    assert [(c["T"], c["first"]) for c in calls[::2]] == [(330, 0), (330, 128), (330, 256)]
    at = [c["dec_ptr"] if isinstance(c["dec_ptr"], int) else c["dec_ptr"].data_ptr() for c in calls]
    assert at[0] == at[1] == at[4] == at[5] and at[2] == at[3] and (at[0] != at[2]) == beside


@pytest.mark.parametrize(
    "heads, chunks", [(96, [128]), (64, [128]), (48, [128]), (32, [49, 42, 37]), (24, [29, 41, 58]), (12, [27, 101])]
)
def test_the_fastest_measured_windows_run(heads: int, chunks: list[int]) -> None:
    """Within three chunks of the plan that was timed."""
    plan = schedule.windows(128, heads, SMS)
    assert len(plan) == len(chunks) and all(abs(w.chunks - n) <= 3 for w, n in zip(plan, chunks, strict=True))


@pytest.mark.parametrize("heads", [1, 12, 32, 64, 96, 131, 132, 500])
def test_windows_are_the_sequence(heads: int) -> None:
    for chunks in (1, 2, 5, 128, 1024, 5000):
        plan = schedule.windows(chunks, heads, SMS)
        assert sum(w.chunks for w in plan) == chunks and all(w.chunks > 0 for w in plan)
        assert not any(w.split and 2 * heads > SMS for w in plan)
        alone = (schedule.Window(chunks, is_split(heads, SMS)),)
        if fits_workspace(chunks * heads):
            assert schedule.windows_us(plan, heads, SMS) <= schedule.windows_us(alone, heads, SMS)
        else:
            assert all(fits_workspace((a.chunks + b.beside * b.chunks) * heads) for a, b in pairwise(plan))


def test_rows_are_copied_only_where_the_copy_engine_cannot_walk_them(launch: Any) -> None:
    rows = launch.module._rows
    wide = torch.zeros(2, 40, 3 * 256, dtype=torch.bfloat16)
    view = wide[..., 256:512].unflatten(-1, (2, 128))
    assert rows(view) is view
    for x in (
        torch.zeros(2 * 40 * 256 + 1, dtype=torch.bfloat16)[1:].view(2, 40, 2, 128),  # two bytes off
        wide[:, :, :256].unflatten(-1, (2, 128))[:, ::2][:, :, :, ::1].transpose(0, 1),
        torch.zeros(2, 40, 128, 2, dtype=torch.bfloat16).transpose(2, 3),
        torch.zeros(1, 1, 2, 128, dtype=torch.bfloat16).expand(2, 40, 2, 128),
    ):
        copied = rows(x)
        assert copied.is_contiguous() and copied.data_ptr() % 16 == 0 and torch.equal(copied, x)


def test_a_device_that_is_not_current_becomes_it(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextlib.contextmanager
    def device(target: torch.device) -> Any:
        entered.append(target)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: target.index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(torch.cuda, "device", device)
    launch.module.forward(**arguments((100,), 1, 1), scale=0.5, lower_bound=-5.0, schedule="two_pass")
    assert entered == [torch.device("cpu")] and len(launch.calls) == 2


@pytest.mark.parametrize(
    "tokens, heads, packed", [(330, 2, False), (4096, 32, False), (8192, 12, False), (330, 2, True)]
)
@pytest.mark.parametrize("state", [True, False])
def test_a_repeated_call_hands_over_what_the_first_did(
    monkeypatch: pytest.MonkeyPatch, tokens: int, heads: int, packed: bool, state: bool
) -> None:
    """On other memory each time: the long way, recorded, then from the tape, with every descriptor's address its own."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")
    from fake_cuda import fake_card

    import openkda.ops.kda.hopper as hopper
    import openkda.ops.kda.hopper.launch as module
    import openkda.ops.triton.launch as tapes
    from openkda.ops.kda.api import BoundedGate, kda
    from openkda.ops.kda.call import CALLS

    made: list[torch.Tensor] = []
    empty, allocator = torch.empty, tapes._allocator

    def keep(make: Any) -> Any:
        return lambda *a, **k: made.append(make(*a, **k)) or made[-1]

    monkeypatch.setattr(torch, "empty", keep(empty))
    monkeypatch.setattr(tapes, "_allocator", lambda device: keep(allocator(device)))
    monkeypatch.setattr(hopper, "_device_refusals", lambda device: [])
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_sm_count", lambda index: SMS)
    CALLS.forget()
    runs, kept = [], []
    with fake_card() as card, torch.inference_mode():
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=card))
        for _ in range(5):
            card.launches.clear()
            x = arguments((30, tokens - 30) if packed else (tokens,), heads, heads)
            gate = BoundedGate(-5.0, x.pop("a_log"), x.pop("dt_bias"))
            x["initial_state"] = x["initial_state"] if state else None
            made.clear()
            out = kda(
                **x, gate=gate, output_final_state=state, use_qk_l2norm=True, use_beta_sigmoid=True, impl="hopper"
            )
            memory = [t for t in (*x.values(), gate.A_log, gate.dt_bias, *made) if t is not None]
            kept.append((x, gate, out, memory))  # so that no address is used again
            runs.append([(name, grid, *places(values, memory)) for name, grid, values in card.launches])
    assert len(CALLS.replays) == 1 and card.direct == 3 * len(runs[0])
    CALLS.forget()
    assert all(run == runs[0] for run in runs)


def places(values: tuple[Any, ...], memory: list[torch.Tensor]) -> list[Any]:
    """A launch's arguments with each address as (place in `memory`, bytes behind its begin), also inside descriptors."""
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in memory]

    def place(a: Any) -> Any:
        if isinstance(a, bytes):
            return place(int.from_bytes(a[:8], "little")), a[8:]
        where = [(i, a - begin) for i, (begin, end) in enumerate(spans) if type(a) is int and begin <= a < end]
        return where[0] if where else a

    return [place(a) for a in values]

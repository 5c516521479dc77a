"""A call that is recorded runs like any other: it needs no more memory, and no address is taken for a tensor's that is gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from fake_cuda import fake_card

import openkda.ops.kda.triton as kernels
from openkda.ops.kda.api import BoundedGate, kda
from openkda.ops.kda.call import CALLS
from openkda.ops.kda.triton import backward as backward_host
from openkda.ops.kda.triton import launch as forward_host
from openkda.ops.kda.triton.autograd import BACKWARDS
from openkda.ops.triton import launch, stages

H, D = 8, 64


class Memory:
    """Bytes that torch.empty, and tapes in its place, have handed out and nobody has dropped."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def counted(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **options: Any) -> Tensor:
            storage = make(*arguments, **options)
            size = storage.untyped_storage().nbytes()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.drop, size)
            return storage

        return made

    def drop(self, size: int) -> None:
        self.now -= size

    def restart(self) -> None:
        gc.collect()
        self.now = self.most = 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    found = Memory()
    empty, allocator = torch.empty, launch._allocator
    monkeypatch.setattr(kernels, "triton_refusals", lambda x: [])
    monkeypatch.setattr(torch, "empty", found.counted(empty))
    monkeypatch.setattr(launch, "_allocator", lambda device: found.counted(allocator(device)))
    for host in ("HOPPER_WALKS", "HOPPER_PRODUCTS", "HOPPER_GRADIENTS"):
        monkeypatch.setattr(backward_host, host, False)
    CALLS.forget()
    BACKWARDS.forget()
    with fake_card():
        yield found
    CALLS.forget()
    BACKWARDS.forget()


def inputs(T: int) -> dict[str, Any]:
    new = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16).requires_grad_()  # noqa: E731
    gate = BoundedGate(-5.0, *(torch.zeros(shape).requires_grad_() for shape in ((H,), (H, D))))
    return {n: new(1, T, H, D) for n in ("q", "k", "v", "g")} | {"beta": new(1, T, H), "gate": gate, "impl": "triton"}


def test_a_recorded_backward_needs_no_more_memory(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fits once must fit the second time, which is the one that is recorded."""
    monkeypatch.setattr(stages, "ONE_BLOCK", 0)
    peaks = []
    for _ in range(5):
        x = inputs(1024)
        o = kda(**x, use_qk_l2norm=True, use_beta_sigmoid=True).output
        do = torch.zeros_like(o)
        memory.restart()
        torch.autograd.grad(o, [x["q"], x["v"], x["gate"].dt_bias], do)
        peaks.append(memory.most)
    assert BACKWARDS.replays and peaks[0] > 10 * do.nbytes
    assert max(peaks) <= 1.02 * min(peaks), peaks


def test_a_recorded_forward_in_windows_needs_no_more_memory(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One window's workspace at a time."""
    monkeypatch.setattr(forward_host, "WINDOW", 128 * H * D)
    peaks = []
    for _ in range(4):
        x = inputs(1024)
        memory.restart()
        with torch.no_grad():
            kda(**x, use_qk_l2norm=True, use_beta_sigmoid=True)
        peaks.append(memory.most)
    assert max(peaks) <= 1.02 * min(peaks), peaks


@pytest.mark.parametrize("form", ["stages", "tape"])
@pytest.mark.parametrize("own", [True, False])
def test_an_address_is_no_proof_of_a_tensor(monkeypatch: pytest.MonkeyPatch, form: str, own: bool) -> None:
    """The second launch is given memory where the first one's lay: made by the call again, or by some operator of torch, which
    a repeated call would not run."""
    ready, arena, empty = SimpleNamespace(), bytearray(64), torch.empty
    there = lambda: torch.frombuffer(arena, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr(
        torch, "empty", lambda *a, dtype, **k: there() if dtype == torch.uint8 else empty(*a, dtype=dtype, **k)
    )
    monkeypatch.setattr(launch, "find_driver", lambda: "library")
    monkeypatch.setattr(launch, "kernel_of", lambda one, places, library: tuple(places))
    monkeypatch.setattr(launch, "Parameters", lambda found, library, inner: found)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=None)))
    x, cpu = torch.zeros(16), torch.device("cpu")

    def call() -> list[Tensor]:
        first = stages.empty((64,), torch.uint8, cpu)
        launch.note(ready, (1, 1, 1), (), (x, first), ())
        del first
        second = stages.empty((64,), torch.uint8, cpu) if own else there()
        launch.note(ready, (1, 1, 1), (), (x, second), ())
        last = stages.empty((4,), torch.float32, cpu)
        launch.note(ready, (1, 1, 1), (), (second, last), ())
        return [last]

    if form == "stages":
        assert (stages.record_stages(call, [x], cpu)[1] is not None) == own
    else:  # what it gives lies where another one lay
        assert launch.record(lambda: [*call(), there()], [x], cpu)[1] is None

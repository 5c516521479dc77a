"""A device for tests of repeated calls: Triton's interpreter, which is handed addresses as a GPU's launcher is.

The interpreter compiles nothing, so that nothing would be repeated. Here each kernel's first call also gives what a compiled
one would be; run with addresses, it puts tensors of the first call's types in their place.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def use_addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels in the order of their launches: "+" before one that was handed addresses."""
    from triton.runtime.interpreter import InterpretedFunction

    from openkda.ops.device import calls
    from openkda.ops.triton import launch

    log: list[str] = []
    interpret = InterpretedFunction.run

    def first(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        log.append(self.fn.__name__)
        interpret(self, *arguments, grid=grid, warmup=warmup, **_known(options))
        dtypes = [a.dtype if isinstance(a, torch.Tensor) else None for a in arguments]

        def launch_again(x: int, y: int, z: int, *rest: Any) -> None:
            log.append(self.fn.__name__)
            interpret(self, *rest[6:], grid=(x, y, z), warmup=False, **_known(options))

        def play(at: list[int], one: Any, places: list[int]) -> None:
            log.append("+" + self.fn.__name__)
            memory = [None if p < 0 else _at(at[p], d) for p, d in zip(places, dtypes, strict=False) if d or p < 0]
            interpret(self, *memory, *one.rest, grid=one.grid, warmup=False, **_known(options))

        return SimpleNamespace(run=launch_again, play=play, function="function", packed_metadata="metadata")

    class Played:
        def __init__(self, kernels: Any, library: Any, inner: list[tuple[int, int]]) -> None:
            self.kernels, self.inner = kernels, inner

        def play(self, at: list[int], stream: int) -> None:
            at = [*at, *(at[place] + offset for place, offset in self.inner)]
            for one, places in self.kernels:
                one.ready.play(at, one, places)

    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: 0))
    monkeypatch.setattr(InterpretedFunction, "run", first)
    monkeypatch.setattr(launch, "driver", driver)
    monkeypatch.setattr(launch, "find_driver", lambda: "library")
    monkeypatch.setattr(launch, "kernel_of", lambda one, places, library: (one, places))
    monkeypatch.setattr(launch, "Parameters", Played)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU device
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(calls, "KEY_ANY_DEVICE", True)
    return log


def _known(options: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in options.items() if n not in ("maxnreg", "num_warps")}


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """The memory at an address: its first element stands for all that follow."""
    return torch.frombuffer((ctypes.c_byte * dtype.itemsize).from_address(address), dtype=dtype)

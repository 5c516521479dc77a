"""A short way to a compiled kernel. Triton's own launch sorts 70 arguments into a key of strings at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, programs: int, args: tuple[Any, ...], constants: tuple[Any, ...], num_warps: int, device: torch.device
) -> None:
    """kernel over a grid of `programs`; args are its run-time arguments, constants its constexprs, both in its order.

    What Triton specialises on (dtypes, None, a number's being 1 or a multiple of 16, 16-byte alignment) is the key; the
    first call of a key goes through Triton and compiles.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(
                kernel, programs, args, constants, num_warps, torch.device("cuda", torch.cuda.current_device())
            )
    key = (kernel, num_warps, device, constants, tuple([_traits(a) for a in args]))
    ready = _compiled.get(key)
    if ready is None:
        ready = kernel[(programs,)](*args, *constants, num_warps=num_warps)
        if ready is not None:  # the interpreter compiles nothing
            _compiled[key] = ready
        return
    ready.run(
        programs, 1, 1, driver.active.get_current_stream(device.index), ready.function, ready.packed_metadata, None,
        knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args, *constants,
    )  # fmt: skip


def _traits(a: Any) -> Any:
    if type(a) is int:
        return a == 1, a % 16 == 0, a >> 31
    if isinstance(a, Tensor):
        return a.dtype, a.data_ptr() % 16 == 0
    return type(a)

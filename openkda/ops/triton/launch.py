"""A short way to a compiled kernel. Triton's own launch sorts 70 arguments into a key of strings at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

_compiled: dict[tuple[Any, ...], Any] = {}
_MOST = 8192


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    steps: tuple[int, ...],
    numbers: tuple[int | float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    device: torch.device,
) -> None:
    """kernel over a grid of `programs`. Its parameters, in this order: tensors; steps (strides and sizes, on whose
    divisibility Triton specialises); numbers (marked do_not_specialize, or floats); constants (constexprs).

    The first call of a key goes through Triton and compiles, unless Triton already has that binary.
    """
    index = device.index
    if device.type == "cuda" and index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*tensors, *steps, *numbers, *constants, num_warps=num_warps)
        return
    traits = tuple([None if t is None else (t.dtype, t.data_ptr() & 15) for t in tensors])
    key = (id(kernel), num_warps, index, traits, steps, constants)
    ready = _compiled.get(key)
    if ready is None:
        ready = kernel[(programs,)](*tensors, *steps, *numbers, *constants, num_warps=num_warps)
        if ready is not None:  # the interpreter compiles nothing
            if len(_compiled) >= _MOST:
                _compiled.clear()
            _compiled[key] = ready
        return
    ready.run(
        programs, 1, 1, driver.active.get_current_stream(index), ready.function, ready.packed_metadata, None,
        knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *tensors, *steps, *numbers, *constants,
    )  # fmt: skip


def steps_of(x: Tensor) -> tuple[int, ...]:
    """Strides of all axes but the last, which is 1; the batch stride of a single row is 0, whatever its length."""
    s = x.stride()[:-1]
    return (0, *s[1:]) if x.shape[0] == 1 else s


def padded(size: int) -> int:
    """The next power of two, at least 16: the smallest side of a tensor-core tile."""
    return 1 << max(4, (size - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)

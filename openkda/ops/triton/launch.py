"""A short way to a compiled kernel, and tapes: the launches of one call, run again on other memory.

Triton's own launch sorts 70 arguments into a key of strings at every call; `launch` looks a key of strides and alignments up. A
tape needs no key but the caller's: it holds every argument that is not an address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import or_
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from triton import knobs
from triton.runtime import driver

from openkda.ops.triton.ahead import plan, planning
from openkda.ops.triton.parameters import Parameters, kernel_of
from openkda.ops.triton.parameters import driver as find_driver

QUICK = not knobs.runtime.interpret and torch.version.hip is None
"""Whether device functions may be written in PTX: everywhere but in the interpreter and on other makers' cards."""

_compiled: dict[tuple[Any, ...], Any] = {}
_MOST = 8192
FAR = 1 << 24
"""Elements from token to token from which on a tensor is copied: kernels multiply that by up to 64 in 32 bits."""


class Memory(Protocol):
    """A tensor, or a place inside one."""

    def data_ptr(self) -> int: ...


class Noted:
    """Where an argument lay, and in whose memory, which it does not hold: what others drop a recorded call drops too, and an
    address may be another tensor's later. (Held, the workspace of a recorded backward was 20 n where others need 15.)"""

    __slots__ = ("_address", "_storage")

    def __init__(self, memory: Memory) -> None:
        self._address = memory.data_ptr()
        self._storage = StorageWeakRef(memory.untyped_storage()) if isinstance(memory, Tensor) else None

    def data_ptr(self) -> int:
        return self._address

    def may_be(self, storage: StorageWeakRef) -> bool:
        """Whether it was in that storage; of a mere place nobody knows."""
        return self._storage is None or self._storage == storage


class Launch(NamedTuple):
    """ready over grid: TMA descriptors first, then the memory that pointers name, then everything else."""

    ready: Any
    grid: tuple[int, int, int]
    descriptors: tuple[Any, ...]
    memory: tuple[Noted | None, ...]
    rest: tuple[Any, ...]


class _Recording(threading.local):
    launches: list[Launch] | None = None


_recording = _Recording()


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
    if planning.jobs is None and device.type == "cuda" and index != torch.cuda.current_device():
        numbers = as_taken(kernel, len(tensors) + len(steps), numbers)
        with torch.cuda.device(device):
            kernel[(programs,)](*tensors, *steps, *numbers, *constants, num_warps=num_warps)
        return
    traits = tuple([None if t is None else (t.dtype, t.data_ptr() & 15) for t in tensors])
    key = (id(kernel), num_warps, index, traits, steps, constants)
    if planning.jobs is not None:
        numbers = as_taken(kernel, len(tensors) + len(steps), numbers)
        plan(key, kernel, (*tensors, *steps, *numbers, *constants), num_warps=num_warps)
        return
    ready = _compiled.get(key)
    if ready is None:
        numbers = as_taken(kernel, len(tensors) + len(steps), numbers)
        ready = kernel[(programs,)](*tensors, *steps, *numbers, *constants, num_warps=num_warps)
        if ready is not None:  # the interpreter compiles nothing
            if len(_compiled) >= _MOST:
                _compiled.clear()
            _compiled[key] = ready
    else:
        ready.run(
            programs, 1, 1, driver.active.get_current_stream(index), ready.function, ready.packed_metadata, None,
            *_hooks(), *tensors, *steps, *numbers, *constants,
        )  # fmt: skip
    note(ready, (programs, 1, 1), (), tensors, (*steps, *numbers, *constants))


def as_taken(kernel: Any, before: int, numbers: tuple[int | float, ...]) -> tuple[int | float, ...]:
    """numbers as a kernel shall be compiled for: floats where it does not ask for integers, which it marks do_not_specialize.
    before: its parameters in front of them.

    Whoever gives a scale of 1 means 1.0. Of an integer 1 Triton makes a constant, of another one an integer parameter, and the
    binary would stand for calls with every other scale. Once compiled for a float it takes integers too.
    """
    taken = getattr(kernel, "params", None)  # the interpreter's kernels have none, nor a binary
    if taken is None:
        return numbers
    both = zip(numbers, taken[before : before + len(numbers)], strict=True)
    return tuple([n if p.do_not_specialize else float(n) for n, p in both])


def note(
    ready: Any,
    grid: tuple[int, int, int],
    descriptors: tuple[Any, ...],
    memory: tuple[Memory | None, ...],
    rest: tuple[Any, ...],
) -> None:
    """Lists a launch for whoever records this thread's."""
    if _recording.launches is not None and ready is not None:
        matrices = [
            SimpleNamespace(base=Noted(d.base), shape=d.shape, strides=d.strides, padding=d.padding)
            for d in descriptors
        ]
        pointers = [None if m is None else Noted(m) for m in memory]
        _recording.launches.append(Launch(ready, grid, tuple(matrices), tuple(pointers), rest))


def _hooks() -> tuple[Any, Any]:
    """None for a chain that nobody listens to: calling it would cost a microsecond."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return enter if enter.calls else None, leave if leave.calls else None


class Tape:
    """The launches of a recorded call. Valid for calls whose tensors have the same dtypes, shapes, strides and device, and are
    None in the same places."""

    __slots__ = ("_current", "_empty", "_fresh", "_index", "_parameters", "_stream")

    def __init__(self, parameters: Parameters, made: Sequence[Tensor], device: torch.device) -> None:
        self._parameters, self._index = parameters, device.index
        self._fresh: list[tuple[Any, ...]] = [(tuple(t.shape), t.stride(), t.dtype) for t in made]
        self._empty = _allocator(device)
        self._stream: Callable[[int], int] = driver.active.get_current_stream
        self._current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

    def shape_result(self, place: int, shape: tuple[int, ...]) -> None:
        """Gives a tensor that the call makes another shape of as many elements."""
        self._fresh[place] = (tuple(shape), torch.empty(shape, device="meta").stride(), self._fresh[place][2])

    def run(self, inputs: Sequence[Tensor | None]) -> list[Tensor] | None:
        """The tensors that the call makes, in the order of `record`; None where this call must go the long way: an unaligned
        address, another current device, someone who listens to launches."""
        index, listeners = self._index, knobs.runtime
        if self._current() != index or listeners.launch_enter_hook.calls or listeners.launch_exit_hook.calls:
            return None
        at = [t.data_ptr() for t in inputs if t is not None]
        if reduce(or_, at) & 15:
            return None
        empty = self._empty
        made = [empty(*fresh) for fresh in self._fresh]
        at += [t.data_ptr() for t in made]
        self._parameters.play(at, self._stream(index))
        return made


def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """(shape, strides, dtype) -> fresh memory on the current device, by torch.compile's own function where there is one: on a
    CPU it takes 0.4 us and torch.empty 2.2. It wants tuples, not torch.Size; for CPU tensors too, so that tests see that."""
    quick: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is not None and torch.version.hip is None:
        return quick
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """Inside, launches of this thread are also listed."""
    before, _recording.launches = _recording.launches, []
    try:
        yield _recording.launches
    finally:
        _recording.launches = before


def record(
    call: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor | None], device: torch.device
) -> tuple[Sequence[Tensor], Tape | None]:
    """Runs `call`, which returns the tensors that it made, workspace included; and its tape, or None where it has none.

    It has none when two inputs share an address (another call of these shapes may not), when a kernel was given memory that is
    neither an input nor made by the call (a copy of a strided input), when an address is unaligned, and in the interpreter.
    """
    with recorded() as launches:
        made = call()
    memory = [*(t for t in inputs if t is not None), *made]
    addresses = [t.data_ptr() for t in memory]
    library = find_driver()
    if library is None or not launches or len(set(addresses)) != len(addresses) or any(a % 16 for a in addresses):
        return made, None
    inner: dict[tuple[int, int], int] = {}
    kernels = []
    for one in launches:
        places = []
        for t in (*(d.base for d in one.descriptors), *one.memory):
            found = _find(t, addresses, memory, len(memory) - len(made))
            if found is None:
                return made, None
            places.append(found if isinstance(found, int) else len(memory) + inner.setdefault(found, len(inner)))
        kernel = kernel_of(one, places, library)
        if kernel is None:
            return made, None
        kernels.append(kernel)
    return made, Tape(Parameters(kernels, library, list(inner)), made, device)


def _find(t: Noted | None, addresses: list[int], memory: Sequence[Tensor], inputs: int) -> int | tuple[int, int] | None:
    """Place of a kernel's argument in the list of addresses, -1 for None; (place, offset) inside what the call made, which is
    `memory` behind the inputs."""
    if t is None:
        return -1
    a = t.data_ptr()
    for i, m in enumerate(memory):
        offset = a - addresses[i]
        if i < inputs and not offset:
            return i
        if i >= inputs and 0 <= offset < max(m.numel() * m.element_size(), 1):
            return (i, offset) if offset else i if t.may_be(StorageWeakRef(m.untyped_storage())) else None
    return None


def steps_of(x: Tensor) -> tuple[int, ...]:
    """Strides of all axes but the last, which is 1; the batch stride of a single row is 0, whatever its length."""
    s = x.stride()[:-1]
    return (0, *s[1:]) if x.shape[0] == 1 else s


def rows_of(x: Tensor) -> tuple[int, ...]:
    """(rows, stride, further strides but the last, which is 1) of x [B, T, ..]: token t of batch b begins
    (b * rows + t) * stride elements behind the first. For x of `walkable`.

    Triton specialises on strides that 16 divides. The stride of a batch may be one or not, as T has it, and then a new length
    would compile again; a number of rows is no stride (do_not_specialize) and leaves the alignment to the row's.
    """
    steps = x.stride()
    if x.shape[0] == 1:
        return (0, *steps[1:-1])
    if x.shape[1] == 1:
        return (1, steps[0], *steps[2:-1])
    return (steps[0] // steps[1] if steps[1] else 0, *steps[1:-1])


def walkable(x: Tensor) -> Tensor:
    """x [B, T, ..] where a kernel can step through it by `rows_of`, else a copy."""
    if x.is_contiguous():  # also what a copy would be
        return x
    steps = x.stride()
    whole = x.shape[0] == 1 or x.shape[1] == 1 or (steps[0] % steps[1] == 0 if steps[1] else steps[0] == 0)
    return x if whole and steps[-1] == 1 and steps[1] < FAR else x.contiguous()


def unit_stride(x: Tensor) -> Tensor:
    """The kernels step by one along the last axis; anything else is copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense(x: Tensor) -> Tensor:
    """x.contiguous(), which takes a microsecond also where there is nothing to do."""
    return x if x.is_contiguous() else x.contiguous()


def padded(size: int) -> int:
    """The next power of two, at least 16: the smallest side of a tensor-core tile."""
    return 1 << max(4, (size - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)

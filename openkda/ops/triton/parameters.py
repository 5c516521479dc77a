"""Launches of compiled kernels through the driver itself: parameters packed once, addresses filled in.

Triton's launcher converts 40 to 70 Python arguments a launch. Here the kernels of a tape share one block of memory with all
their parameters, addresses in front: one `struct.pack_into` fills those in, and a launch is a foreign call with three pointers.
Where the same addresses come again, as allocators give them in every step of a training, the launches become one CUDA graph.

The order of parameters is that of Triton's launcher (backends/nvidia/driver.py): everything but constexprs, a descriptor as its
map, sizes and strides, then up to two pointers to scratch memory. That is no public promise, so each kernel is asked
for its layout (`cuFuncGetParamInfo`), and where anything is not as expected there is no short way.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from openkda.ops.triton.graphs import GraphDriver, Graphs, KernelNode

_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_MAP = 128
"""Bytes of a CUtensorMap, and what its address is a multiple of."""
_MOST_MAPS = 256
_SCRATCH = struct.pack("Q", 0)


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class Attribute(ctypes.Structure):
    """CUlaunchAttribute. Number 6 with value 1 lets a kernel begin before the one in front has ended, once that says so."""

    _fields_ = (("id", ctypes.c_uint), ("unused", ctypes.c_uint), ("value", ctypes.c_uint * 16))


BESIDE = Attribute(6, 0, (ctypes.c_uint * 16)(1))


class Driver:
    """The functions of libcuda that a launch needs."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")  # releases the GIL: a launch waits where the queue is full
        self._about, self._message = library.cuFuncGetParamInfo, library.cuGetErrorString
        self._about.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
        self._message.argtypes = (ctypes.c_int, ctypes.c_void_p)
        self.launch = library.cuLaunchKernelEx
        """(address of a Config, function, address of the parameters' addresses, None) -> CUresult"""
        self.launch.argtypes = (ctypes.c_void_p,) * 4
        self._context, self._primary, self._use = (
            library.cuCtxGetCurrent, library.cuDevicePrimaryCtxRetain, library.cuCtxSetCurrent,
        )  # fmt: skip
        self._context.argtypes = self._use.argtypes = (ctypes.c_void_p,)
        self._primary.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self.graphs = GraphDriver(library)

    def enter(self) -> None:
        """Gives this thread the current device's context, if it has none."""
        context = ctypes.c_void_p()
        self._context(ctypes.addressof(context))
        if context.value is None:
            self._primary(ctypes.addressof(context), torch.cuda.current_device())
            self._use(context)

    def sizes(self, function: int) -> list[int]:
        """Bytes of each parameter of a kernel."""
        found: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while not self._about(function, len(found), ctypes.addressof(offset), ctypes.addressof(size)):
            found.append(size.value)
        return found

    def message(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._message(status, ctypes.addressof(text))
        return f"error {status}" if text.value is None else text.value.decode()


@cache
def driver() -> Driver | None:
    """None without an NVIDIA driver that knows these functions (CUDA 12.4)."""
    try:
        return Driver()
    except (OSError, AttributeError):
        return None


def encoded(matrix: Any, about: Any, address: int) -> bytes:
    """The CUtensorMap of a matrix at `address`. matrix: shape, strides, padding; about: Triton's metadata of the descriptor."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    base = SimpleNamespace(data_ptr=lambda: address)
    whole = SimpleNamespace(base=base, shape=matrix.shape, strides=matrix.strides, padding=matrix.padding)
    found = make_tensordesc_arg(whole, about)[0]  # the last field of an object of Triton's
    return ctypes.string_at(id(found) + type(found).__basicsize__ - _MAP, _MAP)


class _Thread(threading.local):
    entered = False


_thread = _Thread()


def enter(library: Driver | None = None) -> None:
    """To be called before a thread's first launch: torch gives a thread its context at the first call that needs the GPU, and
    memory from its cache needs none, but launches and descriptors do."""
    if not _thread.entered:
        library = library or driver()
        if library is not None:
            library.enter()
        _thread.entered = True


class Maps(dict[int, bytes]):
    """Address -> the encoded descriptor of a matrix there. Triton encodes every descriptor of every launch anew, in Python, and
    a Hopper forward has nine to sixteen; allocators give the same addresses again and again."""

    def __init__(self, descriptor: Any, about: Any) -> None:
        super().__init__()
        self._matrix = SimpleNamespace(shape=descriptor.shape, strides=descriptor.strides, padding=descriptor.padding)
        self._about = about

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _MOST_MAPS:
            self.clear()
        found = self[address] = encoded(self._matrix, self._about, address)
        return found


class _Kernel(NamedTuple):
    """One launch. cells: of each parameter its bytes, or the place of an address, or (place, its `Maps`). ready: what keeps the
    function alive. beside: with the attribute of that name."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    cells: list[bytes | int | tuple[int, Maps]]
    ready: Any
    beside: bool


class Parameters:
    """The launches of a tape, ready to be played on other memory. inner: (place, offset) of the addresses behind those that
    `play` is given, which lie inside what lies there."""

    __slots__ = ("_driver", "_fixed", "_frames", "_graphs", "_inner", "_kernels", "_maps", "_pack", "_pick", "_tables")

    def __init__(self, kernels: list[_Kernel], driver: Driver, inner: Sequence[tuple[int, int]] = ()) -> None:
        self._driver, self._kernels, self._inner = driver, kernels, inner
        cells = [c for k in kernels for c in k.cells]
        maps = {(c[0], id(c[1])): c for c in cells if isinstance(c, tuple)}
        places = sorted({c for c in cells if isinstance(c, int)})
        self._maps = [(m, place) for place, m in maps.values()]
        self._pick = itemgetter(*places, places[-1])  # of one place alone it would give no tuple
        self._pack = struct.Struct(f"{f'{_MAP}s' * len(maps)}{len(places) + 1}Q").pack_into
        begin = _MAP * len(maps)
        where: dict[Any, int] = {key: _MAP * i for i, key in enumerate(maps)}
        where |= {place: begin + 8 * i for i, place in enumerate(places)}
        size = begin + 8 * len(places) + 8
        fixed = b""
        self._tables: list[list[int]] = []
        for kernel in kernels:
            table = []
            for cell in kernel.cells:
                if isinstance(cell, bytes):
                    table.append(size + len(fixed))
                    fixed += cell.ljust(8, b"\0")
                else:
                    table.append(where[cell if isinstance(cell, int) else (cell[0], id(cell[1]))])
            self._tables.append(table)
        self._fixed = bytes(size) + fixed
        self._frames: list[_Frame] = []
        self._graphs = Graphs(driver.graphs) if len(kernels) > 1 and not any(k.beside for k in kernels) else None

    def play(self, at: Sequence[int], stream: int) -> None:
        """Launches everything with the addresses `at`, by place."""
        if not _thread.entered:
            enter(self._driver)
        graphs = self._graphs
        if graphs is not None and (status := graphs.launch(at, stream)) is not None:
            if status:
                raise self._refused(status)
            return
        try:
            frame = self._frames.pop()  # one of its own for each thread that is in here
        except IndexError:
            frame = _Frame(self._fixed, self._kernels, self._tables)
        if frame.stream != stream:
            frame.enter(stream)
        every = [*at, *[at[place] + offset for place, offset in self._inner]] if self._inner else at
        self._pack(frame.block, frame.begin, *[maps[every[place]] for maps, place in self._maps], *self._pick(every))
        launch = self._driver.launch
        for call in frame.calls:
            status = launch(*call)
            if status:
                raise self._refused(status)
        if graphs is not None:
            graphs.note(at, frame.nodes, stream)
        self._frames.append(frame)

    def _refused(self, status: int) -> RuntimeError:
        return RuntimeError(f"CUDA launch of a repeated call: {self._driver.message(status)}")


class _Frame:
    """Memory of one thread's launches: parameters, their tables, configurations."""

    __slots__ = ("_configs", "_tables", "begin", "block", "calls", "stream")

    def __init__(self, fixed: bytes, kernels: list[_Kernel], tables: list[list[int]]) -> None:
        self.block = ctypes.create_string_buffer(len(fixed) + _MAP)
        base = ctypes.addressof(self.block)
        self.begin = -base % _MAP
        ctypes.memmove(base + self.begin, fixed, len(fixed))
        self._tables = [(ctypes.c_void_p * len(t))(*(base + self.begin + offset for offset in t)) for t in tables]
        self._configs = [Config(k.grid, (k.threads, 1, 1), k.shared) for k in kernels]
        for config, kernel in zip(self._configs, kernels, strict=True):
            if kernel.beside:
                config.attributes, config.count = ctypes.addressof(BESIDE), 1
        self.calls = [
            (ctypes.addressof(c), k.function, ctypes.addressof(t), None)
            for c, k, t in zip(self._configs, kernels, self._tables, strict=True)
        ]
        self.stream: int | None = 0

    def nodes(self) -> list[KernelNode]:
        """The launches as nodes of a graph, which copies the parameters."""
        return [
            KernelNode(function, config.grid, config.block, config.shared, table)
            for config, (_, function, table, _) in zip(self._configs, self.calls, strict=True)
        ]

    def enter(self, stream: int) -> None:
        for config in self._configs:
            config.stream = stream
        self.stream = stream


def kernel_of(one: Any, places: Sequence[int], driver: Driver) -> _Kernel | None:
    """`one` (a `Launch`) whose descriptors and memory lie at these places; None where it is no plain launch, or not laid out
    as expected."""
    ready, run = one.ready, one.ready.run
    warps, ctas, shared = ready.packed_metadata
    special = run.global_scratch_size or run.profile_scratch_size or run.launch_cooperative_grid
    signature = list(ready.src.signature.values())
    about = list(getattr(ready.metadata, "tensordesc_meta", None) or ())
    arguments = (*one.descriptors, *one.memory, *one.rest)
    if special or ctas != 1 or len(signature) != len(arguments) or len(about) != len(one.descriptors):
        return None
    cells: list[bytes | int | tuple[int, Maps]] = []
    sizes: list[int] = []
    for i, (kind, value) in enumerate(zip(signature, arguments, strict=True)):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            cells.append((places[i], Maps(value, about[i])))
            sizes.append(_MAP)
            numbers = [struct.pack("i", n) for n in value.shape] + [struct.pack("q", n) for n in value.strides]
        elif kind[0] == "*":
            cells.append(places[i])
            sizes.append(8)
            numbers = []
        elif kind in _FORMATS:
            numbers = [struct.pack(_FORMATS[kind], value)]
        else:
            return None
        cells += numbers
        sizes += map(len, numbers)
    found = driver.sizes(ready.function)
    scratch = len(found) - len(sizes)
    if scratch not in (0, 1, 2) or found != sizes + [8] * scratch or not any(isinstance(c, int) for c in cells):
        return None
    beside = bool(run.launch_pdl)
    return _Kernel(ready.function, one.grid, 32 * warps, shared, cells + [_SCRATCH] * scratch, ready, beside)

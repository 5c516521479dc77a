"""Launches at addresses that come again, as a CUDA graph: one call of the driver instead of one a kernel.

Allocators hand out the same memory in every step of a training, so that a tape sees as many sets of addresses as a model has
layers of one shape. A set that keeps coming becomes a graph with these addresses in it. On an H200's host a graph of seven
kernels is launched in 1.5 us, where seven launches take 21; it is made in 90, and takes 126 KB of the card and 62 of the host.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

MOST = 512
"""Graphs of all tapes: 64 MB of a card, and more than twice as many as a model has layers of this kind."""
TIMES = 4
"""A set of addresses came, before it becomes a graph: many come twice and never again."""
_AT_ONCE = 128
"""Graphs that a tape may make before their launches have paid for any."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("parameters", ctypes.c_void_p), ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


class GraphDriver:
    """The functions of libcuda for graphs."""

    def __init__(self, library: Any) -> None:
        self._create, self._add, self._instantiate, self._upload, self._forget, self._drop, self.launch, self._mode = (
            library.cuGraphCreate, library.cuGraphAddKernelNode_v2, library.cuGraphInstantiateWithFlags, library.cuGraphUpload,
            library.cuGraphDestroy, library.cuGraphExecDestroy, library.cuGraphLaunch,
            library.cuThreadExchangeStreamCaptureMode,
        )  # fmt: skip
        self._create.argtypes = (ctypes.c_void_p, ctypes.c_uint)
        self._add.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._instantiate.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong)
        self._forget.argtypes = self._drop.argtypes = self._mode.argtypes = (ctypes.c_void_p,)
        self._upload.argtypes = self.launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        """(graph, stream) -> CUresult"""
        self.capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        """Whether launches on the current stream go into a graph of someone's."""

    def make(self, nodes: Sequence[KernelNode], stream: int) -> int | None:
        """An executable graph of these kernels in this order, with their parameters of now; None if there can be none, as on a
        card that is full: all of its memory that a launch needs is taken here. stream: of its first launch."""
        graph, node, made = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        with self._whoever_captures():
            if self._create(ctypes.addressof(graph), 0):
                return None
            status = 0
            for i, one in enumerate(nodes):
                before = (ctypes.c_void_p * 1)(node.value) if i else None
                status = status or self._add(ctypes.addressof(node), graph, before, min(i, 1), ctypes.addressof(one))
            status = status or self._instantiate(ctypes.addressof(made), graph, 0)
            self._forget(graph)
            if not status and self._upload(made, stream):
                status = self._drop(made) or 1
        return None if status else made.value

    def drop(self, graph: int) -> None:
        """A launch that is under way ends first."""
        with self._whoever_captures():
            self._drop(graph)

    @contextmanager
    def _whoever_captures(self) -> Iterator[None]:
        """Another thread's capture would end in an error if this one made or dropped a graph in CUDA's default mode."""
        mode = ctypes.c_int(_RELAXED)
        self._mode(ctypes.addressof(mode))
        try:
            yield
        finally:
            self._mode(ctypes.addressof(mode))


class _Graph:
    """An executable graph, which goes with this object."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: int, drop: Callable[[int], None]) -> None:
        self.handle = handle
        weakref.finalize(self, drop, handle).atexit = False  # the driver may be gone then


_alive: dict[tuple[int, ...], _Graph] = {}
"""By a tape's number and addresses, what was launched the longest time ago in front."""
_numbers = itertools.count()


def _forget(number: int) -> None:
    for key in [k for k in list(_alive) if k[0] == number]:
        _alive.pop(key, None)


class Graphs:
    """Of one tape."""

    __slots__ = ("__weakref__", "_driver", "_launched", "_made", "_number", "_seen")

    def __init__(self, driver: GraphDriver) -> None:
        self._driver, self._number = driver, next(_numbers)
        self._seen: dict[tuple[int, ...], int] = {}
        self._made = self._launched = 0
        weakref.finalize(self, _forget, self._number).atexit = False

    def launch(self, at: Sequence[int], stream: int) -> int | None:
        """The driver's status; None where nothing was launched: there is no graph, another thread is launching it, or the
        current stream is captured, whose graph shall hold kernels."""
        key = (self._number, *at)
        graph = _alive.pop(key, None)  # nobody else's until it is launched: the driver does not see to that
        if graph is None:
            return None
        status = None if self._driver.capturing() else self._driver.launch(graph.handle, stream)
        _alive[key] = graph
        self._launched += 1
        return status

    def note(self, at: Sequence[int], nodes: Callable[[], Sequence[KernelNode]], stream: int) -> None:
        """At these addresses kernels were launched one by one, with parameters as in `nodes`."""
        key = (self._number, *at)
        if len(self._seen) >= 2 * _AT_ONCE and key not in self._seen:
            self._seen.clear()
        times = self._seen[key] = self._seen.get(key, 0) + 1
        if times < TIMES or key in _alive or self._made >= _AT_ONCE + self._launched // 8 or self._driver.capturing():
            return
        self._made += 1
        handle = self._driver.make(nodes(), stream)
        if handle is not None:
            if len(_alive) >= MOST:
                oldest, *_ = _alive
                _alive.pop(oldest, None)
            _alive[key] = _Graph(handle, self._driver.drop)

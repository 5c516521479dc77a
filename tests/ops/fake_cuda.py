"""A CUDA device for tests on a CPU, below Triton: kernels are specialised by Triton itself, but neither compiled nor run.

Launches are listed, whichever way they come: through Triton's launcher, or straight to the driver with packed parameters, which
are read back from memory as a GPU would.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver
from triton.runtime.jit import JITFunction

from openkda.ops.device import calls
from openkda.ops.triton import launch, parameters
from openkda.ops.triton.graphs import KernelNode

FORMATS = parameters._FORMATS
SMS = 132


def encode(descriptor: Any, about: Any, address: int) -> bytes:
    """In place of the driver's encoding of a matrix: 128 bytes that say what was asked for."""
    shape, strides, block = descriptor.shape, descriptor.strides, about["block"]
    return struct.pack("7Q", address, *shape, *strides, *block).ljust(128, b"\0")


Listed = tuple[str, tuple[int, ...], tuple[Any, ...]]
"""A launch: kernel, grid, everything that the kernel takes."""


class Kernel:
    """What Triton returns of a compilation."""

    def __init__(self, card: Card, fn: Any, signature: dict[str, str], beside: bool = False) -> None:
        self.name, self.card = fn.__name__, card
        self.src = SimpleNamespace(signature=signature)
        self.function = len(card.kernels) + 1
        self.packed_metadata = (4, 1, 100 + self.function)
        about = [{"block": kind} for kind in signature.values() if kind.startswith("tensordesc")]
        for one in about:
            one["block"] = [int(n) for n in one["block"].split("[")[1].split("]")[0].split(",")]
        self.metadata = SimpleNamespace(tensordesc_meta=about)
        self.run = _Run(self, beside)

    @property
    def kinds(self) -> list[str]:
        """Types of what the kernel takes."""
        return [k for k in self.src.signature.values() if k != "constexpr"]

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def sizes(self) -> list[int]:
        found: list[int] = []
        for kind in self.kinds:
            if kind.startswith("tensordesc"):
                found += [128, 4, 4, 8, 8]
            else:
                found.append(8 if kind[0] == "*" else struct.calcsize(FORMATS[kind]))
        return [*found, 8, 8]

    def listed(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """A launch by Triton's launcher."""
        values: list[Any] = []
        about = iter(self.metadata.tensordesc_meta)
        for kind, a in zip(self.src.signature.values(), arguments, strict=True):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                values += [encode(a, next(about), a.base.data_ptr()), *a.shape, *a.strides]
            elif kind[0] == "*":
                values.append(a.data_ptr() if hasattr(a, "data_ptr") else a)
            else:
                values += struct.unpack(FORMATS[kind], struct.pack(FORMATS[kind], a))
        self.card.launches.append((self.name, grid, tuple(values)))

    def read(self, config: parameters.Config | KernelNode, table: int) -> Listed:
        """A launch by the driver."""
        sizes = self.sizes()
        addresses = (ctypes.c_void_p * len(sizes)).from_address(table)
        kinds: list[str] = []
        for kind in self.kinds:
            kinds += ["map", "i", "i", "q", "q"] if kind.startswith("tensordesc") else [kind]
        values: list[Any] = []
        for kind, size, address in zip([*kinds, "*", "*"], sizes, addresses, strict=True):
            assert address % min(size, 128) == 0
            raw = ctypes.string_at(address, size)
            form = {"map": "128s"}.get(kind) or ("Q" if kind[0] == "*" else FORMATS.get(kind, kind))
            values += struct.unpack(form, raw)
        assert values[-2:] == [0, 0] and tuple(config.block) == (128, 1, 1) and config.shared == 100 + self.function
        return self.name, tuple(config.grid), tuple(values[:-2])


class _Run:
    """Triton's launcher of a kernel."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = False

    def __init__(self, kernel: Kernel, beside: bool) -> None:
        self.kernel, self.launch_pdl = kernel, beside

    def __call__(
        self, x: int, y: int, z: int, stream: int, f: int, about: Any, meta: Any, enter: Any, leave: Any, *a: Any
    ):
        assert f == self.kernel.function and about == self.kernel.packed_metadata
        self.kernel.card.listeners.append(enter)
        self.kernel.listed((x, y, z), a)


class Card:
    """compiled: a name for each specialisation; alone: of those the ones that were compiled one after the other. direct:
    launches past Triton's launcher, `streams` of those; listeners: who was told of the others. entered: threads that asked for
    a context. status: what the driver answers."""

    def __init__(self) -> None:
        self.launches: list[Listed] = []
        self.kernels: list[Kernel] = []
        self.direct = self.entered = 0
        self.graphs = CardGraphs(self)
        self.alone: list[str] = []
        self.streams: list[int] = []
        self.listeners: list[Any] = []
        self.stream = 0
        self.status = 0

    @property
    def compiled(self) -> list[str]:
        return [k.name for k in self.kernels]

    # What Triton asks of its driver.
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> Card:
        return self

    def get_current_stream(self, index: int | None) -> int:
        return self.stream

    # What `parameters.py` asks of libcuda.
    def sizes(self, function: int) -> list[int]:
        return self.kernels[function - 1].sizes()

    def launch(self, config: int, function: int, table: int, extra: None) -> int:
        if self.status:
            return self.status
        self.direct += 1
        about = parameters.Config.from_address(config)
        self.streams.append(about.stream or 0)
        kernel = self.kernels[function - 1]
        assert bool(about.attributes) == kernel.run.launch_pdl == about.count
        if about.count:
            found = parameters.Attribute.from_address(about.attributes)
            assert (found.id, found.value[0], ctypes.sizeof(found)) == (6, 1, 72)
        self.launches.append(kernel.read(about, table))
        return 0

    def enter(self) -> None:
        self.entered += 1

    def message(self, status: int) -> str:
        return f"error {status}"

    def compile(
        self, fn: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, *rest: Any
    ) -> Kernel:
        kernel = Kernel(self, fn, signature, bool(options.launch_pdl))
        self.kernels.append(kernel)
        if threading.current_thread() is threading.main_thread():
            self.alone.append(kernel.name)
        return kernel


class CardGraphs:
    """What `graphs.py` asks of libcuda. alive: the launches of each graph; launched: how many launches came from graphs.
    captures: whether the current stream does."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.alive: dict[int, list[Listed]] = {}
        self.made = self.launched = 0
        self.captures = False

    def capturing(self) -> bool:
        return self.captures

    def make(self, nodes: list[KernelNode], stream: int) -> int | None:
        assert not self.captures
        if self.card.status:
            return None
        self.made += 1
        kernels = [self.card.kernels[n.function - 1] for n in nodes]
        assert not any(k.run.launch_pdl for k in kernels)  # a node has no such attribute
        self.alive[self.made] = [k.read(n, n.parameters) for k, n in zip(kernels, nodes, strict=True)]
        return self.made

    def launch(self, graph: int, stream: int) -> int:
        assert not self.captures
        if not self.card.status:
            found = self.alive[graph]
            self.card.launches += found
            self.card.streams += [stream] * len(found)
            self.card.direct += len(found)
            self.launched += len(found)
        return self.card.status

    def drop(self, graph: int) -> None:
        del self.alive[graph]


@contextmanager
def fake_card() -> Iterator[Card]:
    """CPU tensors are taken for tensors on it."""
    card = Card()
    before = triton_driver._active
    touched: list[Any] = []

    def do_compile(self: Any, key: Any, *rest: Any) -> Kernel:
        touched.append(self)
        made = self.device_caches[card][0][key] = card.compile(self, key, *rest)
        return made

    triton_driver._active = card
    try:
        with (
            patch.object(JITFunction, "_do_compile", do_compile),
            patch.object(launch, "driver", SimpleNamespace(active=card)),
            patch.object(launch, "_compiled", {}),
            patch.object(launch, "find_driver", lambda: card),
            patch.object(parameters, "encoded", encode),
            patch.object(torch.cuda, "current_device", lambda: None),  # the index of a CPU device
            patch.object(calls, "KEY_ANY_DEVICE", True),
        ):
            yield card
    finally:
        for fn in touched:
            fn.device_caches.pop(card, None)
        triton_driver._active = before

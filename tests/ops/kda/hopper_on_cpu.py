"""`kda(impl="hopper")` on a CPU, forward and backward: the library's host code, and under it the kernels' own source with torch
in place of Gluon (`gluon_on_cpu.py`, `gluon_clocks_on_cpu.py`: addresses are checked, roles are watched for races).

All memory that the host makes starts as NaN, or as whatever else `poison` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import gluon_clocks_on_cpu as roles
import gluon_on_cpu as plain
import torch
from torch import Tensor

from openkda.ops.kda import hopper
from openkda.ops.kda.hopper import (
    apart,
    backward,
    chains,
    factors,
    forward,
    fused_factors,
    fused_state,
    gradient_tiles,
    gradients,
    instructions,
    keep,
    launch,
    levels,
    prepare,
    products,
    replay,
    reverse,
    scan,
    state,
    walks,
)
from openkda.ops.kda.triton import backward as portable

_FORWARD = (instructions, factors, apart, chains, state, prepare, levels, scan, fused_factors, fused_state, forward)
_WALKS = (instructions, factors, chains, state, gradient_tiles, products, scan, replay, reverse)


@cache
def _kernels() -> dict[str, Any]:
    """By name, each with torch under its source. Some modules share a name for two things, so there are three groups."""
    groups = (roles.load(*_WALKS), roles.load(*_FORWARD), plain.load(instructions, gradient_tiles, products, gradients))
    return {n: f for names in groups for n, f in names.items() if n.endswith("_kernel")}  # of two the later one


def _merge(
    rows: int, transition: Tensor, local: Tensor, s0: Tensor, entering: Tensor, HV: int, segments: int, has_s0: bool, *_: Any
) -> None:  # fmt: skip
    """`merge_segments_kernel`, which is Triton's, for all heads of all sequences."""
    shape = (rows, segments, HV, 128, 128)
    m, x, out = (t[: torch.Size(shape).numel()].view(shape) for t in (transition, local, entering))
    S = s0.reshape(rows, HV, 128, 128) if has_s0 else torch.zeros(rows, HV, 128, 128)
    for i in range(segments):
        out[:, i] = S
        S = m[:, i] @ S + x[:, i]


class _Memory:
    """What the host has made, by address."""

    def __init__(self, poison: float) -> None:
        self.poison, self.made, self.empty = poison, list[Tensor](), torch.empty
        self.launched: list[str] = []

    def new(self, *shape: Any, **options: Any) -> Tensor:
        t: Tensor = self.empty(*shape, **options)
        if type(t) is Tensor and t.device.type == "cpu":  # no fake one of torch.compile
            t.fill_(self.poison if t.is_floating_point() else 255 if t.dtype == torch.uint8 else -1)
            self.made.append(t)
        return t

    def knows(self, operands_in: Any) -> Any:
        """`operands_in` for workspaces that others made: a hook on saved tensors copies them."""

        def of(workspace: Tensor, *given: Any, **named: Any) -> Any:
            self.made.append(workspace)
            return operands_in(workspace, *given, **named)

        return of

    def at(self, x: Any) -> Tensor:
        """A tensor, or the tensor from a place in one to its end."""
        if isinstance(x, Tensor):
            return x.detach()  # roles are threads, whose autograd is on
        for t in self.made:
            begin = x.data_ptr() - t.data_ptr()
            if 0 <= begin < t.numel() * t.element_size():
                rest = t.view(-1).view(torch.uint8)[begin:]
                return rest[: len(rest) // x.dtype.itemsize * x.dtype.itemsize].view(x.dtype)
        raise AssertionError("a place in nobody's memory")

    def matrix(self, d: Any) -> Any:
        base = self.at(d.base)
        return roles.Matrix(torch.as_strided(base, d.shape, d.strides, base.storage_offset()), tuple(d.block_shape))

    def launch_with_roles(
        self, kernel: Any, grid: Any, descriptors: Any, pointers: Any, sizes: Any, numbers: Any, constants: Any, index: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        name = kernel.fn.__name__
        self.launched.append(name)
        arguments = [*map(self.matrix, descriptors), *map(self.at, pointers), *sizes, *numbers, *constants]
        if name == "merge_segments_kernel":
            _merge(grid[0] // sizes[0], *arguments)
        else:
            roles.run(_kernels()[name], grid[0], arguments)

    def launch(
        self,
        kernel: Any,
        programs: int,
        tensors: Any,
        steps: Any,
        numbers: Any,
        constants: Any,
        warps: int,
        device: Any,
    ) -> None:
        kernel = getattr(kernel, "kernel", None) or kernel
        name = kernel.fn.__name__
        self.launched.append(name)
        if name == "sums_kernel":  # Triton's
            for partial, whole in ((tensors[0], tensors[2]), (tensors[1], tensors[3])):
                if whole is not None:
                    whole.copy_(partial.sum(0 if whole.numel() > partial.shape[1] else (0, 2)).view_as(whole))
            return
        names = kernel.arg_names[-len(constants) :]
        named = {n: getattr(c, "value", c) for n, c in zip(names, constants, strict=True)}
        tensors = [None if t is None else t.detach() for t in tensors]
        plain.run(_kernels()[name], programs, tensors, (*steps, *numbers), named)


@contextmanager
def hopper_on_cpu(processors: int = 132, poison: float = float("nan")) -> Iterator[list[str]]:
    """Inside, `kda(impl="hopper")` takes CPU tensors. Gives the names of kernels as they are launched. processors: of the card,
    from which the forward's schedule follows and whether a program walks half a head."""
    memory = _Memory(poison)
    with ExitStack() as stack:
        here = lambda owner, name, value: stack.enter_context(patch.object(owner, name, value))  # noqa: E731
        here(torch, "empty", memory.new)
        here(torch.cuda, "current_device", lambda: None)
        here(hopper, "_device_refusals", lambda device: [])
        here(backward, "fits", lambda a: a.l2norm and not a.exact and all(map(backward._walkable, (a.q, a.k, a.g))))
        here(portable, "_generation", lambda device: 9)
        for module in (launch, walks):
            here(module, "_launch", memory.launch_with_roles)
            here(module, "_sm_count", lambda index: processors)
            here(module, "operands_in", memory.knows(module.operands_in))
        here(portable, "launch", memory.launch)
        here(backward, "launch", memory.launch)
        assert keep._scan is launch._scan  # which launches by its module's name
        yield memory.launched

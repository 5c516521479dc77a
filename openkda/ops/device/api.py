"""Whether Triton kernels can run on a tensor, found out without importing triton; which transforms of torch are at work; and
the choice between the implementations of a small op.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from openkda.ops.device.calls import Repeated, are_plain, call_key, goes_direct, has_values, is_batched, is_watched
from openkda.ops.device.operators import define, derive, refuse_derivative

__all__ = [
    "GLUON_RELEASE",
    "Repeated",
    "are_plain",
    "call_key",
    "choose_module",
    "counts_in_32_bits",
    "define",
    "derive",
    "goes_direct",
    "has_values",
    "is_batched",
    "is_hopper",
    "is_watched",
    "log_choice",
    "no_autocast",
    "on_device",
    "refuse_derivative",
    "transform_refusals",
    "triton_refusals",
    "triton_release",
]

log = logging.getLogger("openkda.ops")

GLUON_RELEASE = "3.6"
"""Gluon is experimental and moves between releases of Triton: its kernels run with this one alone."""

_INSTALLED = importlib.util.find_spec("triton") is not None


def triton_refusals(x: Tensor) -> list[str]:
    """Why no Triton kernel can run on x; empty when one can. TRITON_INTERPRET=1 allows CPU tensors, except
    bfloat16, which the interpreter computes wrongly."""
    reasons = []
    if not _INSTALLED:
        reasons.append("triton is not installed")
    if not x.is_cuda:
        if os.environ.get("TRITON_INTERPRET", "0") != "1":
            reasons.append(f"needs CUDA tensors, received {x.device.type}")
        elif x.dtype == torch.bfloat16:
            reasons.append("the Triton interpreter computes bfloat16 wrongly")
    if x.dtype == torch.float64:
        reasons.append("float64 inputs")
    return reasons + transform_refusals()


def counts_in_32_bits(x: Tensor, axis: int) -> bool:
    """Whether kernels, which count in 32 bits within a row or a head, reach all of x from `axis` on."""
    return sum((n - 1) * s for n, s in zip(x.shape[axis:], x.stride()[axis:], strict=True)) < 2**31


def triton_release() -> str:
    """Its first two numbers, empty without it."""
    try:
        return ".".join(importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


@cache
def is_hopper(index: int) -> bool:
    """Whether CUDA device `index` runs the Gluon kernels."""
    return triton_release() == GLUON_RELEASE and torch.cuda.get_device_capability(index) == (9, 0)


def transform_refusals() -> list[str]:
    """Why a function whose derivative is written by hand, once, for reverse mode, cannot run here; empty when it can.

    Asked of torch's state, not of the tensors, which costs nothing. An operator with no rule for forward mode would lose the
    tangent without a word.
    """
    if forward_ad._current_level >= 0:
        return ["inside forward-mode AD (jvp, dual numbers): take the gradient in reverse mode, or impl='reference'"]
    if torch._C._are_functorch_transforms_active():
        return [
            "inside torch.func (vmap, grad, jacrev): batch along B and use torch.autograd.grad, or impl='reference'"
        ]
    return []


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of a floating x where it is on for x's device, else None; torch raises where there is no autocast."""
    kind = x.device.type
    if kind not in ("cuda", "cpu") and not torch.amp.is_autocast_available(kind):
        return None
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """For code that chooses its dtypes itself: inside an autocast region its products would be rounded to 16 bits."""
    kind = x.device.type
    if kind in ("cuda", "cpu") or torch.amp.is_autocast_available(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Where a GPU is meant, it is the current one inside."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def log_choice(op: str, device: str, name: str, reasons: tuple[str, ...]) -> None:
    """Once for each (op, reasons). A call that no kernel takes is a warning: nobody should find that out by a stopwatch."""
    level, why = (logging.WARNING, f" (not {'; not '.join(reasons)})") if reasons else (logging.INFO, "")
    log.log(level, "%s on %s runs %s%s", op, device, name, why)


def choose_module(
    op: str, names: tuple[str, ...], impl: str | None, x: Tensor, load: Callable[[str], ModuleType]
) -> ModuleType:
    """The module of `op` that runs x: `impl`, or the first of `names` without refusals (on the CPU the reference).

    load: name -> module with `refusals(x)`. Written out by each op, because torch.compile follows an import statement but not
    importlib. Raises: ValueError for an unknown name; NotImplementedError with every reason when none can run.
    """
    if impl is not None and impl not in names:
        raise ValueError(f"impl: expected one of {', '.join(names)} or None, received {impl!r}")
    reasons: list[str] = []
    for name in (names if x.is_cuda else ("reference",)) if impl is None else (impl,):
        module = load(name)
        refused = module.refusals(x)
        if not refused:
            if impl is None and not torch.compiler.is_compiling():
                log_choice(op, x.device.type, name, tuple(reasons))
            return module
        reasons += [f"{name}: {r}" for r in refused]
    raise NotImplementedError(f"no {op} implementation can run this call: " + "; ".join(reasons))

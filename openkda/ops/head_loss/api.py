"""The contract of the head's loss: cross-entropy of h W^T, summed over tokens.

    sum_n [ logsumexp_v(h_n . w_v) - h_n . w_(target n) ]        nats

On a GPU the logits exist for a few thousand tokens at a time, and are turned into their gradient where they lie: 32,768 tokens
of a vocabulary as large would otherwise take 2.1 GB in 16 bits and three times 4.3 GB in float32.
"""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openkda.ops.device.api import autocast_dtype, choose_module

__all__ = ["IMPLEMENTATIONS", "head_loss"]

IMPLEMENTATIONS = ("triton", "reference")
"""In order of preference. Each is a module of this folder with `refusals(x)` and `run`."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def head_loss(
    h: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " N"], *, impl: str | None = None
) -> Float[Tensor, ""]:
    """Sum over tokens of the cross-entropy between softmax(h W^T) and the targets.

    Args:
        h: [N, D] hidden states; weight: [V, D], any float dtypes. The product is computed in autocast's dtype where autocast
            is on, else in h's; everything behind it in float32 (float64 for float64).
        targets: [N] int64 in [0, V); none is left out. Values are checked on the CPU only.
        impl: a name out of IMPLEMENTATIONS; None chooses.
    Returns: a scalar, float32 (float64 for float64). Divide by N for the mean.
    Raises: ValueError or TypeError, showing expected and received, before anything runs.
    Differentiable in h and weight; on a GPU once.
    """
    for name, t, dims in (("h", h, 2), ("weight", weight, 2), ("targets", targets, 1)):
        if not isinstance(t, Tensor):
            _bad(name, "a torch.Tensor", type(t).__name__, TypeError)
        if t.dim() != dims:
            _bad(f"{name}.shape", f"{dims} dimensions", list(t.shape))
        if t.device != h.device:
            _bad(f"{name}.device", f"{h.device} (that of h)", t.device)
    for name, t in (("h", h), ("weight", weight)):
        if t.dtype not in _FLOATS:
            _bad(f"{name}.dtype", "float16, bfloat16, float32 or float64", t.dtype, TypeError)
    if targets.dtype != torch.int64:
        _bad("targets.dtype", "int64", targets.dtype, TypeError)
    if weight.shape[1] != h.shape[1] or targets.shape[0] != h.shape[0]:
        _bad(
            "weight and targets",
            f"[V, {h.shape[1]}] and [{h.shape[0]}]",
            f"{list(weight.shape)}, {list(targets.shape)}",
        )
    if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= weight.shape[0]:  # torch would leave out -100 without a word
            _bad("targets", f"ids in [0, {weight.shape[0]})", f"{low}..{high}")
    return choose_module("head_loss", IMPLEMENTATIONS, impl, h, _module).run(
        h, weight, targets, autocast_dtype(h) or h.dtype
    )


def _bad(name: str, expected: object, received: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: expected {expected}, received {received}")


def _module(name: str) -> ModuleType:
    if name == "triton":
        from openkda.ops.head_loss import triton

        return triton
    from openkda.ops.head_loss import reference

    return reference

"""How parameters start, and which of them stay in float32.

A module with parameters of its own beside linear and embedding matrices has a method `init_parameters(generator)`;
`init_weights` walks a module tree and starts everything below it, so that nothing is left uninitialised after
building on the meta device and `to_empty`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class InitParameters(Protocol):
    """A module that starts its own parameters (not its children's)."""

    def init_parameters(self, generator: torch.Generator | None) -> None: ...


class Float32Parameters(nn.Module):
    """A module whose OWN parameters never become narrower than float32.

    `.to(torch.bfloat16)`, `.half()`, `.bfloat16()` and `.type()` move them and keep their values; `.double()` widens
    them. A_log rounded to bfloat16 is off by up to 0.4 % in the forward pass, and steps of 1e-4 no longer move it, so a
    float32 master copy elsewhere would not help (precision list of the Kimi K3 checkpoint: these tensors are stored F32).
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32Parameters:
        if recurse:
            for child in self.children():
                child._apply(fn)

        return super()._apply(lambda t: at_least_float32(fn, t), recurse=False)


def at_least_float32(fn: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """fn(t), a cast or a move, except that a 16-bit result becomes the float32 tensor that t holds."""
    moved = fn(t)
    if moved.is_floating_point() and moved.dtype.itemsize < 4:
        return t.to(device=moved.device, dtype=torch.float32)
    return moved


@torch.no_grad()
def fill(p: Tensor, draw: Callable[[Tensor], Tensor], generator: torch.Generator | None) -> None:
    """p <- draw(float32 tensor of its shape). Drawn on the CPU with a generator (the same values on every device), on p's
    own device without one; nothing happens on the meta device."""
    if p.is_meta:
        return
    wide = torch.promote_types(p.dtype, torch.float32)
    p.copy_(draw(torch.empty(p.shape, dtype=wide, device=p.device if generator is None else "cpu")))


def fill_normal(p: Tensor, std: float, generator: torch.Generator | None) -> None:
    fill(p, lambda t: t.normal_(0.0, std, generator=generator), generator)


def fill_uniform(p: Tensor, low: float, high: float, generator: torch.Generator | None) -> None:
    fill(p, lambda t: t.uniform_(low, high, generator=generator), generator)


def fill_constant(p: Tensor, value: float) -> None:
    fill(p, lambda t: t.fill_(value), None)


def init_weights(root: nn.Module, std: float, generator: torch.Generator | None = None) -> None:
    """Linear and embedding matrices from N(0, std^2), biases 0; everything else by its module's `init_parameters`."""
    for module in root.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            fill_normal(module.weight, std, generator)
            bias = getattr(module, "bias", None)
            if bias is not None:
                fill_constant(bias, 0.0)
        elif isinstance(module, InitParameters):
            module.init_parameters(generator)

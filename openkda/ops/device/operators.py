"""Operators of torch: one opaque call each for torch.compile, autograd, CUDA graphs and whoever else looks from outside.

Low-level define and impl: a Python `custom_op` costs ten times as much per call (130 against 13 us).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("openkda", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `openkda::NAME` of a schema "NAME(..) -> ..". fake: results of the right shapes and dtypes, uncomputed."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"openkda::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.openkda, name).default


def derive(operator: Any, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """Gives an operator its derivative; arguments as in `torch.library.register_autograd`."""
    torch.library.register_autograd(operator, backward, setup_context=save, lib=_LIBRARY)


def refuse_derivative(operator: Any, message: str) -> None:
    """Whoever differentiates the operator gets NotImplementedError(message)."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(message)

    derive(operator, refuse, lambda ctx, inputs, output: None)

"""Operators of torch: one opaque call each for torch.compile, autograd, CUDA graphs and whoever else looks from outside.

Low-level define and impl: a Python `custom_op` costs ten times as much per call (130 against 13 us).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_LIBRARY = torch.library.Library("openkda", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `openkda::NAME` of a schema "NAME(..) -> ..". fake: results of the right shapes and dtypes, uncomputed."""
    name = schema.partition("(")[0]

    def traced(*arguments: Any, **named: Any) -> Any:
        _name_shortly()
        return fake(*arguments, **named)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"openkda::{name}", traced, lib=_LIBRARY)
    return getattr(torch.ops.openkda, name).default


@cache
def _name_shortly() -> None:
    """Before torch 2.13 inductor writes down, for a log that is off, what an operator it has not met before is given: all
    operators in front of it, twice for each residual connection. torch.compile of a packed hybrid never ended (2.11). So it
    is told to write the operator's name and the types of its arguments."""
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13):
        return
    from torch._inductor.exc import OperatorIssue

    def operator_str(target: Any, args: list[Any], kwargs: dict[str, Any]) -> str:
        return f"target: {target}, given {[type(a).__name__ for a in args]} {sorted(kwargs)}"

    OperatorIssue.operator_str = staticmethod(operator_str)  # type: ignore[method-assign]


def derive(operator: Any, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """Gives an operator its derivative; arguments as in `torch.library.register_autograd`."""
    torch.library.register_autograd(operator, backward, setup_context=save, lib=_LIBRARY)


def refuse_derivative(operator: Any, message: str) -> None:
    """Whoever differentiates the operator gets NotImplementedError(message)."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(message)

    derive(operator, refuse, lambda ctx, inputs, output: None)

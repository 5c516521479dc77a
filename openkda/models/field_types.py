"""Whether the values of a config, which come from a file that anyone can edit, are of its fields' types."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Hashable
from functools import cache
from typing import Any

_LARGEST = 1 << 31  # no size, count or id of a model reaches it, and torch's own shapes hold it


def check_types(config: Any, title: str) -> None:
    """Raise ValueError naming the first field of the dataclass `config` whose value is not of its annotated type.

    Stricter than Python: a bool is no number, a number is finite, an integer stays below 2^31; an int will do for a float.
    """
    for name, hint in _hints(typing.cast(Hashable, type(config))).items():
        value = getattr(config, name)
        if not _fits(value, hint):
            raise ValueError(f"{title}: {name}: expected {_say(hint)}, received {value!r:.80}")


@cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, a) for a in arguments)
    if origin is typing.Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, arguments[0]) for v in value)
    if hint is int or (hint is float and isinstance(value, int)):
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST
    if hint is float:
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, hint)


def _say(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_say(a) for a in arguments)
    if origin is typing.Literal:
        return ", ".join(map(repr, arguments))
    if origin is tuple:
        return f"a list, each {_say(arguments[0])}"
    names = {int: "an integer below 2^31", float: "a finite number", bool: "true or false", str: "a string"}
    return names.get(hint, "null" if hint is type(None) else getattr(hint, "__name__", str(hint)))

"""What a config file that anyone can edit may hold: every key once, and values of its fields' types."""

from __future__ import annotations

import json
import math
import types
import typing
from collections import Counter
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

_LARGEST = 1 << 31  # no size, count or id of a model reaches it, and torch's own shapes hold it


def check_types(config: Any, title: str, *, largest: int = _LARGEST) -> None:
    """Raise ValueError naming the first field of the dataclass `config` whose value is not of its annotated type.

    Stricter than Python: a bool is no number, a number is finite, an integer stays below `largest`; an int will do for a float.
    """
    for name, hint in _hints(typing.cast(Hashable, type(config))).items():
        value = getattr(config, name)
        if not _fits(value, hint, largest):
            raise ValueError(f"{title}: {name}: expected {_say(hint, largest)}, received {value!r:.80}")


def parse_json(text: str | bytes) -> Any:
    """`json.loads` that does not let the second of two equal keys win in silence: ValueError names it."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise ValueError(f"keys that stand there twice: {', '.join(twice[:10])}")
        return found

    return json.loads(text, object_pairs_hook=once)


@cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fits(value: Any, hint: Any, largest: int) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, a, largest) for a in arguments)
    if origin is typing.Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, arguments[0], largest) for v in value)
    if hint is int or (hint is float and isinstance(value, int)):
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < largest
    if hint is float:
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, origin or hint)


def _say(hint: Any, largest: int) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_say(a, largest) for a in arguments)
    if origin is typing.Literal:
        return ", ".join(map(repr, arguments))
    if origin is tuple:
        return f"a list, each {_say(arguments[0], largest)}"
    integer = f"an integer below 2^{largest.bit_length() - 1}"
    names = {int: integer, float: "a finite number", bool: "true or false", str: "a string", Mapping: "a mapping"}
    return names.get(origin or hint, "null" if hint is type(None) else getattr(hint, "__name__", str(hint)))

"""transformers' own KDA models with this library's functions inside: `patch()`, `unpatch()`, or `with patched():`.

transformers (5.17 and later) computes Kimi Delta Attention in two module-level functions of each model's modelling file, and
without a GPU package those are plain torch that builds a [B, H, N, 64, 64, K] tensor. `patch()` puts `openkda.kda` and
`openkda.kda_step` in their place: the same numbers, many times faster on a CPU, linear memory, and on a GPU whatever
kernel fits; torch.compile sees one operator a layer. Packed sequences (`cu_seqlens`), which those functions ignore (5.17)
or refuse (5.24), are kept apart, in the convolution before them too. The attention layers know of packing by
`position_ids` alone, and only without a cache and a mask; a pack that they would run together is refused
(`hf_packs.py`). Under torch.export the original functions run, unchanged.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from openkda.compat.hf_packs import MODEL_CLASSES, with_pack_check
from openkda.compat.hf_register import need_transformers, register
from openkda.ops.kda.api import kda, kda_step
from openkda.ops.short_conv.api import WIDTHS, short_conv

__all__ = ["MODELS", "patch", "patched", "register", "unpatch"]

MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid")
"""Models of transformers that have these functions; one that the installed version lacks is skipped."""

_originals: dict[tuple[str, str], Callable[..., Any]] = {}


class _Wanted:
    """Who wants the functions replaced: `patch()` itself, and so many open blocks of `patched()` in all threads."""

    lock = threading.RLock()
    asked = False
    blocks = 0


def patch() -> tuple[str, ...]:
    """Replace the functions in every model of MODELS that is installed; returns their names. Again is harmless.

    Models built before and after are both affected: the functions are looked up at each call, in every thread.
    Raises: ImportError without transformers, or with one that has none of these models.
    """
    with _Wanted.lock:
        names = _install()
        _Wanted.asked = True
    return names


def unpatch() -> None:
    """Put every original function back; where blocks of `patched()` are open, when the last of them ends. Harmless without a
    patch."""
    with _Wanted.lock:
        _Wanted.asked = False
        _put_back_unwanted()


@contextmanager
def patched() -> Iterator[tuple[str, ...]]:
    """`patch()` for a block. Inside an outer patch it changes nothing, neither on entry nor on exit. Blocks of several threads
    may overlap: the functions, which all threads share, are put back when the last one ends."""
    with _Wanted.lock:
        names = _install()
        _Wanted.blocks += 1
    try:
        yield names
    finally:
        with _Wanted.lock:
            _Wanted.blocks -= 1
            _put_back_unwanted()


def _install() -> tuple[str, ...]:
    found = _modules()
    if not found:
        version = importlib.import_module("transformers").__version__
        raise ImportError(
            f"transformers: expected one of the models {', '.join(MODELS)} (5.17 or later), found {version}"
        )
    for model, module in found.items():
        for name, make in {**_REPLACEMENTS, f"{MODEL_CLASSES[model]}.forward": with_pack_check(model)}.items():
            key = (module.__name__, name)
            where, _, attribute = name.rpartition(".")
            owner = getattr(module, where, None) if where else module
            if key not in _originals and hasattr(owner, attribute):
                _originals[key] = getattr(owner, attribute)
                setattr(owner, attribute, make(_originals[key]))
    return tuple(found)


def _put_back_unwanted() -> None:
    while _originals and not _Wanted.asked and not _Wanted.blocks:
        (module, name), original = _originals.popitem()
        where, _, attribute = name.rpartition(".")
        found = importlib.import_module(module)
        setattr(getattr(found, where) if where else found, attribute, original)


def _modules() -> dict[str, ModuleType]:
    need_transformers()
    found = {}
    for name in MODELS:
        try:
            found[name] = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except ModuleNotFoundError as missing:
            if not (missing.name or "").startswith(f"transformers.models.{name}"):
                raise
    return found


def _replaces(make: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn `make(original, *args, **kwargs)` into a factory of functions that look like the original."""

    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_exporting():  # what is exported should not need this library
                return original(*args, **kwargs)
            return make(original, *args, **kwargs)

        return function

    return factory


@_replaces
def _chunk(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """query, key [B, T, H, K], value [B, T, H, V], g [B, T, H, K] log decay, beta [B, T, H]; chunk_size changes nothing."""
    q, k, v = _one_dtype(query, key, value)
    out = kda(
        q, k, v, g, beta,
        initial_state=_state(initial_state, q), output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens, use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
    )  # fmt: skip
    return out.output.to(query.dtype), out.final_state


@_replaces
def _recurrent(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    q, k, v = _one_dtype(query, key, value)
    state = _state(initial_state, q)
    if query.shape[1] != 1 or state is None or cu_seqlens is not None:
        out = kda(
            q, k, v, g, beta, initial_state=state, output_final_state=bool(output_final_state),
            cu_seqlens=cu_seqlens, use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
        )  # fmt: skip
        return out.output.to(query.dtype), out.final_state
    q, k, v, g, beta = (t.squeeze(1) for t in (q, k, v, g, beta))
    o, new = kda_step(q, k, v, g, beta, state, use_qk_l2norm=bool(use_qk_l2norm_in_kernel))
    return o.unsqueeze(1).to(query.dtype), new if output_final_state else None


@_replaces
def _conv(
    original: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The original but for packed sequences, which it would mix: hidden_states [1, D, T], weight [D, W]."""
    ours = bias is None and activation in ("silu", None) and weight.shape[-1] in WIDTHS
    if cu_seqlens is None or not ours:
        return original(hidden_states, weight, bias=bias, activation=activation, cu_seqlens=cu_seqlens, **kwargs)
    y, _ = short_conv(hidden_states.transpose(1, 2), weight, cu_seqlens=cu_seqlens, activation=activation)
    return y.transpose(1, 2)


def _one_dtype(*tensors: Tensor) -> list[Tensor]:
    """The widest of their dtypes for all: the originals compute in float32 whatever comes."""
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return [t.to(dtype) for t in tensors]


def _state(state: Tensor | None, q: Tensor) -> Tensor | None:
    return None if state is None else state.to(torch.promote_types(q.dtype, torch.float32))


_REPLACEMENTS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "chunk_kimi_delta_attention": _chunk,
    "recurrent_kimi_delta_attention": _recurrent,
    "causal_conv1d_fn": _conv,
}

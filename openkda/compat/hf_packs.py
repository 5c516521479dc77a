"""Packs that transformers' attention layers would run together are refused: `cu_seqlens` reaches the KDA layers only.

transformers derives the attention mask of a pack from `position_ids` that begin anew at every sequence, and only when there is
neither an attention mask nor a cache. Everything else attends across the sequences without a word.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MODEL_CLASSES = {
    "kimi_linear": "KimiLinearModel",
    "glm5_next": "Glm5NextTextModel",
    "bailing_hybrid": "BailingHybridModel",
}
"""The class of each model whose forward receives the ids, the positions and the cache."""

NEVER_PACKED = frozenset({"glm5_next"})
"""Models whose attention has no packed form at all (transformers 5.24: its indexer sees a padding mask only)."""


def with_pack_check(model: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A factory of forwards that look like the original and check first."""

    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)[1:]

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            cu, mask, positions = (given.get(name) for name in ("cu_seqlens", "attention_mask", "position_ids"))
            cache = given.get("cache", given.get("past_key_values"))
            if cu is not None and cu.shape[0] > 2:
                check_pack(model, cu, mask, positions, cache is not None or _makes_cache(self, given.get("use_cache")))
            elif cu is None and mask is None and cache is None and model not in NEVER_PACKED:
                _check_positions(positions)
            return original(self, *args, **kwargs)

        return forward

    return factory


def check_pack(model: str, cu: Tensor, attention_mask: Any, position_ids: Tensor | None, cached: bool) -> None:
    """ValueError, with the remedy, unless the attention layers will keep the sequences of `cu` apart.

    cu: [N + 1] with N > 1. attention_mask: None, or a dict of ready masks, which are the caller's own. Values are read
    outside of torch.compile only.
    """
    if model in NEVER_PACKED:
        raise ValueError(
            f"cu_seqlens: expected one sequence, received {len(cu) - 1}: the attention of {model} in transformers cannot "
            "keep packed sequences apart; run them as rows of a padded batch"
        )
    if cached:
        raise ValueError("cu_seqlens: expected no cache, because with one the attention layers mix the sequences of a pack; "
                         "pass use_cache=False")  # fmt: skip
    if isinstance(attention_mask, dict):
        return
    if attention_mask is not None:
        raise ValueError("cu_seqlens: expected no attention_mask, because with one the attention layers mix the sequences of "
                         "a pack; leave it out (a pack has no padding)")  # fmt: skip
    remedy = "pass position_ids=torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])[None]"
    if position_ids is None:
        raise ValueError("cu_seqlens: expected position_ids that begin anew at every sequence, by which alone the attention "
                         f"layers tell them apart, received none; {remedy}")  # fmt: skip
    if torch.compiler.is_compiling():
        return
    begins, starts = _begins(position_ids), cu[(cu > 0) & (cu < position_ids.shape[-1])].unique()
    if not torch.equal(begins, starts.to(begins)):
        raise ValueError(
            f"position_ids: expected to begin anew where cu_seqlens does, at {starts.tolist()}, received {begins.tolist()}; "
            f"{remedy}"
        )


def _check_positions(position_ids: Tensor | None) -> None:
    """Positions that return to 0 are a pack to the attention layers, and one sequence to the KDA layers."""
    if position_ids is None or position_ids.dim() != 2 or torch.compiler.is_compiling():
        return
    row, place = (position_ids[:, 1:] == 0).nonzero().unbind(1)
    if not row.numel():
        return
    if position_ids.shape[0] == 1:
        cu = [0, *(place + 1).tolist(), position_ids.shape[1]]
        began, remedy = f"at {cu[1:-1]}", f"pass cu_seqlens=torch.tensor({cu})"
    else:
        began = f"in row {int(row[0])} at {int(place[0]) + 1}"
        remedy = "lay all rows end to end in one, and pass its position_ids and cu_seqlens"
    raise ValueError(
        f"position_ids: expected one sequence a row without cu_seqlens, received a new one {began}: the KDA layers would carry "
        f"their state across; {remedy}"
    )


def _begins(position_ids: Tensor) -> Tensor:
    """Where a sequence begins after the first, as transformers sees it: wherever positions do not go on by one."""
    return (position_ids.reshape(-1).diff() != 1).nonzero().flatten() + 1


def _makes_cache(module: Any, use_cache: bool | None) -> bool:
    """Whether transformers would make a cache of its own: it does by default."""
    if use_cache is None:
        use_cache = getattr(module.config, "use_cache", False)
    return bool(use_cache) and not (getattr(module, "gradient_checkpointing", False) and module.training)

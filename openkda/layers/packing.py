"""Batches of different lengths: left-padded batches turned into packs, and back.

A padded token is never computed: the real tokens of a batch are laid end to end, run as a pack, and put back, so padding
can touch neither a convolution nor a recurrence nor a cache.
"""

from __future__ import annotations

from typing import NoReturn

import torch.nn.functional as F
from torch import Tensor


def _bad(name: str, expected: object, received: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: expected {expected}, received {received}")


def padding_of(attention_mask: Tensor | None, shape: tuple[int, int], cu_seqlens: Tensor | None) -> Tensor | None:
    """The mask as bool [B, T], True = real token, or None where nothing is padded.

    Raises: ValueError for padding on the right or between tokens, and for padding together with cu_seqlens (the two would
    contradict each other; a mask of ones beside cu_seqlens changes nothing).
    """
    if attention_mask is None:
        return None
    check_mask(attention_mask, shape)
    mask = attention_mask.bool()
    if bool(mask.all()):
        return None
    if cu_seqlens is not None:
        _bad("attention_mask with cu_seqlens", "all True (cu_seqlens alone says what belongs together)", "padding")
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        row = int((mask[:, :-1] & ~mask[:, 1:]).any(1).nonzero()[0])
        _bad(
            "attention_mask", "padding on the left only (False ... True ...)", f"row {row}: {mask[row].int().tolist()}"
        )
    return mask


def check_mask(attention_mask: Tensor | None, shape: tuple[int, int]) -> None:
    """TypeError or ValueError for anything but None or a mask [B, T]."""
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.is_floating_point():
        got = attention_mask.dtype if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        _bad("attention_mask", "a bool tensor, True = real token", got, TypeError)
    if tuple(attention_mask.shape) != shape:
        _bad("attention_mask.shape", f"[B, T] = {list(shape)}", list(attention_mask.shape))


def pack(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, T, ...] -> the real tokens [1, total, ...] and cu_seqlens [B + 1] (a row of padding alone is empty)."""
    return x[mask].unsqueeze(0), F.pad(mask.sum(1).cumsum(0), (1, 0))


def unpack(packed: Tensor, mask: Tensor) -> Tensor:
    """Inverse of `pack`: [1, total, ...] -> [B, T, ...], zeros at the padding. Differentiable."""
    out = packed.new_zeros(*mask.shape, *packed.shape[2:])
    return out.masked_scatter(mask.view(*mask.shape, *[1] * (packed.dim() - 2)), packed)

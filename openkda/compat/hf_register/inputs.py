"""Batches as transformers hands them over: padding on any side, flattened documents, images beside beams."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.models.vision_config import VisionConfig


def check_mask(mask: Any, tokens: Tensor) -> None:
    """ValueError or TypeError for anything but a mask [B, T'] with a column for each of the T tokens at its end."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor [B, T] of 0 and 1, received {type(mask).__name__}")
    B, T = tokens.shape[:2]
    if mask.dim() != 2 or mask.shape[0] != B or mask.shape[1] < T:
        raise ValueError(f"attention_mask.shape: expected [B, T] = [{B}, {T}] (or wider), received {list(mask.shape)}")


_OF_THE_LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")
# What collators and generation add beside what is read here.
_REDUNDANT = ("cu_seq_lens_k", "max_length_q", "max_length_k", "cache_position", "token_type_ids", "seq_idx")


def check_options(options: dict[str, Any], has_documents: bool) -> dict[str, Any]:
    """Those of the loss. Raises: TypeError for names that nothing here reads, ValueError for documents in `seq_idx` alone."""
    unknown = sorted(options.keys() - {*_OF_THE_LOSS, *_REDUNDANT})
    if unknown:
        raise TypeError(f"forward: no meaning for {unknown} in this model")
    if options.get("seq_idx") is not None and not has_documents:
        raise ValueError("seq_idx: expected position_ids or cu_seqlens, which say where documents begin, beside it")
    return {k: v for k, v in options.items() if k in _OF_THE_LOSS}


def placeholders(ids: Tensor, mask: Any, vision: VisionConfig) -> Tensor:
    """How many images each row has a place for, [B]; what is padding is none."""
    found = ids == vision.placeholder_id
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= ids.shape[1]:
        found = found & mask[:, mask.shape[1] - ids.shape[1] :].bool()
    return found.sum(1)


def check_images(ids: Tensor | None, mask: Any, grids: Any, vision: VisionConfig | None) -> None:
    """ValueError where a prompt without pictures has the placeholder of one, which would be read as a word."""
    if vision is None:
        return
    if grids is not None:
        raise ValueError("pixel_values: expected the patches beside grid_thws, received None")
    found = 0 if ids is None else int(placeholders(ids, mask, vision).sum())
    if found:
        raise ValueError(f"placeholder tokens (id {vision.placeholder_id}): expected 0, one an image, received {found}")


def real_tokens(mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """The mask's last T columns as bool [B, T], None where nothing is padded."""
    if mask is None:
        return None
    real = mask[:, mask.shape[1] - tokens.shape[1] :].bool()
    return None if bool(real.all()) else real


def documents(position_ids: Tensor | None, tokens: Tensor, real: Tensor | None) -> Tensor | None:
    """Where documents begin among the real tokens of all rows, laid end to end [N + 1]; None where every row is one.

    position_ids: [B, T] or [1, T]; each 0 behind a row's first real token starts a new document.
    """
    if position_ids is None:
        return None
    B, T = tokens.shape[:2]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, B) or position_ids.shape[1] != T:
        raise ValueError(
            f"position_ids.shape: expected [B, T] = [{B}, {T}] or [1, T], received {list(position_ids.shape)}"
        )
    mask = torch.ones(B, T, dtype=torch.bool, device=tokens.device) if real is None else real
    first = mask & (mask.cumsum(1) == 1)
    starts = first | (mask & (position_ids == 0))
    if torch.equal(starts, first):
        return None
    return F.pad(starts[mask].nonzero().flatten(), (0, 1), value=int(mask.sum()))


def packed(tokens: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The real tokens of a batch laid end to end [1, total, ...], and where each row begins [B + 1]."""
    return tokens[real].unsqueeze(0), F.pad(real.sum(1).cumsum(0), (1, 0))


def expand_images(
    input_ids: Tensor, mask: Any, pixels: Tensor, grids: Tensor, vision: VisionConfig | None, times: int
) -> tuple[Tensor, Tensor]:
    """Every row's images repeated `times` times, as its tokens will be."""
    if vision is None:
        raise ValueError("pixel_values: expected a model with a vision tower, this one reads text only")
    images = pixels.split(grids.prod(1).tolist())
    order, at = [], 0
    for count in placeholders(input_ids, mask, vision).tolist():
        order += list(range(at, at + count)) * times
        at += count
    if at != len(images):
        raise ValueError(f"placeholder tokens: expected {len(images)}, one an image, received {at}")
    return torch.cat([images[i] for i in order]), grids[order]

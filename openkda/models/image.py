"""From pictures to the patches that the vision tower reads: resize, composite, pad, normalise, cut.

    scale    min(1, sqrt(65536 / (max(1, w // 14) * max(1, h // 14))), 512 * 14 / w, 512 * 14 / h)
    resize   to int(w * scale) x int(h * scale), at least 1, bicubic, as the Pillow library does it, bit for bit
    alpha    composited over a chessboard of 8-pixel squares (255 at the top left, then 180), after the resize
    pad      right and bottom with black to multiples of 28;   then (pixel / 255 - 0.5) / 0.5, so the padding is -1
    cut      14 x 14 patches, rows of the grid first; a 2 x 2 group of them is one token of the text

Source: the processor settings published with Kimi K3 (preprocessor_config.json). Nothing here needs an image library:
pictures are uint8 tensors or arrays [H, W, 3 or 4], or objects of the Pillow library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openkda.layers.vision import Grid

_CONVERTIBLE = ("1", "L", "LA", "La", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV", "RGBX", "RGBa")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The published settings. patch_limit counts patches of the whole image, side_limit those along one side."""

    patch_size: int = 14
    merge: int = 2
    patch_limit: int = 65536
    side_limit: int = 512
    mean: float = 0.5
    std: float = 0.5
    square: int = 8
    white: int = 255
    gray: int = 180
    frames: int = 4  # largest group


@dataclass(frozen=True)
class ImageBatch:
    """patches [L, 3, P, P] float32 of all items, one after another; grids: (t, h, w) of each; sizes: (width, height) of each
    as it came, before resizing, which the prompt names."""

    patches: Tensor
    grids: list[Grid]
    sizes: list[tuple[int, int]]

    @property
    def tokens(self) -> list[int]:
        """Text positions that each item takes."""
        return [h * w // 4 for _, h, w in self.grids]


def preprocess(items: Sequence[Any], options: ImageOptions | None = None) -> ImageBatch:
    """Every item is one picture, or a list of 1 to 4 frames of one size. No items give an empty batch.

    Raises: ValueError or TypeError naming the item: no pixels, not 3 or 4 channels, not uint8, frames of different sizes.
    """
    options = options or ImageOptions()
    patches, grids, sizes = [], [], []
    for i, item in enumerate(items):
        frames = [_pixels(frame, f"image {i}") for frame in (item if isinstance(item, list | tuple) else [item])]
        if not 1 <= len(frames) <= options.frames:
            raise ValueError(f"image {i}: expected 1 to {options.frames} frames, received {len(frames)}")
        shapes = {tuple(f.shape[:2]) for f in frames}
        if len(shapes) > 1:
            raise ValueError(f"image {i}: expected frames of one size, received {sorted(shapes)} (height, width)")
        height, width = frames[0].shape[:2]
        cut = torch.stack([_cut(_normalised(frame, options), options) for frame in frames])
        patches.append(cut.flatten(0, 2))
        grids.append((cut.shape[0], cut.shape[1], cut.shape[2]))
        sizes.append((width, height))
    P = options.patch_size
    return ImageBatch(torch.cat(patches) if patches else torch.empty(0, 3, P, P), grids, sizes)


def resized(width: int, height: int, options: ImageOptions | None = None) -> tuple[int, int]:
    """(width, height) after the resize and before the padding."""
    o = options or ImageOptions()
    P, side = o.patch_size, o.side_limit * o.patch_size
    patches = max(1, width // P) * max(1, height // P)
    scale = min(1.0, math.sqrt(o.patch_limit / patches), side / width, side / height)
    new = [min(max(int(size * scale), 1), side) for size in (width, height)]
    return new[0], new[1]


def _pixels(image: Any, name: str) -> Tensor:
    """uint8 [H, W, 3 or 4]."""
    mode = getattr(image, "mode", None)
    if isinstance(mode, str) and hasattr(image, "convert"):  # a Pillow image, without importing Pillow
        if mode not in ("RGB", "RGBA"):
            if mode not in _CONVERTIBLE:
                raise ValueError(f"{name}: expected an image with 8 bits a channel, received mode {mode!r}")
            transparent = "A" in mode.upper() or "transparency" in getattr(image, "info", {})
            image = image.convert("RGBA" if transparent and mode != "LAB" else "RGB")
        image = np.array(image)
    if not isinstance(image, Tensor | np.ndarray):
        raise TypeError(f"{name}: expected a uint8 tensor or array or a Pillow image, received {type(image).__name__}")
    if image.dtype != (torch.uint8 if isinstance(image, Tensor) else np.uint8):
        raise TypeError(f"{name}: expected uint8 pixels, received {image.dtype}")
    # A copy: an array may be read-only, or run backwards, which torch takes neither of.
    pixels = torch.from_numpy(np.array(image, order="C")) if isinstance(image, np.ndarray) else image
    if pixels.dim() != 3 or pixels.shape[2] not in (3, 4) or 0 in pixels.shape:
        raise ValueError(f"{name}: expected pixels [height, width, 3 or 4], received {list(pixels.shape)}")
    return pixels.cpu()


def _normalised(pixels: Tensor, o: ImageOptions) -> Tensor:
    """[H, W, 3 or 4] uint8 -> [3, H', W'] float32, padded to whole tokens."""
    height, width = pixels.shape[:2]
    new_width, new_height = resized(width, height, o)
    if (new_width, new_height) != (width, height):
        pixels = _resize_rgba(pixels, new_height, new_width)
    if pixels.shape[2] == 4:
        pixels = _composite(pixels, o)
    unit = o.patch_size * o.merge
    padded = pixels.new_zeros(-(-new_height // unit) * unit, -(-new_width // unit) * unit, 3)
    padded[:new_height, :new_width] = pixels
    return ((padded.float() / 255 - o.mean) / o.std).permute(2, 0, 1)


def _cut(pixels: Tensor, o: ImageOptions) -> Tensor:
    """[3, H, W] -> [h, w, 3, P, P]."""
    P = o.patch_size
    return pixels.unflatten(2, (-1, P)).unflatten(1, (-1, P)).permute(1, 3, 0, 2, 4)


def _composite(pixels: Tensor, o: ImageOptions) -> Tensor:
    """Over the chessboard; float32, then cut off to whole numbers, as published."""
    rows, columns = (torch.arange(n) // o.square for n in pixels.shape[:2])
    board = torch.where((rows[:, None] + columns) % 2 == 0, float(o.white), float(o.gray)).unsqueeze(-1)
    alpha = pixels[..., 3:].float() / 255
    return (alpha * pixels[..., :3].float() + (1 - alpha) * board).to(torch.uint8)


def _resize_rgba(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize; a transparent pixel's hidden colour must not bleed, so colours are multiplied by alpha meanwhile."""
    if pixels.shape[2] == 3:
        return resize_bicubic(pixels, height, width)
    alpha = pixels[..., 3:].int()
    product = pixels[..., :3].int() * alpha + 128
    multiplied = ((product >> 8) + product) >> 8  # product / 255, rounded
    out = resize_bicubic(torch.cat([multiplied, alpha], -1).to(torch.uint8), height, width).int()
    colour, alpha = out[..., :3], out[..., 3:]
    back = (255 * colour // alpha.clamp(min=1)).clamp(max=255)
    colour = torch.where((alpha == 0) | (alpha == 255), colour, back)
    return torch.cat([colour, alpha], -1).to(torch.uint8)


_PRECISION = 22  # bits of the fixed-point weights


def resize_bicubic(pixels: Tensor, height: int, width: int) -> Tensor:
    """uint8 [H, W, C] -> [height, width, C]: bicubic (a = -0.5) with its support widened when shrinking, columns first, then
    rows, in fixed point with rounding to uint8 in between: bit-equal to the Pillow library's (its version 13 takes the rows
    first where that is cheaper, and then differs by a few levels)."""
    if width != pixels.shape[1]:
        pixels = _resize_rows(pixels.transpose(0, 1).contiguous(), width).transpose(0, 1)
    if height != pixels.shape[0]:
        pixels = _resize_rows(pixels.contiguous(), height)
    return pixels.contiguous()


def _resize_rows(pixels: Tensor, rows: int) -> Tensor:
    taps, weights = _taps(pixels.shape[0], rows)
    total = torch.full((rows, *pixels.shape[1:]), 1 << (_PRECISION - 1), dtype=torch.int32)
    for tap, weight in zip(taps.T, weights.T, strict=True):
        total += pixels[tap].int() * weight.view(-1, 1, 1)
    return (total >> _PRECISION).clamp_(0, 255).to(torch.uint8)


def _taps(size: int, new: int) -> tuple[Tensor, Tensor]:
    """(input rows, fixed-point weights) of every output row, [new, taps]; surplus taps have weight 0."""
    ratio = size / new
    stretch = max(ratio, 1.0)
    support = 2.0 * stretch
    count = math.ceil(support) * 2 + 1
    centre = (torch.arange(new, dtype=torch.float64) + 0.5) * ratio
    first = (centre - support + 0.5).long().clamp(min=0)
    last = (centre + support + 0.5).long().clamp(max=size)
    taps = first.unsqueeze(1) + torch.arange(count)
    x = ((taps + 0.5 - centre.unsqueeze(1)) / stretch).abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weight = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
    weight = torch.where(taps < last.unsqueeze(1), weight, torch.zeros_like(weight))
    weight = weight / weight.sum(1, keepdim=True)
    fixed = (weight * (1 << _PRECISION) + torch.where(weight < 0, -0.5, 0.5)).trunc().int()
    return taps.clamp(max=size - 1), fixed

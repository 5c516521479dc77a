"""Image preprocessing against a slow literal implementation of the published rule, and against the Pillow library."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from openkda.models.image import ImageOptions, preprocess, resize_bicubic, resized

Image = pytest.importorskip("PIL.Image")


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def literal(pixels: np.ndarray) -> tuple[Tensor, tuple[int, int]]:
    """One pixel at a time; for images that need no resize."""
    height, width, channels = pixels.shape
    H, W = math.ceil(height / 28) * 28, math.ceil(width / 28) * 28
    canvas = torch.zeros(H, W, 3)
    for y in range(height):
        for x in range(width):
            value = torch.tensor(pixels[y, x, :3].astype(np.float32))
            if channels == 4:
                alpha = torch.tensor(float(pixels[y, x, 3])) / 255
                board = 255.0 if (y // 8 + x // 8) % 2 == 0 else 180.0
                value = (alpha * value + (1 - alpha) * board).floor()
            canvas[y, x] = value
    canvas = (canvas / 255 - 0.5) / 0.5
    patches = []
    for row in range(H // 14):
        for column in range(W // 14):
            patches.append(canvas[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14].permute(2, 0, 1))
    return torch.stack(patches), (H // 14, W // 14)


@pytest.mark.parametrize("size", [(28, 28), (1, 1), (30, 57), (5, 100)])
@pytest.mark.parametrize("channels", [3, 4])
def test_equals_the_literal_rule(size: tuple[int, int], channels: int) -> None:
    pixels = noise(*size, channels)
    batch = preprocess([pixels])
    want, grid = literal(pixels)
    assert torch.equal(batch.patches, want)
    assert batch.grids == [(1, *grid)] and batch.sizes == [(size[1], size[0])]
    assert batch.tokens == [grid[0] * grid[1] // 4]


def test_a_transparent_image_is_the_chessboard() -> None:
    pixels = noise(28, 28, 4)
    pixels[..., 3] = 0
    patch = preprocess([pixels]).patches[0]
    white, gray = 1.0, (180 / 255 - 0.5) / 0.5
    assert (patch[:, :8, :8] == white).all() and torch.allclose(patch[:, :8, 8:], torch.tensor(gray))
    assert torch.allclose(patch[:, 8:, :8], torch.tensor(gray)) and (patch[:, 8:, 8:] == white).all()


@pytest.mark.parametrize(
    "size, want, tokens",
    [
        ((2800, 2800), (2800, 2800), 10000),
        ((448, 449), (448, 449), 16 * 17),  # padded up, never rounded to the nearest
        ((1, 4000), (1, 4000), 143),
        ((4000, 4000), (3592, 3592), 16641),  # scaled down to 65536 patches; the padding may go above the budget
        ((100_000, 20), (7167, 1), 256),  # 512 patches on a side (int() of 7167.999...)
        ((1, 1), (1, 1), 1),
    ],
)
def test_sizes(size: tuple[int, int], want: tuple[int, int], tokens: int) -> None:
    got = resized(*size)
    assert got == want
    assert math.ceil(got[0] / 28) * math.ceil(got[1] / 28) == tokens


def test_no_size_exceeds_the_largest_budget() -> None:
    """16817 text positions are the most that one image can take."""
    worst = 0
    for ratio in np.geomspace(1, 600, 400):
        for patches in (65000, 65536, 66000, 80000, 200_000):
            width = int(14 * math.sqrt(patches * ratio)) or 1
            height = int(14 * math.sqrt(patches / ratio)) or 1
            w, h = resized(width, height)
            assert max(w, h) <= 7168
            worst = max(worst, math.ceil(w / 28) * math.ceil(h / 28))
    assert 16384 < worst <= 16817


@pytest.mark.parametrize(
    "shape", [(100, 80, 37, 50), (50, 60, 200, 31), (17, 400, 5, 100), (3, 900, 1, 700), (5, 7, 5, 20)]
)
@pytest.mark.parametrize("mode", ["RGB", "RGBX"])
def test_bicubic_equals_pillow(shape: tuple[int, int, int, int], mode: str) -> None:
    """Axis by axis, since Pillow 13 may take the axes in the other order."""
    h, w, new_h, new_w = shape
    pixels = noise(h, w, len(mode))
    image = Image.frombytes(mode, (w, h), pixels.tobytes())
    want = image.resize((new_w, h), Image.Resampling.BICUBIC).resize((new_w, new_h), Image.Resampling.BICUBIC)
    assert torch.equal(resize_bicubic(torch.from_numpy(pixels), new_h, new_w), torch.from_numpy(np.array(want)))


def test_large_images_are_resized_before_the_board_is_painted() -> None:
    small = ImageOptions(patch_limit=16)
    pixels = noise(112, 112, 4)
    pixels[:, :, 3] = 255 * (np.arange(112) % 2)[None, :]  # every second column transparent
    pixels[pixels[..., 3] == 0] = 0
    got = preprocess([pixels], small)
    assert got.grids == [(1, 4, 4)] and got.sizes == [(112, 112)]
    cubic = Image.Resampling.BICUBIC
    half = Image.fromarray(pixels).convert("RGBa").resize((56, 112), cubic).resize((56, 56), cubic).convert("RGBA")
    assert torch.equal(got.patches, preprocess([np.array(half)], small).patches)
    assert torch.equal(got.patches, preprocess([Image.fromarray(pixels)], small).patches)


def test_frames() -> None:
    frames = [noise(28, 56, seed=i) for i in range(3)]
    batch = preprocess([frames, frames[0]])
    assert batch.grids == [(3, 2, 4), (1, 2, 4)] and batch.tokens == [2, 2]
    assert torch.equal(batch.patches[:24], torch.cat([preprocess([f]).patches for f in frames]))


def test_other_pillow_modes() -> None:
    rgb = Image.fromarray(noise(20, 30))
    for mode in ("L", "P", "CMYK", "1", "YCbCr"):
        image = rgb.convert(mode)
        assert torch.equal(preprocess([image]).patches, preprocess([image.convert("RGB")]).patches), mode
    gray = Image.fromarray(noise(20, 30, 2), "LA")
    assert torch.equal(preprocess([gray]).patches, preprocess([gray.convert("RGBA")]).patches)
    clear = rgb.convert("P")
    clear.info["transparency"] = 3
    assert torch.equal(preprocess([clear]).patches, preprocess([clear.convert("RGBA")]).patches)


def test_no_images() -> None:
    batch = preprocess([])
    assert batch.patches.shape == (0, 3, 14, 14) and batch.grids == [] and batch.tokens == []


@pytest.mark.parametrize(
    "item, error, message",
    [
        (np.zeros((0, 5, 3), np.uint8), ValueError, r"image 1: expected pixels .*received \[0, 5, 3\]"),
        (np.zeros((4, 5), np.uint8), ValueError, r"received \[4, 5\]"),
        (np.zeros((4, 5, 2), np.uint8), ValueError, r"3 or 4\], received \[4, 5, 2\]"),
        (np.zeros((4, 5, 3), np.float32), TypeError, r"image 1: expected uint8 pixels, received (torch\.)?float32"),
        ("cat.png", TypeError, "image 1: expected a uint8 tensor or array or a Pillow image, received str"),
        ([noise(4, 4)] * 5, ValueError, "image 1: expected 1 to 4 frames, received 5"),
        ([noise(4, 4), noise(4, 5)], ValueError, r"frames of one size, received \[\(4, 4\), \(4, 5\)\]"),
        ([], ValueError, "1 to 4 frames, received 0"),
    ],
)
def test_bad_images(item: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        preprocess([noise(4, 4), item])


def test_deep_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match="8 bits a channel, received mode 'F'"):
        preprocess([Image.new("F", (4, 4))])


def test_arrays_in_any_memory_order() -> None:
    """Backwards, read-only, in columns, strided: torch reads none of them as they are."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    for view in (
        pixels[::-1],
        pixels[:, ::-1],
        np.asfortranarray(pixels),
        pixels[::2, ::3],
        np.broadcast_to(np.uint8(3), (4, 4, 3)),
    ):
        want = preprocess([torch.tensor(np.ascontiguousarray(view))])
        assert torch.equal(preprocess([view]).patches, want.patches)
    with pytest.raises(TypeError, match="image 1: expected uint8 pixels, received >u2"):
        preprocess([pixels, pixels.astype(">u2")])

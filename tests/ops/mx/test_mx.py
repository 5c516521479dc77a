"""Microscaling formats against a table written by hand, one value at a time, and the laws of quantisation."""

from __future__ import annotations

import math
import random
import struct

import pytest
import torch

from openkda.ops.mx.api import check_scales, fake_quantize, pack_mxfp4, unpack_mxfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = sorted(
    {m / 8 * 2.0**-6 for m in range(8)}
    | {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)}
)
GRIDS = {"mxfp4": E2M1, "mxfp8": E4M3}


def scalar_scale(amax: float, format: str, rule: str) -> int:
    """Exponent of the block by exact search over powers of two (no logarithm)."""
    top = GRIDS[format][-1]
    exponent = {"mxfp4": 2, "mxfp8": 8}[format]
    if amax == 0:
        return -127
    if rule == "even":
        m, e = math.frexp(amax)
        steps = 2.0 ** ({"mxfp4": 1, "mxfp8": 3}[format] + 1)
        amax = math.ldexp(math.floor(m * steps + 0.5) / steps, e)
    if rule == "ceil":
        e = next(e for e in range(-300, 300) if amax <= top * 2.0**e)
    else:
        e = max(e for e in range(-300, 300) if 2.0 ** (e + exponent) <= amax)
    return min(max(e, -127), 127)


def scalar_round(a: float, grid: list[float]) -> int:
    """Index of the nearest grid value; between two, the even index (which is the even mantissa)."""
    size = min(abs(a), grid[-1])
    gaps = [abs(size - v) for v in grid]
    near = [i for i, gap in enumerate(gaps) if gap == min(gaps)]
    return next((i for i in near if i % 2 == 0), near[0])


def scalar_pack(block: list[float], rule: str) -> tuple[bytes, int]:
    e = scalar_scale(max(abs(v) for v in block), "mxfp4", rule)
    codes = [scalar_round(v / 2.0**e, E2M1) | (8 if math.copysign(1, v) < 0 else 0) for v in block]
    return bytes(codes[i] | codes[i + 1] << 4 for i in range(0, 32, 2)), e + 127


def ulp_above(v: float) -> float:
    return struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", v))[0] + 1))[0]


BLOCKS = {
    "zeros": [0.0] * 32,
    "minus zeros": [-0.0] * 32,
    "one six": [6.0] + [0.0] * 31,
    "codes": [s * v for v in E2M1 for s in (1, -1)] * 2,
    "ties": [s * v for v in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0) for s in (1, -1)] * 2,
    "6 * 2^40": [6.0 * 2.0**40, 1.0] * 16,
    "an ulp above 6 * 2^-3": [ulp_above(6.0 * 2.0**-3), 0.1] * 16,
    "seven": [7.0, 4.9] * 16,
    "subnormal": [1e-40, -3e-39] * 16,
    "huge": [1e38, -3e37] * 16,
    "mixed sizes": [3.0 * 2.0**-i for i in range(32)],
}


@pytest.mark.parametrize("rule", ["ceil", "floor", "even"])
@pytest.mark.parametrize("name", BLOCKS)
def test_pack_equals_the_scalar_encoder(name: str, rule: str) -> None:
    block = BLOCKS[name]
    packed, scale = pack_mxfp4(torch.tensor([block]), scale_rule=rule)
    want, byte = scalar_pack([float(torch.tensor(v)) for v in block], rule)
    assert bytes(packed[0].tolist()) == want
    assert scale.tolist() == [[byte]]


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("rule", ["ceil", "floor", "even"])
def test_fake_quantize_equals_the_scalar_rule(format: str, rule: str) -> None:
    rng = random.Random(7)
    blocks = [[rng.gauss(0, 1) * 2.0 ** rng.uniform(-6, 6) for _ in range(32)] for _ in range(20)]
    blocks += [b for n, b in BLOCKS.items() if n not in ("subnormal", "huge")]
    x = torch.tensor(blocks, dtype=torch.float64)
    y = fake_quantize(x, format, scale_rule=rule)
    for row, block in zip(y.tolist(), blocks, strict=True):
        e = scalar_scale(max(abs(v) for v in block), format, rule)
        want = [math.copysign(GRIDS[format][scalar_round(v / 2.0**e, GRIDS[format])] * 2.0**e, v) for v in block]
        assert row == want


def test_unpack_every_byte_and_every_scale() -> None:
    """All 256 bytes under all 255 scales equal the definition, low nibble first."""
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for e in (0, 1, 100, 127, 128, 200, 252):
        scale = torch.full((16, 1), e, dtype=torch.uint8)
        want = []
        for byte in range(256):
            for nibble in (byte & 15, byte >> 4):
                want.append((-1.0 if nibble & 8 else 1.0) * E2M1[nibble & 7] * 2.0 ** (e - 127))
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            got = unpack_mxfp4(packed, scale, dtype=dtype)
            assert torch.equal(got.double().flatten(), torch.tensor(want, dtype=torch.float64)), (e, dtype)


def test_nan_scale_is_an_error_or_nan() -> None:
    packed, scale = torch.zeros(2, 32, dtype=torch.uint8), torch.full((2, 2), 127, dtype=torch.uint8)
    scale[1, 0] = 255
    got = unpack_mxfp4(packed, scale)
    assert got[1, :32].isnan().all() and (got[1, 32:] == 0).all() and (got[0] == 0).all()
    with pytest.raises(ValueError, match=r"255 \(NaN\) at \[1, 0\], 1 in all"):
        unpack_mxfp4(packed, scale, check_inputs=True)
    with pytest.raises(ValueError, match="layer 3 w1"):
        check_scales("layer 3 w1", scale)


@pytest.mark.parametrize("rule", ["ceil", "floor", "even"])
def test_unpack_inverts_pack_and_repacking_keeps_bytes(rule: str) -> None:
    """Values that the format holds survive; the bytes too where a block has a value of at least 4 scales."""
    g = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (64, 48), generator=g, dtype=torch.uint8)
    packed[:, ::16] = packed[:, ::16] & 0xF0 | 0x06  # a 4 in each block
    scale = torch.randint(20, 230, (64, 3), generator=g, dtype=torch.uint8)
    again = pack_mxfp4(unpack_mxfp4(packed, scale, dtype=torch.float32), scale_rule=rule)
    assert torch.equal(again[0], packed) and torch.equal(again[1], scale)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("rule", ["ceil", "floor", "even"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantising_twice_changes_nothing(format: str, rule: str, dtype: torch.dtype) -> None:
    x = (torch.randn(256, 64, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    once = fake_quantize(x, format, scale_rule=rule)
    assert once.dtype == dtype and torch.equal(once, fake_quantize(once, format, scale_rule=rule))
    assert not torch.equal(once, x)
    limit = {"mxfp4": 1 / 4, "mxfp8": 1 / 16}[format]  # half a step of 1 and of 3 bits of mantissa: the worst rounding
    assert ((once - x).float().norm() / x.float().norm()).item() < limit


def test_fake_quantize_agrees_with_pack() -> None:
    x = torch.randn(32, 96, generator=torch.Generator().manual_seed(2))
    for rule in ("ceil", "floor", "even"):
        assert torch.equal(
            fake_quantize(x, "mxfp4", scale_rule=rule),
            unpack_mxfp4(*pack_mxfp4(x, scale_rule=rule), dtype=torch.float32),
        )


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_gradient_passes_straight_through(format: str) -> None:
    x = torch.tensor([[7.9] + [0.3] * 31], requires_grad=True)  # the floor rule saturates 7.9
    up = torch.randn(1, 32)
    (got,) = torch.autograd.grad(fake_quantize(x, format, scale_rule="floor"), x, up)
    assert torch.equal(got, up)


def test_what_is_not_finite() -> None:
    x = torch.ones(3, 64)
    x[0, 3], x[1, 40] = float("nan"), float("inf")
    y = fake_quantize(x, "mxfp4")
    assert y[0, :32].isnan().all() and y[1, 32:].isnan().all() and (y[2] == 1).all() and (y[0, 32:] == 1).all()
    with pytest.raises(ValueError, match="finite values, received 2 that are not"):
        pack_mxfp4(x)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"multiple of 32, received \[2, 33\]"):
        pack_mxfp4(torch.zeros(2, 33))
    with pytest.raises(TypeError, match=r"received torch\.int32"):
        fake_quantize(torch.zeros(32, dtype=torch.int32), "mxfp4")
    with pytest.raises(ValueError, match="'mxfp6'"):
        fake_quantize(torch.zeros(32), "mxfp6")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'up'"):
        fake_quantize(torch.zeros(32), "mxfp4", scale_rule="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[2, 2\] for packed \[2, 32\], received \[2, 1\]"):
        unpack_mxfp4(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(TypeError, match="uint8"):
        unpack_mxfp4(torch.zeros(2, 32), torch.zeros(2, 2, dtype=torch.uint8))

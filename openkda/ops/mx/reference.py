"""The microscaling formats in plain torch. Exponents are read with frexp, never with a rounded log2."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 32
_BIAS = 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# format -> (largest element, its exponent, smallest normal exponent, bits of mantissa)
_FORMATS = {"mxfp4": (6.0, 2, 0, 1), "mxfp8": (448.0, 8, -6, 3)}


@cache
def _scale_table(device: torch.device) -> Tensor:
    """Byte -> float32 scale. A table, since 2^-127 is subnormal and a computed power might be flushed to zero."""
    values = [2.0 ** (e - _BIAS) for e in range(255)] + [float("nan")]
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def _byte_table(device: torch.device) -> Tensor:
    """Byte -> its two E2M1 values, low nibble first: [256, 2] float32."""
    nibbles = torch.tensor([*_E2M1, *(-v for v in _E2M1)])
    byte = torch.arange(256)
    return torch.stack([nibbles[byte & 15], nibbles[byte >> 4]], -1).to(device)


def _blocks(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, BLOCK))


def scale_bytes(amax: Tensor, format: str, rule: str) -> Tensor:
    """Scale byte (int32, 0..255) of blocks with largest magnitude `amax`; 255 where amax is not finite."""
    top, exponent, _, mantissa_bits = _FORMATS[format]
    if rule == "even":
        # Round amax to the element's mantissa, ties away: the carry moves the exponent.
        fraction, e = torch.frexp(amax)
        steps = 2.0 ** (mantissa_bits + 1)
        amax = torch.ldexp(torch.floor(fraction * steps + 0.5) / steps, e)
    # frexp: amax = fraction * 2^e with fraction in [0.5, 1), so floor(log2 amax) = e - 1, exactly, subnormals included.
    fraction, e = torch.frexp(amax)
    shift = e - 1 - exponent
    if rule == "ceil":
        # amax / top <= 2^shift exactly where fraction * 2 <= top / 2^exponent.
        shift = shift + (fraction * 2 > top / 2.0**exponent).to(shift.dtype)
    byte = (shift + _BIAS).clamp(0, 254)
    byte = torch.where(amax == 0, torch.zeros_like(byte), byte)
    return torch.where(torch.isfinite(amax), byte, torch.full_like(byte, 255))


def _scaled(x: Tensor, format: str, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """(x / scale as blocks in float32 or float64, scale [..., D/32, 1], scale byte)."""
    wide = _blocks(x.to(torch.promote_types(x.dtype, torch.float32)))
    byte = scale_bytes(wide.abs().amax(-1), format, rule)
    scale = _scale_table(x.device)[byte].to(wide.dtype).unsqueeze(-1)
    return wide / scale, scale, byte


def _round(a: Tensor, format: str) -> Tensor:
    """Nearest element, ties to even; above the largest it saturates."""
    top, _, smallest, mantissa_bits = _FORMATS[format]
    exponent = (torch.frexp(a).exponent - 1).clamp(min=smallest)
    step = torch.ldexp(torch.ones_like(a), exponent - mantissa_bits)
    return torch.copysign((torch.round(a / step) * step).clamp(-top, top), a)


def pack_mxfp4(w: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    scaled, _, byte = _scaled(w, "mxfp4", rule)
    value = _round(scaled, "mxfp4")
    # The code of 0, .5, 1, 1.5, 2, 3, 4, 6 is its place in that list.
    grid = torch.tensor(_E2M1, dtype=value.dtype, device=value.device)
    code = torch.searchsorted(grid, value.abs().contiguous()) | (torch.signbit(value).to(torch.int64) << 3)
    code = code.to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2))
    return code[..., 0] | (code[..., 1] << 4), byte.to(torch.uint8)


def unpack_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = _byte_table(packed.device)[packed.int()].flatten(-2).to(wide)
    factor = _scale_table(scale.device)[scale.int()].to(wide)
    return (_blocks(values) * factor.unsqueeze(-1)).flatten(-2).to(dtype)


class FakeQuantize(torch.autograd.Function):
    """Quantise and dequantise; identity gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, rule: str) -> Tensor:
        scaled, scale, _ = _scaled(x, format, rule)
        return (_round(scaled, format) * scale).flatten(-2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad: Any) -> Any:
        return grad[0], None, None

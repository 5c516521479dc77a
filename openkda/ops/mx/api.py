"""The contract of the microscaling formats: 32 consecutive values share one power-of-two scale.

    value = element * 2^(e - 127)        e: one byte (E8M0) for 32 values along the last axis; 255 means NaN
    MXFP4   element E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; two a byte, the even column in the LOW nibble
    MXFP8   element E4M3 (largest 448)

The scale of a block with largest magnitude amax, M the largest element and 2^m its power of two (6 and 2^2; 448 and 2^8):

    ceil    2^ceil(log2(amax / M))          nothing saturates; the default
    floor   2^(floor(log2 amax) - m)        the OCP rule; the top of a block may saturate (7 -> 6)
    even    the floor rule after rounding amax to the element's mantissa

Kimi K3 ships its routed experts in this packing (report, section 4.1.4); which scale rule its training used is not
published, so the rule is a switch. Source of the formats: OCP Microscaling Formats, version 1.0.
"""

from __future__ import annotations

from typing import Literal, NoReturn, get_args

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from openkda.ops.mx import reference

__all__ = ["BLOCK", "NAN_SCALE", "MXFormat", "ScaleRule", "fake_quantize", "pack_mxfp4", "unpack_mxfp4"]

BLOCK = reference.BLOCK
"""Values that share a scale."""

NAN_SCALE = 255
"""The scale byte that means "not a number"."""

MXFormat = Literal["mxfp4", "mxfp8"]
ScaleRule = Literal["ceil", "floor", "even"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def pack_mxfp4(
    w: Float[Tensor, "... D"], *, scale_rule: ScaleRule = "ceil"
) -> tuple[UInt8[Tensor, "... D2"], UInt8[Tensor, "... D32"]]:
    """Quantise to MXFP4, round to nearest even.

    Args: w: [..., D], any float dtype, D a multiple of 32, finite.
    Returns: (packed [..., D / 2] uint8, scale [..., D / 32] uint8). A zero block gets scale byte 0 and keeps its signs.
    Raises: ValueError for values that are not finite (a checkpoint with NaN scales would be unusable), TypeError for dtypes.
    """
    _check_float("w", w)
    _check_rule(scale_rule)
    if not bool(torch.isfinite(w).all()):
        _bad("w", "finite values", f"{int((~torch.isfinite(w)).sum())} that are not")
    return reference.pack_mxfp4(w, scale_rule)


def unpack_mxfp4(
    packed: UInt8[Tensor, "... D2"],
    scale: UInt8[Tensor, "... D32"],
    *,
    dtype: torch.dtype = torch.bfloat16,
    check_inputs: bool = False,
) -> Float[Tensor, "... D"]:
    """Exact values of packed MXFP4; bfloat16 holds every one of them up to its own range.

    Args:
        packed: [..., D / 2] uint8; byte j holds column 2j in its low nibble, 2j + 1 in its high one.
        scale: [..., D / 32] uint8 exponents, biased by 127.
        dtype: of the result. float16 covers only scales of about 2^-14 to 2^13.
        check_inputs: raise ValueError where a scale byte is 255 (NaN); otherwise such a block comes out as NaN. On a GPU the
            check waits for the device; loading a checkpoint checks once.
    Returns: [..., D]. Raises: ValueError or TypeError, showing expected and received.
    """
    for name, t in (("packed", packed), ("scale", scale)):
        if not isinstance(t, Tensor) or t.dtype != torch.uint8:
            raise TypeError(f"{name}: expected a uint8 tensor, received {getattr(t, 'dtype', type(t).__name__)}")
    want = (*packed.shape[:-1], packed.shape[-1] * 2 // BLOCK) if packed.dim() else ()
    if not packed.dim() or packed.shape[-1] * 2 % BLOCK or tuple(scale.shape) != want:
        _bad("scale.shape", f"{list(want)} for packed {list(packed.shape)}", list(scale.shape))
    if dtype not in _FLOATS:
        raise TypeError(f"dtype: expected a float dtype, received {dtype}")
    if check_inputs:
        check_scales("scale", scale)
    return reference.unpack_mxfp4(packed, scale, dtype)


def check_scales(name: str, scale: UInt8[Tensor, " ..."]) -> None:
    """Raise ValueError, naming the first place, where a scale byte is 255 (NaN)."""
    bad = (scale == NAN_SCALE).nonzero()
    if bad.numel():
        _bad(name, "scale bytes 0..254", f"{NAN_SCALE} (NaN) at {bad[0].tolist()}, {bad.shape[0]} in all")


def fake_quantize(
    x: Float[Tensor, "... D"], format: MXFormat, *, scale_rule: ScaleRule = "ceil"
) -> Float[Tensor, "... D"]:
    """Values as the format would hold them, in x's own dtype; the gradient passes straight through.

    Args: x: [..., D], any float dtype, D a multiple of 32: blocks lie along the last axis. format: "mxfp4" or "mxfp8".
    Returns: [..., D]. A block that holds NaN or infinity comes out as NaN, so that a training loop sees it.
    Gradient: the identity everywhere, saturated values of the floor and even rules included.
    Applying it twice changes nothing. Raises: ValueError or TypeError, showing expected and received.
    """
    _check_float("x", x)
    _check_rule(scale_rule)
    if format not in get_args(MXFormat):
        _bad("format", " or ".join(get_args(MXFormat)), repr(format))
    return reference.FakeQuantize.apply(x, format, scale_rule)


def _check_float(name: str, t: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, received {type(t).__name__}")
    if t.dtype not in _FLOATS:
        raise TypeError(f"{name}.dtype: expected float16, bfloat16, float32 or float64, received {t.dtype}")
    if not t.dim() or t.shape[-1] % BLOCK:
        _bad(f"{name}.shape", f"a last axis that is a multiple of {BLOCK}", list(t.shape))


def _check_rule(scale_rule: str) -> None:
    if scale_rule not in get_args(ScaleRule):
        _bad("scale_rule", ", ".join(get_args(ScaleRule)), repr(scale_rule))


def _bad(name: str, expected: object, received: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, received {received}")

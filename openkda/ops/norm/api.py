"""The contract of the norms. All of them compute in float32 (float64 for float64 input), whatever the input's dtype.

    rms_norm         y = cast(x / sqrt(mean(x^2) + eps)) * weight
    add_rms_norm     the same of x + a, and that sum
    gated_rms_norm   y = cast(x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate))
    l2norm           y = cast(x / sqrt(sum(x^2) + 1e-6))

Where the cast stands is part of the contract: the published RMSNorm casts before the weight, the output norm of
KDA once at the end. The eps of l2norm is added to the SUM; a mean-based norm with the same eps is off by a factor of the
head size in it. Source: Kimi Linear modelling code; Kimi K3 report, section 2.1.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter

from openkda.ops.device.api import Repeated, choose_module

__all__ = ["IMPLEMENTATIONS", "L2NORM_EPS", "add_rms_norm", "gated_rms_norm", "l2norm", "rms_norm"]

L2NORM_EPS = 1e-6
"""Added to the sum of squares."""

IMPLEMENTATIONS = ("triton", "reference")
"""In order of preference. Each is a module of this folder with `refusals(x)`, `rms_norm`, `add_rms_norm`, `gated_rms_norm`."""

LONGEST = 1e10
"""Up to this length of a row float32 holds its squares and, for the gradient, the cube of its inverse length."""

CALLS = Repeated()
_WIDE = (torch.float32, torch.float64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rms_norm(
    x: Float[Tensor, "... D"],
    weight: Float[Tensor, " D"],
    eps: float,
    *,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Float[Tensor, "... D"]:
    """Root-mean-square norm over the last axis: normalised in float32, cast to x.dtype, then times weight.

    Args:
        x: [..., D], any float dtype. weight: [D], float32 or x.dtype. eps: added to the mean square.
        dtype: of the result, cast once more at the end; None: x.dtype. impl: a name out of IMPLEMENTATIONS; None chooses.
    Returns: [..., D]. Raises: ValueError or TypeError, showing expected and received.
    """
    if impl is None and _is_plain_on_cpu(x, weight) and 0 <= eps < math.inf:
        y = F.rms_norm(x, weight.shape, weight, eps)  # the bits of the reference, without the way there
        return y if dtype is None else y.to(dtype)
    key, again = CALLS.look((x, None, weight), ("plain", eps, impl, dtype))
    done = None if again is None else again((x, None, weight))
    if done is not None:
        return done
    seen = CALLS.seen(key)
    module = CALLS.module(key, lambda: _checked(x, (), weight, eps, impl))
    return module.rms_norm(x, weight, eps, x.dtype if dtype is None else dtype, seen)


def add_rms_norm(
    x: Float[Tensor, "... D"],
    a: Float[Tensor, "... D"],
    weight: Float[Tensor, " D"],
    eps: float,
    *,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[Float[Tensor, "... D"], Float[Tensor, "... D"]]:
    """A residual stream and what is added to it: (x + a, rms_norm(x + a)). On a GPU one pass each way, where torch makes three.

    Args: a: [..., D], any float dtype; the rest as `rms_norm`. dtype: of the norm.
    Returns: the sum, in the dtype of torch's x + a, and its norm. Raises: ValueError or TypeError.
    """
    _check_float("x", x)
    _check_float("a", a)
    if a.shape != x.shape or a.device != x.device:  # torch would spread a smaller one in silence
        raise ValueError(f"a: expected {list(x.shape)} on {x.device}, as x, received {list(a.shape)} on {a.device}")
    plain = impl is None and (
        x.is_cpu or not torch.is_grad_enabled() or torch.promote_types(x.dtype, a.dtype) != x.dtype
    )
    if plain:  # without gradients the norm's own launch is repeated at less cost to the host
        total = x + a
        return total, rms_norm(total, weight, eps, dtype=dtype)
    module = _checked(x, (), weight, eps, impl)
    found: tuple[Tensor, Tensor] = module.add_rms_norm(x, a, weight, eps, x.dtype if dtype is None else dtype)
    return found


def gated_rms_norm(
    x: Float[Tensor, "... V"],
    gate: Float[Tensor, "... V"],
    weight: Float[Tensor, " V"],
    eps: float,
    *,
    impl: str | None = None,
) -> Float[Tensor, "... V"]:
    """Output norm of KDA: RMS norm, weight, sigmoid(gate), all in float32, one cast to x.dtype at the end.

    Args:
        x, gate: [..., V], any float dtypes, same shape. weight: [V], shared by all heads. eps: added to the mean square.
        impl: a name out of IMPLEMENTATIONS; None chooses.
    Returns: [..., V] in x.dtype. Raises: ValueError or TypeError, showing expected and received.
    """
    key, again = CALLS.look((x, gate, weight), ("gated", eps, impl))
    y = None if again is None else again((x, gate, weight))
    if y is not None:
        return y
    seen = CALLS.seen(key)
    module = CALLS.module(key, lambda: _checked(x, (gate,), weight, eps, impl))
    return module.gated_rms_norm(x, gate, weight, eps, seen)


def l2norm(x: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, float32 inside, in x.dtype. Finite gradient at x = 0; rows so long that
    their squares overflow (1.8e19 in float32) are divided by their largest value first, as `kda` does."""
    _check_float("x", x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not x.dim() or not x.shape[-1]:
        return x.clone() if x.dim() else l2norm(x.view(1)).view(())
    largest = wide.detach().abs().amax(-1, keepdim=True)
    unit = torch.where(largest > LONGEST, largest, 1.0)
    wide = wide / unit
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2NORM_EPS / unit / unit)).to(x.dtype)


def _check_float(name: str, t: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, received {type(t).__name__}")
    if t.dtype not in _FLOATS:
        raise TypeError(f"{name}.dtype: expected float16, bfloat16, float32 or float64, received {t.dtype}")


def _is_plain_on_cpu(x: Tensor, weight: Tensor) -> bool:
    """A valid call of `rms_norm` that torch's own norm answers: on a CPU, one dtype of at least 32 bits, so no cast inside."""
    if type(x) is not Tensor or type(weight) not in (Tensor, Parameter) or not (x.is_cpu and weight.is_cpu):
        return False  # a subclass (DTensor, fake tensors) has rules for the reference's operators
    return x.dtype == weight.dtype and x.dtype in _WIDE and weight.dim() == 1 and weight.shape == x.shape[-1:]


def _checked(x: Tensor, gates: tuple[Tensor, ...], weight: Tensor, eps: float, impl: str | None) -> ModuleType:
    _check_float("x", x)
    _check_float("weight", weight)
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight.shape: expected {list(x.shape[-1:])} (last axis of x), received {list(weight.shape)}")
    if weight.device != x.device:
        raise ValueError(f"weight.device: expected {x.device} (that of x), received {weight.device}")
    if not 0 <= eps < math.inf:  # in a graph eps may be a symbol, which math.isfinite cannot take
        raise ValueError(f"eps: expected a finite number >= 0, received {eps}")
    for gate in gates:
        _check_float("gate", gate)
        if gate.shape != x.shape:
            raise ValueError(f"gate.shape: expected {list(x.shape)} (that of x), received {list(gate.shape)}")
        if gate.device != x.device:
            raise ValueError(f"gate.device: expected {x.device} (that of x), received {gate.device}")
    return choose_module("norm", IMPLEMENTATIONS, impl, x, _module)


def _module(name: str) -> ModuleType:
    if name == "triton":
        from openkda.ops.norm import triton

        return triton
    from openkda.ops.norm import reference

    return reference

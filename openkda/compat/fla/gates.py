"""The gate functions of fla-core: 0.6.0's form, and the 0.4 form that published Kimi Linear code still calls."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.ops.kda.gate import SoftplusGate, bias_fits, is_number, rate, shifted


def naive_kda_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """-exp(A_log) * softplus(g + dt_bias) for g [..., H, K], A_log of H values, dt_bias [H * K]; float32 inside (float64 for
    float64 g)."""
    _check(g, A_log, dt_bias, output_dtype)
    return SoftplusGate(A_log, dt_bias)(g).to(output_dtype)


def naive_kda_lowerbound_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) for g [..., H, K]; A_log=None counts as 0; lower_bound < 0, also below
    the -5 of `openkda.BoundedGate`."""
    _check(g, A_log, dt_bias, output_dtype)
    check_bound(lower_bound)
    x = shifted(g, dt_bias)
    if A_log is not None:
        x = rate(A_log, x.dtype) * x
    return (lower_bound * torch.sigmoid(x)).to(output_dtype)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | int | None = None,
    lower_bound: float | Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
    *,
    head_k_dim: int | None = None,
    g_bias: Tensor | None = None,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> Tensor:
    """The log decay [..., H, K] of a raw gate input.

    0.6.0: `(g [..., H, K], A_log, dt_bias, lower_bound, output_dtype)`; softplus gate, or the bounded one with a bound.
    0.4: `(g [..., H * K], A_log, head_k_dim, g_bias)`, recognised by the integer head size (third, or by name), with
    softplus's beta and threshold.
    Raises: ValueError for a mixture of both, or for no A_log without a bound.
    """
    if not isinstance(output_dtype, torch.dtype):
        received = type(output_dtype).__name__
        raise TypeError(
            f"output_dtype: expected a torch.dtype (the 0.4 form takes beta and threshold by name), received {received}"
        )
    if isinstance(dt_bias, int):
        if head_k_dim is not None:
            raise ValueError("head_k_dim: expected once, received as the third argument and by name")
        dt_bias, head_k_dim = None, dt_bias
    if head_k_dim is not None:
        if isinstance(lower_bound, Tensor):
            dt_bias, lower_bound = _one_bias(dt_bias, lower_bound), None
        bias = _one_bias(dt_bias, g_bias)
        return _old_gate(g, A_log, head_k_dim, bias, lower_bound, beta, threshold, output_dtype)
    if g_bias is not None or beta != 1.0 or threshold != 20.0:
        raise ValueError(
            "g_bias, beta, threshold: expected only with head_k_dim (the 0.4 form); 0.6.0 calls it dt_bias"
        )
    if isinstance(lower_bound, Tensor):
        raise TypeError("lower_bound: expected a number or None, received a tensor")
    if lower_bound is not None:
        return naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound, output_dtype)
    if A_log is None:
        raise ValueError("A_log: expected a tensor of H values unless lower_bound is given, received None")
    return naive_kda_gate(g, A_log, dt_bias, output_dtype)


def _one_bias(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is not None and b is not None:
        raise ValueError("g_bias, dt_bias: expected one bias, received two")
    return b if a is None else a


def _old_gate(
    g: Tensor,
    A_log: Tensor | None,
    head_k_dim: int,
    bias: Tensor | None,
    lower_bound: float | None,
    beta: float,
    threshold: float,
    dtype: torch.dtype,
) -> Tensor:
    if lower_bound is not None:
        raise ValueError(f"lower_bound: expected None in the 0.4 form, received {lower_bound}")
    if A_log is None:
        raise ValueError("A_log: expected a tensor of H values, received None")
    if not isinstance(g, Tensor) or head_k_dim < 1 or g.shape[-1] % head_k_dim:
        got = list(g.shape) if isinstance(g, Tensor) else type(g).__name__
        raise ValueError(f"g: expected [..., H * {head_k_dim}], received {got}")
    g = g.unflatten(-1, (-1, head_k_dim))
    _check(g, A_log, bias, dtype)
    x = shifted(g, bias)
    return (-rate(A_log, x.dtype) * F.softplus(x, beta, threshold)).to(dtype)


def check_bound(lower_bound: float) -> None:
    """A number below 0: a decay above 1 would let the state grow without end."""
    if not is_number(lower_bound):
        raise TypeError(f"lower_bound: expected a number below 0, received {type(lower_bound).__name__}")
    if not -math.inf < lower_bound < 0:
        raise ValueError(f"lower_bound: expected a number below 0, received {lower_bound}")


def _check(g: Tensor, A_log: Tensor | None, bias: Tensor | None, output_dtype: torch.dtype) -> None:
    for name, t in (("g", g), ("A_log", A_log), ("dt_bias", bias)):
        if t is None and name != "g":
            continue
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise TypeError(f"{name}: expected a float tensor, received {getattr(t, 'dtype', type(t).__name__)}")
    if g.dim() < 2:
        raise ValueError(f"g: expected [..., H, K], received {list(g.shape)}")
    H, K = g.shape[-2:]
    if A_log is not None and A_log.numel() != H:
        raise ValueError(f"A_log: expected {H} values (heads of g {list(g.shape)}), received {list(A_log.shape)}")
    if bias is not None and not bias_fits(bias, H, K):
        raise ValueError(f"dt_bias: expected [H * K] = [{H * K}] or [{H}, {K}], received {list(bias.shape)}")
    if not output_dtype.is_floating_point:
        raise TypeError(f"output_dtype: expected a float dtype, received {output_dtype}")

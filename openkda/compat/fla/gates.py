"""The gate functions of fla-core: 0.6.0's form, and the 0.4 form that published Kimi Linear code still calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def naive_kda_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """-exp(A_log) * softplus(g + dt_bias) for g [..., H, K], A_log of H values, dt_bias of H * K; float32 inside."""
    x = _shifted(g, dt_bias)
    return (-_rate(A_log, g) * F.softplus(x)).to(output_dtype)


def naive_kda_lowerbound_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) for g [..., H, K]; A_log=None counts as 0; float32 inside."""
    x = _shifted(g, dt_bias)
    if A_log is not None:
        x = _rate(A_log, g) * x
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
    if isinstance(dt_bias, int):
        if head_k_dim is not None:
            raise ValueError("head_k_dim: expected once, received as the third argument and by name")
        dt_bias, head_k_dim = None, dt_bias
    if head_k_dim is not None:
        if isinstance(lower_bound, Tensor):
            lower_bound, g_bias = None, lower_bound
        bias = dt_bias if g_bias is None else g_bias
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
    if A_log is None or g.shape[-1] % head_k_dim:
        raise ValueError(
            f"A_log and g: expected H values and [..., H * {head_k_dim}], received {A_log} and {list(g.shape)}"
        )
    g = g.unflatten(-1, (-1, head_k_dim))
    return (-_rate(A_log, g) * F.softplus(_shifted(g, bias), beta, threshold)).to(dtype)


def _shifted(g: Tensor, bias: Tensor | None) -> Tensor:
    g = g.float()
    return g if bias is None else g + bias.float().view(g.shape[-2:])


def _rate(A_log: Tensor, g: Tensor) -> Tensor:
    if A_log.numel() != g.shape[-2]:
        raise ValueError(
            f"A_log: expected {g.shape[-2]} values (heads of g {list(g.shape)}), received {list(A_log.shape)}"
        )
    return A_log.reshape(-1, 1).float().exp()

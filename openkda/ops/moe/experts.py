"""Expert MLPs over tokens sorted by expert: gather, three matmuls, weighted sum back. Deterministic, dropless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from openkda.ops.device.api import are_plain, autocast_dtype
from openkda.ops.moe import triton as kernels
from openkda.ops.moe.activation import GLU, kernel_form
from openkda.ops.mx.api import ScaleRule, fake_quantize, unpack_mxfp4

FEW_PAIRS = 16
"""Token-expert pairs up to which a CPU without gradients multiplies pair by pair: sorting would cost more than it saves."""


@dataclass(frozen=True)
class Plan:
    """Rows are token-expert pairs sorted by expert. order: row -> pair (token * k + slot); inverse: pair -> row.

    ends: [E] int32, one past the last row of each expert.
    """

    order: Tensor
    inverse: Tensor
    ends: Tensor
    k: int

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> Plan:
        flat = experts.flatten()
        if flat.is_cuda:  # a radix sort there: a pass for every eight bits of a key
            flat = flat.to(torch.uint8 if num_experts <= 256 else torch.int16 if num_experts < 1 << 15 else flat.dtype)
        by_expert, order = flat.sort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        each = torch.arange(num_experts, device=order.device).to(flat.dtype)
        ends = torch.searchsorted(by_expert, each, right=True).to(torch.int32)
        return cls(order, inverse, ends, experts.shape[1])


class _Dispatch(torch.autograd.Function):
    """Token rows [T, D] -> pair rows [T * k, D]. The gradient gathers too (a scatter-add would depend on atomics)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x[plan.order // plan.k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][ctx.plan.inverse].unflatten(0, (-1, ctx.plan.k)).sum(1), None


class _Combine(torch.autograd.Function):
    """Pair rows [P, D], weights [T, k] -> sum_j p_j y_j, [T, D] in dtype; summed in the weights' dtype, autocast or not."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, plan: Plan, dtype: torch.dtype) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(y, weights)
        if y.is_cuda and weights.dtype == torch.float32 and are_plain(y, weights) and not kernels.refusals(y):
            return kernels.combine(y, weights, plan.inverse, dtype)
        pairs = y[plan.inverse].unflatten(0, weights.shape).to(weights.dtype)
        with torch.autocast(y.device.type, enabled=False):
            return torch.bmm(weights.unsqueeze(1), pairs).squeeze(1).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        y, weights = ctx.saved_tensors
        plan, g = ctx.plan, grads[0].to(weights.dtype)
        pairs = y[plan.inverse].unflatten(0, weights.shape).to(weights.dtype)
        with torch.autocast(g.device.type, enabled=False):
            dweights = torch.bmm(pairs, g.unsqueeze(-1)).squeeze(-1)
        dy = weights.flatten()[plan.order].unsqueeze(-1) * g[plan.order // plan.k]
        return dy.to(y.dtype), dweights, None, None


class _ContiguousGrad(torch.autograd.Function):
    """torch's grouped matmul refuses an expanded or strided upstream gradient, such as that of sum()."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].contiguous()


def grouped_mm_refusals(x: Tensor, w: Tensor) -> list[str]:
    """Why torch's grouped matmul cannot multiply rows of x [M, D] with w [E, O, D]; empty if it can."""
    reasons = []
    if not hasattr(F, "grouped_mm"):
        reasons.append("this torch has no torch.nn.functional.grouped_mm")
    allowed = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    if x.dtype not in allowed or w.dtype != x.dtype:
        reasons.append(f"dtypes {x.dtype} and {w.dtype} on {x.device.type}")
    elif torch.compiler.is_compiling() and x.dtype != torch.bfloat16:
        reasons.append(f"{x.dtype} in a graph, for which torch's shape rule knows bfloat16 alone")
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        reasons.append("compute capability below 8.0")
    for axis, size in (("D", w.shape[2]), ("O", w.shape[1])):
        if size * x.element_size() % 16:
            reasons.append(f"{axis} = {size} rows of {size * x.element_size()} bytes are no multiple of 16")
    return reasons


def grouped_linear(x: Tensor, w: Tensor, ends: Tensor, impl: str | None) -> Tensor:
    """Rows of x [M, D] times the transposed matrix of their expert, w [E, O, D] -> [M, O]."""
    if impl != "loop":
        reasons = grouped_mm_refusals(x, w)
        if impl == "grouped_mm" and reasons:
            raise NotImplementedError("impl='grouped_mm' cannot run this call: " + "; ".join(reasons))
        if not reasons:
            y = F.grouped_mm(x, w.transpose(1, 2), offs=ends)
            return _ContiguousGrad.apply(y) if y.requires_grad else y
    parts, start = [], 0
    # unbind, not w[e]: the gradient of one index is a zero tensor of w's whole size, once an expert.
    for matrix, end in zip(w.unbind(0), ends.tolist(), strict=True):
        if end > start:
            parts.append(x[start:end] @ matrix.T)
        start = end
    return torch.cat(parts) if parts else x @ w[0].T


def expert_mlp(
    x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
    activation: GLU, quantize: ScaleRule | None, impl: str | None,
) -> Tensor:  # fmt: skip
    dtype = autocast_dtype(x) or x.dtype
    x, w1, w3, w2 = (t.to(dtype) for t in (x, w1, w3, w2))
    if quantize is not None:
        w1, w3, w2 = (fake_quantize(w, "mxfp4", scale_rule=quantize) for w in (w1, w3, w2))
        x = fake_quantize(x, "mxfp8", scale_rule=quantize)
    elif impl is None and kernels.takes_experts(x, weights, (w1, w3, w2), experts.numel()):
        return kernels.experts(x, experts, weights, (w1, w3, w2), kernel_form(activation))
    elif impl is None and not torch.is_grad_enabled() and x.device.type == "cpu" and experts.numel() <= FEW_PAIRS:
        return _few_pairs(x, experts, weights, w1, w3, w2, activation)
    plan = Plan.of(experts, w1.shape[0])
    rows = _Dispatch.apply(x, plan)
    hidden = activation(grouped_linear(rows, w1, plan.ends, impl), grouped_linear(rows, w3, plan.ends, impl))
    if quantize is not None:
        hidden = fake_quantize(hidden, "mxfp8", scale_rule=quantize)
    return _Combine.apply(grouped_linear(hidden, w2, plan.ends, impl), weights, plan, dtype)


def _few_pairs(
    x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, activation: GLU
) -> Tensor:
    """Decoding: one token after the other, one matrix-vector product a matrix."""
    # One call of torch where F.linear makes four; 16-bit products are left to F.linear, which knows oneDNN.
    product = torch.mv if x.dtype in (torch.float32, torch.float64) else lambda w, z: F.linear(z, w)
    rows = []
    for z, chosen, p in zip(x.unbind(0), experts.tolist(), weights.unbind(0), strict=True):
        y = [product(w2[e], activation(product(w1[e], z), product(w3[e], z))) for e in chosen]
        rows.append((p @ torch.stack(y).to(p.dtype)).to(x.dtype))
    return torch.stack(rows) if rows else x.clone()


Packed = tuple[Tensor, Tensor]


def packed_expert_mlp(
    x: Tensor, experts: Tensor, weights: Tensor, w1: Packed, w3: Packed, w2: Packed, activation: GLU
) -> Tensor:
    dtype = autocast_dtype(x) or x.dtype
    x = x.to(dtype)
    if kernels.takes_experts(x, weights, (w1, w3, w2), experts.numel()):
        return kernels.experts(x, experts, weights, (w1, w3, w2), kernel_form(activation))
    plan = Plan.of(experts, w1[0].shape[0])
    y = _expert_by_expert(_Dispatch.apply(x, plan), plan.ends.tolist(), w1, w3, w2, activation)
    return _Combine.apply(y, weights, plan, dtype)


def _expert_by_expert(rows: Tensor, ends: list[int], w1: Packed, w3: Packed, w2: Packed, activation: GLU) -> Tensor:
    """One expert's matrices are unpacked at a time."""
    parts, start = [], 0
    for e, end in enumerate(ends):
        if end > start:
            z = rows[start:end]
            gate, up, down = (unpack_mxfp4(codes[e], scale[e], dtype=rows.dtype) for codes, scale in (w1, w3, w2))
            parts.append(activation(z @ gate.T, z @ up.T) @ down.T)
        start = end
    return torch.cat(parts) if parts else rows

"""Host side of the experts' products and of the routing of few tokens: sizes, tiles, launches, operators."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import define, refuse_derivative
from openkda.ops.moe.triton.products import down_kernel, gate_up_kernel
from openkda.ops.moe.triton.routing import choose_kernel, combine_kernel, logits_kernel, order_kernel
from openkda.ops.triton.api import ceil_div, launch, padded

COUNTED = 1024
"""Pairs up to which their order is found by counting, each against all others, in one launch."""

STEP = 128
"""Columns of a product's step. Codes go half into each of two products, and those of 64 rows and more need operands of at least
64 columns: narrower ones are read wrongly on Hopper (Triton 3.6)."""


def tile_of(pairs: int, experts: int, wide: bool, packed: bool) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps: by the rows that an expert gets. wide: float32."""
    # H200, 32 experts of 1024 x 1024, microseconds by tile, packed: 1 token (16, 32) 20, (16, 64) 30; 256 tokens (64, 64) 118,
    # (32, 64) 129, (16, 64) 171; 8,192 tokens (128, 64) 1329, (64, 64) 1481. Plain: 256 tokens (32, 64) 86, (16, 64) 100.
    each = pairs // experts
    if wide or each <= 8:
        return 16, 32, 4
    return (32 if not packed else 64 if each <= 64 else 128), 64, (8 if packed and each > 64 else 4)


def order(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """experts [T, k] -> (pair [P] int32 of each row, sorted by expert; ends [E] int32, one past each expert's last row)."""
    P = experts.numel()
    pair = torch.empty(P, dtype=torch.int32, device=experts.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    if P <= COUNTED:
        constants = (32, padded(num_experts), 32)
        tensors = (experts.contiguous(), pair, ends)
        launch(order_kernel, ceil_div(P, 32), tensors, (), (P, num_experts), constants, 4, experts.device)
        return pair, ends
    kind = torch.uint8 if num_experts <= 256 else torch.int16 if num_experts < 1 << 15 else torch.int64
    by_expert, places = (
        experts.flatten().to(kind).sort(stable=True)
    )  # a radix sort: a pass for every eight bits of a key
    each = torch.arange(num_experts, device=experts.device).to(kind)
    return places.to(torch.int32), torch.searchsorted(by_expert, each, right=True).to(torch.int32)


def experts(
    x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, s1: Tensor | None, w3: Tensor, s3: Tensor | None, w2: Tensor,
    s2: Tensor | None, kind: int, b1: float, b2: float,
) -> Tensor:  # fmt: skip
    """x [T, D], experts and weights [T, k]; matrices as in `expert_mlp`, or codes and scales of MXFP4 -> [T, D]."""
    (T, D), k, (E, inner) = x.shape, experts.shape[1], w1.shape[:2]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    P = T * k
    if P == 0:
        return out.zero_()
    pair, ends = order(experts, E)
    wide = x.element_size() > 2
    bm, bn, warps = tile_of(P, E, wide, s1 is not None)
    tiles = min(E, P) + P // bm  # no more, wherever the tokens go
    tail = (bm, bn, STEP // 2 if wide else STEP, padded(E), s1 is not None)
    hidden, y = x.new_empty(P, inner), x.new_empty(P, D)
    matrices = [None if w is None else w.contiguous() for w in (w1, s1, w3, s3)]
    columns = ceil_div(inner, bn)
    tensors = (x.contiguous(), *matrices, pair, ends, hidden)
    numbers = (columns, E, k, b1, b2)
    launch(gate_up_kernel, columns * tiles, tensors, (D, inner), numbers, (*tail, kind), warps, x.device)
    columns = ceil_div(D, bn)
    down = (hidden, w2.contiguous(), None if s2 is None else s2.contiguous(), pair, ends, y)
    launch(down_kernel, columns * tiles, down, (inner, D), (columns, E), tail, warps, x.device)
    _combine(y, weights.contiguous(), None, out)
    return out


def combine(y: Tensor, weights: Tensor, row: Tensor, dtype: torch.dtype) -> Tensor:
    """y [P, D], weights [T, k], row [P]: where the result of each pair stands in y -> [T, D]."""
    out = torch.empty(weights.shape[0], y.shape[1], dtype=dtype, device=y.device)
    _combine(y.contiguous(), weights.contiguous(), row, out)
    return out


def _combine(y: Tensor, weights: Tensor, row: Tensor | None, out: Tensor) -> None:
    T, D = out.shape
    if out.numel():
        columns = ceil_div(D, 512)
        constants = (weights.shape[1], 512, row is not None)
        launch(combine_kernel, columns * T, (y, weights, row, out), (D,), (columns,), constants, 4, y.device)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, k: int, normalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D], weight [E, D] -> experts [T, k] int64, weights [T, k] and scores [T, E] float32."""
    (T, D), E = x.shape, weight.shape[0]
    logits, scores = (torch.empty(T, E, dtype=torch.float32, device=x.device) for _ in range(2))
    chosen = torch.empty(T, k, dtype=torch.int64, device=x.device)
    weights = torch.empty(T, k, dtype=torch.float32, device=x.device)
    if T == 0:
        return chosen, weights, scores
    rows = 4 if T >= 4 else 1
    product = (x.contiguous(), weight.contiguous(), logits)
    launch(logits_kernel, ceil_div(T, rows) * E, product, (D,), (T, E), (rows, 1024), 4, x.device)
    tensors = (logits, None if bias is None else bias.contiguous(), chosen, weights, scores)
    constants = (k, padded(E), padded(k), bias is not None, normalize)
    launch(choose_kernel, T, tensors, (), (E, scale), constants, 4, x.device)
    return chosen, weights, scores


def _fake(x: Tensor, experts: Tensor, weights: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_route(
    x: Tensor, weight: Tensor, bias: Tensor | None, k: int, normalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    T, f32 = x.shape[0], torch.float32
    return (
        x.new_empty(T, k, dtype=torch.int64),
        x.new_empty(T, k, dtype=f32),
        x.new_empty(T, weight.shape[0], dtype=f32),
    )


experts_op = define(
    "experts(Tensor x, Tensor experts, Tensor weights, Tensor w1, Tensor? s1, Tensor w3, Tensor? s3, Tensor w2, Tensor? s2, "
    "int kind, float b1, float b2) -> Tensor",
    experts,
    _fake,
)
route_op = define(
    "route(Tensor x, Tensor weight, Tensor? bias, int k, bool normalize, float scale) -> (Tensor, Tensor, Tensor)",
    route,
    _fake_route,
)
for op in (experts_op, route_op):
    refuse_derivative(op, "experts: their kernels have no derivative")

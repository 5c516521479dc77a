"""Small kernels around the experts' products: which experts a token takes, the order of its pairs, and their weighted sum."""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import sigmoid


@triton.jit(do_not_specialize=["T", "E"])
def logits_kernel(x_p, w_p, out_p, D, T, E, BT: tl.constexpr, BD: tl.constexpr):
    """out [T, E] = x [T, D] w [E, D]^T in float32: a program is one expert and BT tokens."""
    pid = tl.program_id(0)
    e = pid % E
    t = (pid // E) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    p_x = x_p + t.to(tl.int64)[:, None] * D
    p_w = w_p + e.to(tl.int64) * D
    acc = tl.zeros((BT, BD), tl.float32)
    for k in range(0, D, BD):
        w = tl.load(p_w + k + d, k + d < D, other=0.0).to(tl.float32)
        x = tl.load(p_x + (k + d)[None, :], (t < T)[:, None] & (k + d < D)[None, :], other=0.0).to(tl.float32)
        acc += x * w[None, :]
    tl.store(out_p + t.to(tl.int64) * E + e, tl.sum(acc, 1), t < T)


@triton.jit(do_not_specialize=["E"])
def choose_kernel(
    logits_p, bias_p, experts_p, weights_p, scores_p, E, scale,
    K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """A program is a token: scores = sigmoid(logits), the K largest of scores + bias (NaN is the largest, as for topk; of equal
    ones the first), and their weights."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    j = tl.arange(0, BK)
    s = sigmoid(tl.load(logits_p + t * E + e, e < E, other=0.0))
    tl.store(scores_p + t * E + e, s, e < E)
    key = s
    if HAS_BIAS:
        key += tl.load(bias_p + e, e < E, other=0.0)
    key = tl.where(key == key, key, float("inf"))
    free = e < E
    chosen = tl.zeros((BK,), tl.int32)
    weight = tl.zeros((BK,), tl.float32)
    for i in tl.static_range(K):
        best = tl.max(tl.where(free, key, float("-inf")), 0)
        at = tl.min(tl.where(free & (key == best), e, BE), 0)
        chosen = tl.where(j == i, at, chosen)
        weight = tl.where(j == i, tl.sum(tl.where(e == at, s, 0.0), 0), weight)
        free = free & (e != at)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(experts_p + t * K + j, chosen.to(tl.int64), j < K)
    tl.store(weights_p + t * K + j, weight * scale, j < K)


@triton.jit(do_not_specialize=["P", "E"])
def order_kernel(experts_p, pair_p, ends_p, P, E, BP: tl.constexpr, BE: tl.constexpr, STEP: tl.constexpr):
    """A stable sort of few pairs by expert, by counting who comes before: pair[row], and the ends of the experts' rows."""
    i = tl.program_id(0) * BP + tl.arange(0, BP)
    mine = tl.load(experts_p + i, i < P, other=0).to(tl.int32)
    e = tl.arange(0, BE)
    place = tl.zeros((BP,), tl.int32)
    ends = tl.zeros((BE,), tl.int32)
    for first in range(0, P, STEP):
        other = first + tl.arange(0, STEP)
        theirs = tl.load(experts_p + other, other < P, other=2147483647).to(tl.int32)[None, :]
        before = (theirs < mine[:, None]) | ((theirs == mine[:, None]) & (other[None, :] < i[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
        ends += tl.sum((theirs <= e[:, None]).to(tl.int32), 1)
    tl.store(pair_p + place, i, i < P)
    if tl.program_id(0) == 0:
        tl.store(ends_p + e, ends, e < E)


@triton.jit(do_not_specialize=["columns"])
def combine_kernel(y_p, weights_p, row_p, out_p, D, columns, K: tl.constexpr, BD: tl.constexpr, HAS_ROW: tl.constexpr):
    """out[t] = sum_j weights[t, j] y[row of pair (t, j)], in float32, in the order of j; y is by pair where no row is given."""
    pid = tl.program_id(0)
    t = (pid // columns).to(tl.int64)
    d = (pid % columns) * BD + tl.arange(0, BD)
    acc = tl.zeros((BD,), tl.float32)
    for j in tl.static_range(K):
        row = t * K + j
        if HAS_ROW:
            row = tl.load(row_p + row).to(tl.int64)
        acc += tl.load(weights_p + t * K + j) * tl.load(y_p + row * D + d, d < D, other=0.0).to(tl.float32)
    tl.store(out_p + t * D + d, acc.to(out_p.dtype.element_ty), d < D)

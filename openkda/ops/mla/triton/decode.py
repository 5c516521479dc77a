"""Attention of one token's heads to latents that are key and value at once, in parts of the sequence, and the parts' sum.

A tensor core takes 16 heads as the rows of its products. Softmax goes along (largest score so far, sum, weighted sum), base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["S", "H", "splits"])
def part_kernel(
    q_p, latent_p, lengths_p, o_p, m_p, l_p, stride_n, stride_s, S, H, splits, scale,
    RANK: tl.constexpr, SHARED: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Part i of sequence n for BH heads: o [N, splits, H, RANK], its sum l and its largest score m [N, splits, H]."""
    pid = tl.program_id(0)
    blocks = (H + BH - 1) // BH
    part = pid % splits
    n = (pid // (splits * blocks)).to(tl.int64)
    h = (pid // splits) % blocks * BH + tl.arange(0, BH)
    length = S
    if HAS_LENGTHS:
        length = tl.load(lengths_p + n).to(tl.int32)
    size = (length + splits * BS - 1) // (splits * BS) * BS
    first = part * size
    stop = tl.minimum(first + size, length)
    r, p = tl.arange(0, BR)[None, :], tl.arange(0, BP)[None, :]
    here = (h < H)[:, None]
    p_q = q_p + (n * H + h)[:, None] * (RANK + SHARED)
    q = tl.load(p_q + r, here & (r < RANK), other=0.0)
    q_shared = tl.load(p_q + RANK + p, here & (p < SHARED), other=0.0)
    m = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, BR), tl.float32)
    for start in tl.range(first, stop, BS, num_stages=2):
        s = start + tl.arange(0, BS)
        live = (s < stop)[:, None]
        p_latent = latent_p + n * stride_n + s.to(tl.int64)[:, None] * stride_s
        c = tl.load(p_latent + r, live & (r < RANK), other=0.0)
        shared = tl.load(p_latent + RANK + p, live & (p < SHARED), other=0.0)
        scores = tl.dot(q, tl.trans(c), input_precision="ieee")
        scores = tl.dot(q_shared, tl.trans(shared), scores, input_precision="ieee")
        scores = tl.where((s < stop)[None, :], scores * scale, float("-inf"))
        larger = tl.maximum(m, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(m - larger)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(c.dtype), c, acc * shrink[:, None], input_precision="ieee")
        m = larger
    at = (n * splits + part) * H + h
    tl.store(m_p + at, m, h < H)
    tl.store(l_p + at, total, h < H)
    tl.store(o_p + at[:, None] * RANK + r, acc, here & (r < RANK))


@triton.jit(do_not_specialize=["H", "splits"])
def sum_kernel(
    o_p, m_p, l_p, out_p, H, splits, RANK: tl.constexpr, BR: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """out [N, H, RANK]: a program is one head of one sequence."""
    pid = tl.program_id(0).to(tl.int64)
    n, h = pid // H, pid % H
    i = tl.arange(0, MOST)
    at = (n * splits + i) * H + h
    m = tl.load(m_p + at, i < splits, other=float("-inf"))
    largest = tl.max(m, 0)
    total = tl.sum(tl.exp2(m - largest) * tl.load(l_p + at, i < splits, other=0.0), 0)
    r = tl.arange(0, BR)
    acc = tl.zeros((BR,), tl.float32)
    for part in range(0, splits):
        here = (n * splits + part) * H + h
        acc += tl.exp2(tl.load(m_p + here) - largest) * tl.load(o_p + here * RANK + r, r < RANK, other=0.0)
    tl.store(out_p + pid * RANK + r, (acc / total).to(out_p.dtype.element_ty), r < RANK)

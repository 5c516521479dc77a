"""Rows times the matrices of their experts, plain or MXFP4, whose codes are unpacked in registers on their way into a product.

Rows are token-expert pairs sorted by expert. A program owns BM rows of one expert and BN of its output columns; which rows
those are it finds from the ends of the experts' rows alone. So a launch has the same number of programs wherever the tokens
go: a graph holds it, and nobody waits for the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.moe.triton.gated import gated


@triton.jit
def e2m1(nibble):
    """Code in the low four bits -> its value. Bits 0..2 are the top of a float16's fraction and the end of its exponent, off
    by 2^14; 0.5 is a subnormal there, so that all eight are exact."""
    bits = ((nibble & 7) << 9) | ((nibble & 8) << 12)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def e8m0(byte):
    """Scale byte -> 2^(byte - 127); 255 is NaN, and 0 is a subnormal of float32."""
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rows_of_tile(ends_p, tile, E, BM: tl.constexpr, BE: tl.constexpr):
    """(expert, first row, rows' end) of tile number `tile`, where every expert's rows begin a new tile; expert E: no rows."""
    e = tl.arange(0, BE)
    end = tl.load(ends_p + e, e < E, other=0)
    start = tl.load(ends_p + e - 1, (e < E) & (e > 0), other=0)
    tiles = tl.cumsum(tl.where(e < E, (end - start + BM - 1) // BM, 0), 0)
    before = (tiles <= tile) & (e < E)
    expert = tl.sum(before.to(tl.int32), 0)
    first = tile - tl.max(tl.where(before, tiles, 0), 0)
    mine = e == expert
    return expert, tl.sum(tl.where(mine, start, 0), 0) + first * BM, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def multiplied(acc, x, w_p, s_p, matrix, inside, k, D, BK: tl.constexpr, PACKED: tl.constexpr):
    """acc + x times columns k .. k + BK of rows `matrix` of w [.., D], or of codes w [.., D / 2], scales s [.., D / 32]."""
    if PACKED:
        byte, block = tl.arange(0, BK // 2)[None, :] + k // 2, tl.arange(0, BK // 32)[None, :] + k // 32
        code = tl.load(w_p + matrix * (D // 2) + byte, inside & (byte < D // 2), other=0).to(tl.int32)
        scale = e8m0(tl.load(s_p + matrix * (D // 32) + block, inside & (block < D // 32), other=127).to(tl.int32))
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (scale.shape[0], BK // 32, 16)), code.shape)
        even, odd = tl.split(tl.reshape(x, (x.shape[0], BK // 2, 2)))
        low = (e2m1(code).to(tl.float32) * scale).to(x.dtype)
        high = (e2m1(code >> 4).to(tl.float32) * scale).to(x.dtype)
        acc = tl.dot(even, tl.trans(low), acc, input_precision="ieee")
        acc = tl.dot(odd, tl.trans(high), acc, input_precision="ieee")
    else:
        column = tl.arange(0, BK)[None, :] + k
        w = tl.load(w_p + matrix * D + column, inside & (column < D), other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["columns", "E", "K"])
def gate_up_kernel(
    x_p, w1_p, s1_p, w3_p, s3_p, pair_p, ends_p, out_p, D, O, columns, E, K, b1, b2,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, PACKED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """out [P, O], sorted rows: act(x w1^T, x w3^T); x [T, D], and row r is pair pair[r], of token pair[r] // K."""
    pid = tl.program_id(0)
    expert, row, stop = rows_of_tile(ends_p, pid // columns, E, BM, BE)
    if expert >= E:
        return
    r = row + tl.arange(0, BM)
    o = (pid % columns) * BN + tl.arange(0, BN)
    live, inside = (r < stop)[:, None], (o < O)[:, None]
    token = tl.load(pair_p + r, r < stop, other=0) // K
    p_x = x_p + token.to(tl.int64)[:, None] * D
    matrix = (expert.to(tl.int64) * O + o)[:, None]
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BK):
        column = tl.arange(0, BK)[None, :] + k
        x = tl.load(p_x + column, live & (column < D), other=0.0)
        gate = multiplied(gate, x, w1_p, s1_p, matrix, inside, k, D, BK, PACKED)
        up = multiplied(up, x, w3_p, s3_p, matrix, inside, k, D, BK, PACKED)
    y = gated(gate, up, b1, b2, KIND)
    p_out = out_p + r.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(p_out, y.to(out_p.dtype.element_ty), live & (o < O)[None, :])


@triton.jit(do_not_specialize=["columns", "E"])
def down_kernel(
    x_p, w_p, s_p, pair_p, ends_p, out_p, D, O, columns, E,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """out [P, O] by pair: out[pair[r]] = w x[r], of sorted rows x [P, D]."""
    pid = tl.program_id(0)
    expert, row, stop = rows_of_tile(ends_p, pid // columns, E, BM, BE)
    if expert >= E:
        return
    r = row + tl.arange(0, BM)
    o = (pid % columns) * BN + tl.arange(0, BN)
    live, inside = (r < stop)[:, None], (o < O)[:, None]
    p_x = x_p + r.to(tl.int64)[:, None] * D
    matrix = (expert.to(tl.int64) * O + o)[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BK):
        column = tl.arange(0, BK)[None, :] + k
        x = tl.load(p_x + column, live & (column < D), other=0.0)
        acc = multiplied(acc, x, w_p, s_p, matrix, inside, k, D, BK, PACKED)
    pair = tl.load(pair_p + r, r < stop, other=0)
    p_out = out_p + pair.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(p_out, acc.to(out_p.dtype.element_ty), live & (o < O)[None, :])

"""Rows times the MXFP4 matrix of their expert: codes are unpacked in registers, on their way into the product.

Rows are sorted by expert. A program owns BM rows of one expert and BN of its output columns; which rows those are it finds from
the ends of the experts' rows alone. So a launch has the same number of programs wherever the tokens go: a graph holds it, and
nobody waits for the host.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def packed_kernel(
    x_p, codes_p, scale_p, ends_p, out_p, W, O, columns, E,
    BM: tl.constexpr, BN: tl.constexpr, BYTES: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """x [M, 2W], codes [E, O, W], scale [E, O, W / 16], ends [E] -> out [M, O]; BYTES of codes a step."""
    pid = tl.program_id(0)
    expert, row, stop = rows_of_tile(ends_p, pid // columns, E, BM, BE)
    if expert >= E:
        return
    r = row + tl.arange(0, BM)
    o = (pid % columns) * BN + tl.arange(0, BN)
    live, inside = r < stop, o < O
    matrix = (expert.to(tl.int64) * O + o)[:, None]
    byte, block, column = (
        tl.arange(0, BYTES)[None, :],
        tl.arange(0, BYTES // 16)[None, :],
        tl.arange(0, 2 * BYTES)[None, :],
    )
    p_codes = codes_p + matrix * W + byte
    p_scale = scale_p + matrix * (W // 16) + block
    p_x = x_p + r.to(tl.int64)[:, None] * (2 * W) + column
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, W, BYTES):
        code = tl.load(p_codes + k, inside[:, None] & (byte < W - k), other=0).to(tl.int32)
        scale = e8m0(tl.load(p_scale + k // 16, inside[:, None] & (block < (W - k) // 16), other=127).to(tl.int32))
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BN, BYTES // 16, 16)), (BN, BYTES))
        x = tl.load(p_x + 2 * k, live[:, None] & (column < 2 * (W - k)), other=0.0)
        even, odd = tl.split(tl.reshape(x, (BM, BYTES, 2)))
        low = (e2m1(code).to(tl.float32) * scale).to(x.dtype)
        high = (e2m1(code >> 4).to(tl.float32) * scale).to(x.dtype)
        acc = tl.dot(even, tl.trans(low), acc, input_precision="ieee")
        acc = tl.dot(odd, tl.trans(high), acc, input_precision="ieee")
    p_out = out_p + r.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(p_out, acc.to(out_p.dtype.element_ty), live[:, None] & inside[None, :])

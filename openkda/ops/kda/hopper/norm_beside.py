"""The gated RMSNorm of a scan's output beside the scan, on SMs that it leaves idle, while the output is in the L2 cache.

    scan   chunk c of every head -> o, told[head, half] = c + 1
    norm   waits for both halves of a chunk; o -> y in the same place

Nobody waits who is waited for: the scan never waits for a norm, and these programs begin when all of the scan's have begun.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from openkda.ops.kda.hopper.factors import barriers
from openkda.ops.kda.hopper.instructions import (
    LOG2E,
    _ex2_neg,
    _rcp,
    _rsqrt,
    end_after_the_kernel_before,
    let_dependents_start,
)
from openkda.ops.kda.hopper.scan import load_partition, operand_barriers, operand_tiles, scan_partition, zero_quarters
from openkda.ops.kda.hopper.state import S128

TILE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def kda_zero_kernel(p_ptr, count):
    for k in range(0, count, 128):
        i = k + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(p_ptr + i, gl.zeros([128], gl.int32, gl.BlockedLayout([1], [32], [4], [0])), mask=i < count)


@gluon.jit(do_not_specialize=["rows", "enters", "leaves"])
def kda_told_scan_kernel(
    x_desc, tm_desc, v_desc, o_desc, dec_ptr, told_ptr, o_ptr, s0_ptr, st_ptr, HV, rows, enters, leaves, SPLIT: gl.constexpr,
):  # fmt: skip
    """`kda_scan_kernel` of one sequence, all value channels of a head, that tells how far its output is."""
    let_dependents_start()
    hv = gl.program_id(0)
    row0 = hv * 0
    half = 0
    if SPLIT:
        half = hv & 1
        hv = hv >> 1
    length = rows
    n_seq = gl.where(enters != 0, 0, -1)
    out_seq = gl.where(leaves != 0, 0, -1)
    ops = operand_tiles()
    v0_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
    lb = operand_barriers(1 if SPLIT else 2)
    told = told_ptr + 2 * hv
    sb0 = (barriers(4, 1), lb, told)
    chunks = (length + 63) // 64
    zero_quarters(ops[4])  # T
    zero_quarters(ops[5])  # M
    if SPLIT:
        fence_async_shared()
        gl.warp_specialize(
            [
                (scan_partition, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v0_s, ops, sb0, row0, length, n_seq, out_seq, hv, HV,
                                  half, gl.constexpr(1), gl.constexpr(True), gl.constexpr(True), gl.constexpr(False),
                                  gl.constexpr(True))),
                (load_partition, (x_desc, tm_desc, dec_ptr, ops, lb, row0, chunks, hv, HV, gl.constexpr(True))),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        v1_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
        sb1 = (barriers(4, 1), lb, told)
        fence_async_shared()
        gl.warp_specialize(
            [
                (scan_partition, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v0_s, ops, sb0, row0, length, n_seq, out_seq, hv, HV,
                                  0, gl.constexpr(1), gl.constexpr(True), gl.constexpr(True), gl.constexpr(False),
                                  gl.constexpr(True))),
                (scan_partition, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v1_s, ops, sb1, row0, length, n_seq, out_seq, hv, HV,
                                  1, gl.constexpr(1), gl.constexpr(True), gl.constexpr(True), gl.constexpr(False),
                                  gl.constexpr(True))),
                (load_partition, (x_desc, tm_desc, dec_ptr, ops, lb, row0, chunks, hv, HV, gl.constexpr(True))),
            ],
            [4, 1],
            [232, 32],
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows"])
def kda_norm_beside_kernel(told_ptr, o_ptr, gate_ptr, w_ptr, HV, gate_row, rows, eps, R: gl.constexpr):
    """R tokens of a head at a time, in the order of chunks."""
    i = gl.arange(0, R, layout=gl.SliceLayout(1, TILE))
    j = gl.arange(0, 128, layout=gl.SliceLayout(0, TILE))
    w = gl.load(w_ptr + j)
    for item in range(gl.program_id(0), ((rows + 63) // 64) * (64 // R) * HV, gl.num_programs(0)):
        hv = item % HV
        first = item // HV * R
        inside = (first + i)[:, None] < rows
        g = gl.load(
            gate_ptr + first.to(gl.int64) * gate_row + i[:, None] * gate_row + (hv * 128 + j)[None, :], mask=inside, other=0.0
        )
        for half in gl.static_range(2):
            while gl.atomic_add(told_ptr + 2 * hv + half, 0, sem="acquire") <= first // 64:
                pass
        at = o_ptr + first.to(gl.int64) * (HV * 128) + i[:, None] * (HV * 128) + (hv * 128 + j)[None, :]
        x = gl.load(at, mask=inside, other=0.0).to(gl.float32)
        rate = _rsqrt(gl.sum(x * x, axis=1) * (1.0 / 128) + eps)
        y = x * rate[:, None] * w[None, :] * _rcp(1.0 + _ex2_neg(g.to(gl.float32) * LOG2E))
        gl.store(at, y.to(gl.bfloat16), mask=inside)
    end_after_the_kernel_before()

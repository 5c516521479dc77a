"""The scan with the gated RMSNorm behind it: `scan.py`, and a warpgroup that norms what two state warpgroups give.

    y = o / sqrt(mean_v(o^2) + eps) * weight * sigmoid(gate)

o is bfloat16 before the norm, as in `gated_rms_norm(kda(..))`, and lies in shared memory anyway, on its way out of the
accumulators: so a warpgroup for the norm takes both halves' tiles from there, puts y in their place and sends it off. State
warpgroups have less to do than without a norm, for they send nothing off, and nothing of this is in the chain of R, U and S.

    states   c       write o of c - 1, then R, U, S, O of c               two warpgroups, 64 value channels each
    norm     c - 1   o -> y in place, y leaves; the gate of c + 1 comes   a token: 8 threads, 16 channels each
    loader   c + 1   operands

Values of chunk c + 2 come where o of c - 2 was, which the norm has had a chunk's time for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from openkda.ops.kda.hopper.chains import LENTRY, field
from openkda.ops.kda.hopper.factors import FLAT1, LROW, barriers
from openkda.ops.kda.hopper.instructions import LOG2E, _ex2_neg, _rcp, let_dependents_start
from openkda.ops.kda.hopper.scan import load_partition, operand_barriers, operand_tiles, scan_partition, zero_quarters
from openkda.ops.kda.hopper.state import S128

STATES, NORM = gl.constexpr(208), gl.constexpr(64)  # registers a thread; 32 for the loader


@gluon.jit
def _fetch_gates(gate_desc, full, gates_s, row, col0, c, pred):
    st = c & 1
    mbarrier.expect(full.index(st), 16384, pred=pred)
    tma.async_copy_global_to_shared(gate_desc, [row, col0], full.index(st), gates_s.index(2 * st), pred=pred)
    tma.async_copy_global_to_shared(gate_desc, [row, col0 + 64], full.index(st), gates_s.index(2 * st + 1), pred=pred)


@gluon.jit
def _wide(x):
    """float32 of bfloat16, in the two instructions a pair that the compiler takes three for."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def _sqrt(x):
    return gl.inline_asm_elementwise(
        "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _gated(x, size, weight, gate):
    """x weight sigmoid(gate) / size, with one reciprocal."""
    e = _ex2_neg(_wide(gate) * LOG2E)
    return (x * weight[None, :] * _rcp(e * size[:, None] + size[:, None])).to(gl.bfloat16)


@gluon.jit
def norm_partition(gate_desc, o_ptr, w_s, gates_s, tiles, bars, row0, length, hv, HV, eps):
    """tiles: of each state warpgroup its four, in which outputs come. What leaves are rows of 128 bytes, by threads."""
    v0_s, v1_s = tiles
    gate_full, o_ready, o_free = bars
    chunks = (length + 63) // 64
    col0 = hv * 128
    i = gl.arange(0, 16, layout=gl.SliceLayout(1, LROW))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, LROW))
    w0 = w_s.index(0).load(gl.SliceLayout(0, LROW))
    w1 = w_s.index(1).load(gl.SliceLayout(0, LROW))
    if length > 0:
        _fetch_gates(gate_desc, gate_full, gates_s, row0, col0, 0, True)
        _fetch_gates(gate_desc, gate_full, gates_s, row0 + 64, col0, 1, chunks > 1)
        for c in range(chunks):
            st = c & 1
            phase = (c >> 1) & 1
            left = v0_s.index(c & 3)
            right = v1_s.index(c & 3)
            n = length - c * 64
            out = o_ptr + (row0 + c * 64).to(gl.int64) * (HV * 128) + col0
            mbarrier.wait(gate_full.index(st), phase)
            mbarrier.wait(o_ready.index(st), phase)
            for r in gl.static_range(0, 64, 16):  # 16 tokens at a time: few registers
                a = _wide(left.slice(r, 16).load(LROW))
                b = _wide(right.slice(r, 16).load(LROW))
                size = _sqrt(gl.sum(a * a + b * b, axis=1) * (1.0 / 128) + eps)
                at = out + (r + i)[:, None] * (HV * 128) + j[None, :]
                inside = (r + i)[:, None] < n
                gl.store(at, _gated(a, size, w0, gates_s.index(2 * st).slice(r, 16).load(LROW)), mask=inside)
                gl.store(at + 64, _gated(b, size, w1, gates_s.index(2 * st + 1).slice(r, 16).load(LROW)), mask=inside)
            gl.thread_barrier()
            mbarrier.arrive(o_free.index(st), count=1)
            _fetch_gates(gate_desc, gate_full, gates_s, row0 + (c + 2) * 64, col0, c + 2, c + 2 < chunks)


@gluon.jit(do_not_specialize=["T", "rows", "first", "enters", "ranges", "beside"])
def kda_normed_scan_kernel(
    x_desc, tm_desc, v_desc, o_desc, gate_desc, dec_ptr, ranks_ptr, o_ptr, s0_ptr, st_ptr, w_ptr, HV, T, rows, first, enters,
    ranges, beside, eps,
    VARLEN: gl.constexpr,
):  # fmt: skip
    """`scan.kda_scan_kernel` with all value channels of a head in one CTA, and the norm. gate: of the norm, as o. w_ptr: its
    weight, [128] float32."""
    if beside != 0:
        let_dependents_start()
    pid = gl.program_id(0)
    seq = pid // HV
    hv = pid % HV
    if VARLEN:
        entry = gl.load(ranks_ptr + seq * 4 + gl.arange(0, 4, layout=LENTRY))
        seq = field(entry, 0)
        slot0 = field(entry, 1)
        row0 = field(entry, 2)
        length = field(entry, 3)
    else:
        slot0 = seq * ((T + 63) // 64)
        row0 = first + seq * T
        length = gl.minimum(T, rows - row0)
    n_seq = gl.where(enters != 0, seq, -1)
    out_seq = gl.where((ranges > 0) & ((seq + 1) % gl.maximum(ranges, 1) == 0), seq // gl.maximum(ranges, 1), -1)
    ops = operand_tiles()
    v0_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
    v1_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
    gates_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
    w_s = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT1)
    lb = operand_barriers(2)
    gate_full = barriers(2, 1)
    o_ready = barriers(2, 2)
    o_free = barriers(2, 1)
    sb0 = (barriers(4, 1), lb, o_ready, o_free)
    sb1 = (barriers(4, 1), lb, o_ready, o_free)
    chunks = (length + 63) // 64
    zero_quarters(ops[4])  # T
    zero_quarters(ops[5])  # M
    i = gl.arange(0, 64, layout=gl.SliceLayout(0, LROW))
    w_s.index(0).store(gl.load(w_ptr + i))
    w_s.index(1).store(gl.load(w_ptr + 64 + i))
    fence_async_shared()
    gl.warp_specialize(
        [
            (scan_partition, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v0_s, ops, sb0, row0, length, n_seq, out_seq, hv, HV, 0,
                              gl.constexpr(1), gl.constexpr(True), gl.constexpr(True), gl.constexpr(True))),
            (scan_partition, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v1_s, ops, sb1, row0, length, n_seq, out_seq, hv, HV, 1,
                              gl.constexpr(1), gl.constexpr(True), gl.constexpr(True), gl.constexpr(True))),
            (norm_partition, (gate_desc, o_ptr, w_s, gates_s, (v0_s, v1_s), (gate_full, o_ready, o_free), row0, length,
                              hv, HV, eps)),
            (load_partition, (x_desc, tm_desc, dec_ptr, ops, lb, slot0, chunks, hv, HV, gl.constexpr(True))),
        ],
        [4, 4, 1],
        [STATES, NORM, 32],
    )  # fmt: skip

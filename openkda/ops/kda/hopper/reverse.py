"""Backward on Hopper: the walk from the last prepared chunk to the first that carries the state's gradient.

Of one chunk, from the gradient dS' of the leaving state and do of the output, with the operands of `factors.py`:

    E = Kh dS' + M^T do        dD = T^T E        dS = Diag(decay) dS' + Qt^T do - Kt^T dD

the same products as the forward's, transposed as there, so one row of the state's gradient is a value channel and its float16
operands carry a power of two a row. With |k| = 1 and beta <= 1 neither E nor dD exceeds 12 times the larger of that row
and 64 times scale do, which leaves float16 room (`row_scale`). dD is the gradient of v. It leaves dD of every token and dS'
of every chunk as `replay.py` leaves U and S.

    tensor    M^T do, Kh dS' | T^T E     | Qt^T do, Kt^T dD ...... | of chunk c - 1
    threads   dS' to float16 | decay dS  | dD to float16   scale dS for c - 1
    copies    dS' leaves       operands of c - 1, do of c - 2 come   dD leaves
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openkda.ops.kda.hopper.factors import S64, _clean, barriers
from openkda.ops.kda.hopper.replay import (
    MOST,
    ROW_S,
    ROW_T,
    await_tile,
    fetch,
    keep_state,
    keep_tokens,
    locate,
    row_scale,
)
from openkda.ops.kda.hopper.scan import operand_tiles, zero_quarters
from openkda.ops.kda.hopper.state import A_S, A_T, ACC_S, ACC_T, S128, _state_offsets, _values


@gluon.jit
def _load_backwards(x_desc, tm_desc, dec_ptr, ops, bars, slot0, chunks, hv, HV):
    """One warp that keeps two chunks of operands in flight, the last chunk first."""
    kt_s, qt_s, kh_s, dec_s, tt_s, m_s = ops
    kq_ready, kh_ready, tm_ready, free = bars
    L: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i = gl.arange(0, 128, layout=L)
    t_q = tt_s._reinterpret(gl.float16, [8, 32, 32], S64)
    m_q = m_s._reinterpret(gl.float16, [8, 32, 32], S64)
    for step in range(chunks):
        st = step & 1
        ws = (slot0 + chunks - 1 - step) * HV + hv
        row = ws * 192
        dec = gl.load(dec_ptr + ws.to(gl.int64) * 128 + i)
        mbarrier.wait(free.index(st), ((step >> 1) & 1) ^ 1)
        mbarrier.expect(tm_ready.index(st), 12288)
        tma.async_copy_global_to_shared(tm_desc, [row + 96, 0], tm_ready.index(st), m_q.index(4 * st))
        tma.async_copy_global_to_shared(tm_desc, [row + 128, 0], tm_ready.index(st), m_q.index(4 * st + 1))
        tma.async_copy_global_to_shared(tm_desc, [row + 160, 0], tm_ready.index(st), m_q.index(4 * st + 3))
        tma.async_copy_global_to_shared(tm_desc, [row, 0], tm_ready.index(st), t_q.index(4 * st))
        tma.async_copy_global_to_shared(tm_desc, [row + 32, 0], tm_ready.index(st), t_q.index(4 * st + 1))
        tma.async_copy_global_to_shared(tm_desc, [row + 64, 0], tm_ready.index(st), t_q.index(4 * st + 3))
        mbarrier.expect(kh_ready.index(st), 16384)
        tma.async_copy_global_to_shared(x_desc, [row + 128, 0], kh_ready.index(st), kh_s.index(st))
        dec_s.index(st).store(dec)
        gl.thread_barrier()
        mbarrier.arrive(kh_ready.index(st), count=1)
        mbarrier.expect(kq_ready.index(st), 32768)
        tma.async_copy_global_to_shared(x_desc, [row + 64, 0], kq_ready.index(st), qt_s.index(st))
        tma.async_copy_global_to_shared(x_desc, [row, 0], kq_ready.index(st), kt_s.index(st))


@gluon.jit
def _ready_back(s, inv, do_c, n, wide):
    """Readies a chunk: do cleaned, the state's gradient scaled; float16 copies of both, the new inverse, sizes of its rows."""
    if n < 64:
        _clean(do_c, n, 0.0)
    x = _values(do_c)
    size = gl.max(gl.abs(s), axis=1) * inv
    sc, inv_new = row_scale(gl.maximum(size, gl.convert_layout(gl.max(gl.abs(x), axis=1) * wide, ROW_S)))
    s = s * gl.minimum(sc * inv, MOST)[:, None]
    x = (x * gl.convert_layout(sc, ROW_T)[:, None]).to(gl.float16)
    return s, gl.convert_layout(s.to(gl.float16), A_T), x, inv_new, size


@gluon.jit
def reverse_partition(
    do_desc, dd_desc, ds_desc, dd_ptr, dd_unit_ptr, ds_unit_ptr, ds1_ptr, ds0_ptr, do_s, s_s, ops, bars, row0, length, save,
    tile0, seq, hv, HV, half, wide, STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr,
):  # fmt: skip
    """Warpgroup that carries 64 value rows of the transposed gradient backwards. do_s: three tiles, for do and then dD; s_s:
    one for the gradients of states."""
    kt_s, qt_s, kh_s, dec_s, tt_s, m_s = ops
    do_full, operand_bars = bars
    kq_ready, kh_ready, tm_ready, free = operand_bars
    chunks = (length + 63) // 64
    col0 = hv * 128 + half * 64
    s = gl.zeros([64, 128], gl.float32, ACC_S)
    if STATE_IN:
        s = gl.load(ds1_ptr + _state_offsets(seq * HV + hv, half))
    inv = gl.full([64], 1.0, gl.float32, ROW_S)
    zero = gl.zeros([64, 64], gl.float32, ACC_T)
    if length > 0:
        last = chunks - 1
        fetch(do_desc, do_full, do_s, row0 + last * 64, col0, 0, True)
        fetch(do_desc, do_full, do_s, row0 + (last - 1) * 64, col0, 1, chunks > 1)
        await_tile(do_full, 0)
        s, a, x, inv, size = _ready_back(s, inv, do_s.index(0), length - last * 64, wide)
        for step in range(chunks):
            st = step & 1
            phase = (step >> 1) & 1
            c = last - step
            mbarrier.wait(tm_ready.index(st), phase)
            e = warpgroup_mma(gl.convert_layout(x, A_T), m_s.index(st), zero, use_acc=False, is_async=True)
            mbarrier.wait(kh_ready.index(st), phase)
            e = warpgroup_mma(a, kh_s.index(st).permute((1, 0)), e, is_async=True)
            keep_state(ds_desc, (save + c) * 128 + half * 64, s, inv, size, s_s, ds_unit_ptr + (save + c) * 2 + half)
            e = warpgroup_mma_wait(0, deps=[e])
            ae = gl.convert_layout(e.to(gl.float16), A_T)
            d = warpgroup_mma(ae, tt_s.index(st), zero, use_acc=False, is_async=True)
            s = s * dec_s.index(st).load(gl.SliceLayout(0, ACC_S))[None, :]
            mbarrier.wait(kq_ready.index(st), phase)
            s = warpgroup_mma(gl.convert_layout(x, A_S), qt_s.index(st), s, is_async=True)
            d = warpgroup_mma_wait(1, deps=[d])
            s = warpgroup_mma(gl.convert_layout((-d).to(gl.float16), A_S), kt_s.index(st), s, is_async=True)
            keep_tokens(
                dd_desc, dd_ptr, row0 + c * 64, col0, d, inv, do_s.index(step % 3),
                dd_unit_ptr + (tile0 + c * 4).to(gl.int64) * 32 + half * 16, length - c * 64, HV,
            )  # fmt: skip
            s = warpgroup_mma_wait(0, deps=[s])
            if step + 1 < chunks:
                await_tile(do_full, step + 1)
                s, a, x, inv, size = _ready_back(s, inv, do_s.index((step + 1) % 3), 64, wide)
            if step == 0:
                tma.store_wait(0)  # a partial chunk's dD is no copy to be counted
            tma.store_wait(1)  # of this chunk all but dD
            gl.thread_barrier()
            mbarrier.arrive(free.index(st), count=1)
            fetch(do_desc, do_full, do_s, row0 + (c - 2) * 64, col0, step + 2, step + 2 < chunks)
        tma.store_wait(0)
    if STATE_OUT:
        gl.store(ds0_ptr + _state_offsets(seq * HV + hv, half), s * inv[:, None])


@gluon.jit(do_not_specialize=["T", "rows", "saves", "tiles"])
def kda_reverse_kernel(
    x_desc, tm_desc, do_desc, dd_desc, ds_desc, dec_ptr, ranks_ptr, dd_ptr, dd_unit_ptr, ds_unit_ptr, ds1_ptr, ds0_ptr,
    HV, T, rows, saves, tiles, wide,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, VARLEN: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """One (sequence, value head); SPLIT: half its value channels. dd, ds and their units: as u, s of `replay.py`; ds1, ds0
    [sequences, HV, 128, 128] float32, the gradients of the last and the first state. wide: the larger of 1 and scale."""
    pid = gl.program_id(0)
    half = 0
    if SPLIT:
        half = pid & 1
        pid = pid >> 1
    hv = pid % HV
    seq, slot0, row0, length, save0, tile0 = locate(ranks_ptr, pid // HV, HV, T, rows, VARLEN)
    save = hv * saves + save0
    tile = hv * tiles + tile0
    ops = operand_tiles()
    do0_s = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 64], S128)
    s0_s = gl.allocate_shared_memory(gl.float16, [64, 128], S128)
    # `operand_barriers` without the kind that nobody here would wait for (see `barriers`).
    lb = (barriers(2, 1), barriers(2, 2), barriers(2, 1), barriers(2, 1 if SPLIT else 2))
    sb0 = (barriers(3, 1), lb)
    chunks = (length + 63) // 64
    zero_quarters(ops[4])  # T
    zero_quarters(ops[5])  # M
    if SPLIT:
        fence_async_shared()
        gl.warp_specialize(
            [
                (reverse_partition, (do_desc, dd_desc, ds_desc, dd_ptr, dd_unit_ptr, ds_unit_ptr, ds1_ptr, ds0_ptr, do0_s, s0_s,
                                      ops, sb0, row0, length, save, tile, seq, hv, HV, half, wide, STATE_IN, STATE_OUT)),
                (_load_backwards, (x_desc, tm_desc, dec_ptr, ops, lb, slot0, chunks, hv, HV)),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        do1_s = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 64], S128)
        s1_s = gl.allocate_shared_memory(gl.float16, [64, 128], S128)
        sb1 = (barriers(3, 1), lb)
        fence_async_shared()
        gl.warp_specialize(
            [
                (reverse_partition, (do_desc, dd_desc, ds_desc, dd_ptr, dd_unit_ptr, ds_unit_ptr, ds1_ptr, ds0_ptr, do0_s, s0_s,
                                      ops, sb0, row0, length, save, tile, seq, hv, HV, 0, wide, STATE_IN, STATE_OUT)),
                (reverse_partition, (do_desc, dd_desc, ds_desc, dd_ptr, dd_unit_ptr, ds_unit_ptr, ds1_ptr, ds0_ptr, do1_s, s1_s,
                                      ops, sb1, row0, length, save, tile, seq, hv, HV, 1, wide, STATE_IN, STATE_OUT)),
                (_load_backwards, (x_desc, tm_desc, dec_ptr, ops, lb, slot0, chunks, hv, HV)),
            ],
            [4, 1],
            [232, 32],
        )  # fmt: skip

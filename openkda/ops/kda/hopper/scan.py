"""Second pass of the Hopper forward: the state recurrence over prepared chunks, which only multiplies.

scan   a CTA per (sequence, head), two state warpgroups     v, workspace -> o, final state
       and a loading warp, two stages
ends   the same without outputs, twice side by side         workspace -> end state and transition of every segment
                                                            but a sequence's last one

A state warpgroup's chunk c; only R, U and S are in the chain from state to state:

    tensor    R .......... U ....... S ....... O ............... | R of c + 1
    threads   output c-1   decay S   U         scale S for c+1   |
    copies    operands of c + 1, values of c + 2 come; the output of c - 1 leaves
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

from openkda.ops.kda.hopper.chains import LENTRY, field
from openkda.ops.kda.hopper.factors import FLAT1, S64, _clean, barriers
from openkda.ops.kda.hopper.instructions import let_dependents_start
from openkda.ops.kda.hopper.state import (  # fmt: skip
    A_S,
    A_T,
    ACC_S,
    ACC_T,
    S128,
    _output,
    _row_scale,
    _send_for,
    _state_offsets,
    _values,
    _write_output,
)
from openkda.ops.kda.hopper.unordered import unordered


@gluon.jit
def operand_tiles():
    """Shared memory of two chunks' Kt, Qt, Kh, decay, T and M."""
    kt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    qt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    kh_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    dec_s = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT1)
    tt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S64)
    m_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S64)
    return kt_s, qt_s, kh_s, dec_s, tt_s, m_s


@gluon.jit
def operand_barriers(users: gl.constexpr):
    """Of those tiles, read by `users` state warpgroups: Kt and Qt ready, Kh ready, Kh free, T and M ready, all others free."""
    kq_ready = barriers(2, 1)
    tm_ready = barriers(2, 1)
    kh_ready = barriers(2, 2)
    free = barriers(2, users)
    kh_free = barriers(2, users)
    return kq_ready, kh_ready, kh_free, tm_ready, free


@gluon.jit
def load_partition(
    x_desc, tm_desc, dec_ptr, ops, bars, slot0, chunks, hv, HV, OUTPUT: gl.constexpr,
):  # fmt: skip
    """One warp that keeps two chunks of operands in flight; without OUTPUT neither Qt nor M."""
    kt_s, qt_s, kh_s, dec_s, tt_s, m_s = ops
    kq_ready, kh_ready, kh_free, tm_ready, free = bars
    L: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i = gl.arange(0, 128, layout=L)
    t_q = tt_s._reinterpret(gl.float16, [8, 32, 32], S64)
    m_q = m_s._reinterpret(gl.float16, [8, 32, 32], S64)
    for c in range(chunks):
        st = c & 1
        used = ((c >> 1) & 1) ^ 1
        ws = (slot0 + c) * HV + hv
        row = ws * 192
        dec = gl.load(dec_ptr + ws.to(gl.int64) * 128 + i)
        mbarrier.wait(free.index(st), used)
        mbarrier.expect(kq_ready.index(st), 32768 if OUTPUT else 16384)
        tma.async_copy_global_to_shared(x_desc, [row, 0], kq_ready.index(st), kt_s.index(st))
        mbarrier.expect(tm_ready.index(st), 12288 if OUTPUT else 6144)
        tma.async_copy_global_to_shared(tm_desc, [row, 0], tm_ready.index(st), t_q.index(4 * st))
        tma.async_copy_global_to_shared(tm_desc, [row + 32, 0], tm_ready.index(st), t_q.index(4 * st + 1))
        tma.async_copy_global_to_shared(tm_desc, [row + 64, 0], tm_ready.index(st), t_q.index(4 * st + 3))
        if OUTPUT:
            tma.async_copy_global_to_shared(x_desc, [row + 64, 0], kq_ready.index(st), qt_s.index(st))
            tma.async_copy_global_to_shared(tm_desc, [row + 96, 0], tm_ready.index(st), m_q.index(4 * st))
            tma.async_copy_global_to_shared(tm_desc, [row + 128, 0], tm_ready.index(st), m_q.index(4 * st + 1))
            tma.async_copy_global_to_shared(tm_desc, [row + 160, 0], tm_ready.index(st), m_q.index(4 * st + 3))
        mbarrier.wait(kh_free.index(st), used)
        mbarrier.expect(kh_ready.index(st), 16384)
        tma.async_copy_global_to_shared(x_desc, [row + 128, 0], kh_ready.index(st), kh_s.index(st))
        dec_s.index(st).store(dec)
        gl.thread_barrier()
        mbarrier.arrive(kh_ready.index(st), count=1)


@gluon.jit
def zero_quarters(s):
    """The upper right quarter of T or M is never copied."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    quarters = s._reinterpret(gl.float16, [8, 32, 32], S64)
    for st in gl.static_range(2):
        quarters.index(4 * st + 2).store(gl.full([32, 32], 0.0, gl.float16, L))


@gluon.jit
def _enter(s, inv, v_c, n, VALUES: gl.constexpr):
    """Readies a chunk: its values cleaned, the state scaled; returns it, its float16 copy, the new scale and its inverse."""
    if VALUES:
        if n < 64:
            _clean(v_c, n, 0.0)
        v_max = gl.max(gl.abs(_values(v_c)), axis=1)
    else:
        v_max = gl.zeros([64], gl.float32, gl.SliceLayout(1, ACC_T))
    sc, inv_new = _row_scale(s, v_max, inv)
    s = s * (sc * inv)[:, None]
    return s, gl.convert_layout(s.to(gl.float16), A_T), sc, inv_new


@gluon.jit
def _fetch_values(v_desc, v_full, v_s, row, col0, b, pred):
    f = b & 3
    _send_for(v_desc, v_full.index(f), v_s.index(f), row, col0, pred)


@gluon.jit
def scan_partition(
    v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v_s, ops, bars, row0, length, n_seq, out_seq, hv, HV, half,
    STATE_IN: gl.constexpr, VALUES: gl.constexpr = True, OUTPUT: gl.constexpr = True,
):  # fmt: skip
    """Warpgroup that carries 64 value rows of the transposed state through prepared chunks, in registers. Nothing but
    R, U and S is in the chain from state to state:

        tensor   R ........ U ..... S ..... O ............
        threads  output c-1   decay S   u     scale S for c+1

    v_s: four tiles, for values on their way, values, outputs and outputs on their way. STATE_IN: 0 zeros, 1 number n_seq of
    s0_ptr (zeros if negative), 2 the identity. The state that leaves is number out_seq of st_ptr, not written if negative.
    VALUES=False takes v = 0, OUTPUT=False writes no o: from the identity the two give the transition matrix of the whole range.
    """
    kt_s, qt_s, kh_s, dec_s, tt_s, m_s = ops
    v_full, operand_bars = bars
    kq_ready, kh_ready, kh_free, tm_ready, free = operand_bars
    chunks = (length + 63) // 64
    col0 = hv * 128 + half * 64
    if STATE_IN == 1:
        s = gl.load(s0_ptr + _state_offsets(n_seq * HV + hv, half), mask=n_seq >= 0, other=0.0)
    elif STATE_IN == 2:
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_S)) + half * 64
        s = gl.where(i[:, None] == gl.arange(0, 128, layout=gl.SliceLayout(0, ACC_S))[None, :], 1.0, 0.0)
    else:
        s = gl.zeros([64, 128], gl.float32, ACC_S)
    inv = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, ACC_S))
    zero = gl.zeros([64, 64], gl.float32, ACC_T)
    if length > 0:
        if VALUES:
            _fetch_values(v_desc, v_full, v_s, row0, col0, 0, True)
            _fetch_values(v_desc, v_full, v_s, row0 + 64, col0, 1, chunks > 1)
            mbarrier.wait(v_full.index(0), 0)
        out = zero.to(gl.bfloat16)  # no accumulator: of one ptxas would wait for R before it is read
        s, a, sc, inv = _enter(s, inv, v_s.index(0), length, VALUES)
        for c in range(chunks):
            st = c & 1
            phase = (c >> 1) & 1
            v_c = v_s.index(c & 3)
            mbarrier.wait(kq_ready.index(st), phase)
            r = warpgroup_mma(a, kt_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
            if OUTPUT:  # noqa: SIM102 (a constant: the copy without it is not compiled)
                if c > 0:
                    v_p = v_s.index((c - 1) & 3)
                    unordered()
                    v_p.permute((1, 0)).store(out)
                    _write_output(o_desc, o_ptr, v_p, row0 + (c - 1) * 64, col0, 64, HV)
            r, a = warpgroup_mma_wait(0, deps=[r, a])
            if VALUES:
                unordered()
                r = _values(v_c) * gl.convert_layout(sc, gl.SliceLayout(1, ACC_T))[:, None] - r
            else:
                r = -r
            ar = gl.convert_layout(r.to(gl.float16), A_T)
            mbarrier.wait(tm_ready.index(st), phase)
            u = warpgroup_mma(ar, tt_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(kh_ready.index(st), phase)
            s = s * dec_s.index(st).load(gl.SliceLayout(0, ACC_S))[None, :]
            u, ar = warpgroup_mma_wait(0, deps=[u, ar])
            u16 = u.to(gl.float16)
            au = gl.convert_layout(u16, A_S)
            s = warpgroup_mma(au, kh_s.index(st), s, is_async=True)
            if OUTPUT:
                o = warpgroup_mma(a, qt_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
                at = gl.convert_layout(u16, A_T)
                o = warpgroup_mma(at, m_s.index(st).permute((1, 0)), o, is_async=True)
            s, au = warpgroup_mma_wait(2 if OUTPUT else 0, deps=[s, au])
            old = inv
            a_next = a
            if c + 1 < chunks:
                if VALUES:
                    unordered()
                    mbarrier.wait(v_full.index((c + 1) & 3), ((c + 1) >> 2) & 1)
                s, a_next, sc, inv = _enter(s, inv, v_s.index((c + 1) & 3), length - (c + 1) * 64, VALUES)
            if OUTPUT:
                o, a, at = warpgroup_mma_wait(0, deps=[o, a, at])
                out = _output(o, old)
                tma.store_wait(0)  # the output of chunk c - 1: its tile is free
            a = a_next
            gl.thread_barrier()
            mbarrier.arrive(free.index(st), count=1)
            unordered()
            mbarrier.arrive(kh_free.index(st), count=1)
            if VALUES:
                _fetch_values(v_desc, v_full, v_s, row0 + (c + 2) * 64, col0, c + 2, c + 2 < chunks)
        if OUTPUT:
            v_p = v_s.index((chunks - 1) & 3)
            unordered()
            v_p.permute((1, 0)).store(out)
            _write_output(o_desc, o_ptr, v_p, row0 + (chunks - 1) * 64, col0, length - (chunks - 1) * 64, HV)
            tma.store_wait(0)
    if out_seq >= 0:
        gl.store(st_ptr + _state_offsets(out_seq * HV + hv, half), s * inv[:, None])


@gluon.jit(do_not_specialize=["T", "rows", "first", "enters", "ranges", "beside"])
def kda_scan_kernel(
    x_desc, tm_desc, v_desc, o_desc, dec_ptr, ranks_ptr, o_ptr, s0_ptr, st_ptr, HV, T, rows, first, enters, ranges, beside,
    VARLEN: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """State recurrence of one (sequence, value head) over prepared chunks; SPLIT: of half its value channels.

    enters: whether states do, one a range; otherwise zeros. ranges: of these a sequence is cut into as many, the last of which
    writes the sequence's state; 0: nobody does. These are numbers, for every other binary would have to be compiled.
    With VARLEN long sequences come first, as `prepare` ranked them, so that none is left over at the end; without, every
    range has T tokens, from token `first` on, the last one those that are left of `rows`. beside: the next window's factors
    may be prepared meanwhile, on SMs that this kernel leaves.
    """
    if beside != 0:
        let_dependents_start()
    pid = gl.program_id(0)
    half = 0
    if SPLIT:
        half = pid & 1
        pid = pid >> 1
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
    lb = operand_barriers(1 if SPLIT else 2)
    sb0 = (barriers(4, 1), lb)
    chunks = (length + 63) // 64
    zero_quarters(ops[4])  # T
    zero_quarters(ops[5])  # M
    if SPLIT:
        fence_async_shared()
        gl.warp_specialize(
            [
                (scan_partition, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v0_s, ops, sb0, row0, length, n_seq, out_seq,
                                   hv, HV, half, gl.constexpr(1), gl.constexpr(True), gl.constexpr(True))),
                (load_partition, (x_desc, tm_desc, dec_ptr, ops, lb, slot0, chunks, hv, HV,
                                   gl.constexpr(True))),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        v1_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
        sb1 = (barriers(4, 1), lb)
        fence_async_shared()
        gl.warp_specialize(
            [
                (scan_partition, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v0_s, ops, sb0, row0, length, n_seq, out_seq,
                                   hv, HV, 0, gl.constexpr(1), gl.constexpr(True), gl.constexpr(True))),
                (scan_partition, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v1_s, ops, sb1, row0, length, n_seq, out_seq,
                                   hv, HV, 1, gl.constexpr(1), gl.constexpr(True), gl.constexpr(True))),
                (load_partition, (x_desc, tm_desc, dec_ptr, ops, lb, slot0, chunks, hv, HV,
                                   gl.constexpr(True))),
            ],
            [4, 1],
            [232, 32],
        )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "rows", "ranges", "beside"])
def kda_ends_kernel(x_desc, tm_desc, v_desc, dec_ptr, local_ptr, transition_ptr, HV, T, rows, ranges, beside):
    """State at the end of every range of T tokens from zero (local), and its transition matrix, side by side: both need
    the same operands. One CTA a (range, value head, half of the value channels); of the `ranges` of a sequence nobody asks
    where the last one ends. beside: see `kda_scan_kernel`."""
    if beside != 0:
        let_dependents_start()
    pid = gl.program_id(0)
    half = pid & 1
    seq = (pid >> 1) // HV
    hv = (pid >> 1) % HV
    seq += seq // (ranges - 1)
    row0 = seq * T
    length = gl.minimum(T, rows - row0)
    kt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    kh_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    dec_s = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT1)
    tt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S64)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
    lb = operand_barriers(2)
    ops = (kt_s, kt_s, kh_s, dec_s, tt_s, tt_s)
    bars = (barriers(4, 1), lb)
    slot0 = seq * ((T + 63) // 64)
    zero_quarters(tt_s)
    fence_async_shared()
    gl.warp_specialize(
        [
            (scan_partition, (v_desc, v_desc, local_ptr, local_ptr, local_ptr, v_s, ops, bars, row0, length, seq, seq, hv,
                               HV, half, gl.constexpr(0), gl.constexpr(True), gl.constexpr(False))),
            (scan_partition, (v_desc, v_desc, transition_ptr, transition_ptr, transition_ptr, v_s, ops, bars, row0,
                               length, seq, seq, hv, HV, half, gl.constexpr(2), gl.constexpr(False),
                               gl.constexpr(False))),
            (load_partition, (x_desc, tm_desc, dec_ptr, ops, lb, slot0, (length + 63) // 64, hv, HV, gl.constexpr(False))),
        ],
        [4, 1],
        [232, 32],
    )  # fmt: skip

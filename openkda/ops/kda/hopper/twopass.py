"""The Hopper forward as two kernels: chunk-parallel factors, then a scan that only multiplies.

    prepare   every (chunk, head) by itself, three CTAs an SM    q, k, g -> Kt, Qt, Kh, T, M, decay   (workspace)
    scan      a CTA per (sequence, head), two state warpgroups   v, workspace -> o, final state
              and a loading warp, two stages

Eight more token tensors of traffic than the fused kernel, but the factors, which are what limits the fused kernel,
use every SM however few the heads. The workspace is 65 KB per chunk and head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from openkda.ops.kda.hopper.factors import (  # fmt: skip
    F1,
    FLAT1,
    FR,
    LOG2E,
    M2,
    M3,
    S64,
    W,
    _clean,
    _column_slice,
    _ex2,
    _gates,
    _rcp,
    _rsqrt,
    _scaled,
    _scores,
    _scores_to_operands,
    _square_norm,
    _sum,
    _tile_factors,
)
from openkda.ops.kda.hopper.forward import S128, _bars, _load_beta, _work_buffers, state_partition

LSEQ = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _chunks_before(cu_ptr, n_seqs, NP: gl.constexpr):
    """Per sequence of a pack: chunks up to and including it."""
    i = gl.arange(0, NP, layout=LSEQ)
    start = gl.load(cu_ptr + i, mask=i < n_seqs, other=0).to(gl.int32)
    stop = gl.load(cu_ptr + i + 1, mask=i < n_seqs, other=0).to(gl.int32)
    return gl.associative_scan((stop - start + 63) // 64, 0, _sum)


@gluon.jit
def _by_length(cu_ptr, n_seqs, rank, NP: gl.constexpr):
    """The sequence with the rank-th largest length: long ones start first, so that none is left over at the end."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    i = gl.arange(0, NP, layout=gl.SliceLayout(1, L))
    j = gl.arange(0, NP, layout=gl.SliceLayout(0, L))
    mine = gl.load(cu_ptr + i + 1, mask=i < n_seqs, other=-1) - gl.load(cu_ptr + i, mask=i < n_seqs, other=0)
    theirs = gl.load(cu_ptr + j + 1, mask=j < n_seqs, other=-1) - gl.load(cu_ptr + j, mask=j < n_seqs, other=0)
    longer = (theirs[None, :] > mine[:, None]) | ((theirs[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
    place = gl.sum(longer.to(gl.int32), axis=1)
    return gl.sum(gl.where(place == rank, i, 0), axis=0)


@gluon.jit
def _prepare_chunk(
    q_desc, k_desc, g_desc, kt_desc, qt_desc, kh_desc, tt_desc, m_desc, dec_ptr, beta_ptr, a_log_ptr, dt_ptr,
    slot, row0, n, hq, hv, HV, scale, bound,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], S64)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], S64)
    g_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], S64)
    kc_s, cb_s, t_s, xb_s, fk_s, ck_s, c2_s, b_s = _work_buffers()
    full = _bars(2, 1)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.expect(full.index(0), 16384)
    tma.async_copy_global_to_shared(g_desc, [row0, hv * 128], full.index(0), g_s)
    mbarrier.expect(full.index(1), 32768)
    tma.async_copy_global_to_shared(q_desc, [row0, hq * 128], full.index(1), q_s)
    tma.async_copy_global_to_shared(k_desc, [row0, hq * 128], full.index(1), k_s)
    chan = gl.arange(0, 128, layout=F1)
    c1 = -gl.exp(gl.load(a_log_ptr + hv).to(gl.float32)) * LOG2E
    c2_s.store(gl.load(dt_ptr + hv * 128 + chan).to(gl.float32) * c1)
    beta = _load_beta(beta_ptr, row0, n, hv, HV)
    b_s.store(_rcp(1.0 + _ex2(-LOG2E * beta.to(gl.float32))))
    ws = slot * HV + hv

    mbarrier.wait(full.index(0), 0)
    if n < 64:
        _clean(g_s, n, -3.0e38)
    _gates(g_s, c2_s, t_s, c1, bound * LOG2E)
    mbarrier.wait(full.index(1), 0)
    if n < 64:
        _clean(k_s, n, 0.0)
        _clean(q_s, n, 0.0)
    rq = scale * _rsqrt(_square_norm(q_s) + 1e-6)
    rk = _rsqrt(_square_norm(k_s) + 1e-6)
    dec = _tile_factors(t_s, xb_s, fk_s, ck_s)
    gl.store(dec_ptr + ws.to(gl.int64) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, FR)), dec)
    for s in gl.static_range(2):
        _column_slice(g_s, k_s, rk, kc_s, s)
    # Operands replace the raw tiles slice by slice; a warp reads and writes its own 16 rows only.
    kt_s = k_s._reinterpret(gl.float16, [64, 128], S64)
    qt_s = q_s._reinterpret(gl.float16, [64, 128], S64)
    acc = _scores((q_s, k_s, g_s), rq, rk, (kc_s, cb_s, t_s, xb_s, fk_s), kt_s, qt_s)
    for s in gl.static_range(2):
        col = kc_s.slice(W * s, W, dim=1).load(M2).reshape([4, 16, W])
        col = gl.convert_layout(col, M3, assert_trivial=True)
        ck = ck_s.slice(W * s, W, dim=1).load(gl.SliceLayout(1, M3))[:, None, :]
        col = gl.convert_layout(_scaled(col, ck).reshape([64, W]), M2, assert_trivial=True)
        kc_s.slice(W * s, W, dim=1).store(col)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(kt_desc, [ws * 64, 0], kt_s)
    tma.async_copy_shared_to_global(kh_desc, [ws * 64, 0], kc_s)
    tma.async_copy_shared_to_global(qt_desc, [ws * 64, 0], qt_s)
    tma.store_wait(0)
    gl.thread_barrier()
    pair = q_s._reinterpret(gl.float16, [2, 64, 64], S64)
    _scores_to_operands(acc, b_s, pair.index(0), pair.index(1), g_s._reinterpret(gl.float16, [4, 64, 32], S64))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(m_desc, [ws * 64, 0], pair.index(0))
    tma.async_copy_shared_to_global(tt_desc, [ws * 64, 0], pair.index(1))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "n_seqs"])
def kda_prepare_kernel(
    q_desc, k_desc, g_desc, kt_desc, qt_desc, kh_desc, tt_desc, m_desc, dec_ptr, beta_ptr, a_log_ptr, dt_ptr, cu_ptr,
    HV, groups, T, n_seqs, scale, bound, VARLEN: gl.constexpr, NP: gl.constexpr,
):  # fmt: skip
    """Factors of one chunk and value head; heads fastest, so that neighbours read neighbouring memory."""
    pid = gl.program_id(0)
    slot = pid // HV
    hv = pid % HV
    hq = hv // groups
    if VARLEN:
        upto = _chunks_before(cu_ptr, n_seqs, NP)
        seq = gl.sum((upto <= slot).to(gl.int32), axis=0)
        if seq < n_seqs:
            first = gl.max(gl.where(upto <= slot, upto, 0), axis=0)
            start = gl.load(cu_ptr + seq).to(gl.int32)
            stop = gl.load(cu_ptr + seq + 1).to(gl.int32)
            row0 = start + (slot - first) * 64
            _prepare_chunk(
                q_desc,
                k_desc,
                g_desc,
                kt_desc,
                qt_desc,
                kh_desc,
                tt_desc,
                m_desc,
                dec_ptr,
                beta_ptr,
                a_log_ptr,
                dt_ptr,
                slot,
                row0,
                stop - row0,
                hq,
                hv,
                HV,
                scale,
                bound,
            )
    else:
        per = (T + 63) // 64
        c = slot % per
        _prepare_chunk(
            q_desc, k_desc, g_desc, kt_desc, qt_desc, kh_desc, tt_desc, m_desc, dec_ptr, beta_ptr, a_log_ptr,
            dt_ptr, slot, slot // per * T + c * 64, T - c * 64, hq, hv, HV, scale, bound,
        )  # fmt: skip


@gluon.jit
def _load_partition(kt_desc, qt_desc, kh_desc, tt_desc, m_desc, dec_ptr, ops, bars, slot0, chunks, hv, HV, OUTPUT: gl.constexpr
):  # fmt: skip
    """One warp that keeps two chunks of operands in flight."""
    kt_s, qt_s, kh_s, dec_s, tt_s, m_s = ops
    kq_ready, kh_ready, kh_free, tm_ready, free = bars
    L: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i = gl.arange(0, 128, layout=L)
    for c in range(chunks):
        st = c & 1
        used = ((c >> 1) & 1) ^ 1
        ws = (slot0 + c) * HV + hv
        dec = gl.load(dec_ptr + ws.to(gl.int64) * 128 + i)
        mbarrier.wait(free.index(st), used)
        mbarrier.expect(kq_ready.index(st), 32768 if OUTPUT else 16384)
        tma.async_copy_global_to_shared(kt_desc, [ws * 64, 0], kq_ready.index(st), kt_s.index(st))
        mbarrier.expect(tm_ready.index(st), 16384 if OUTPUT else 8192)
        tma.async_copy_global_to_shared(tt_desc, [ws * 64, 0], tm_ready.index(st), tt_s.index(st))
        if OUTPUT:
            tma.async_copy_global_to_shared(qt_desc, [ws * 64, 0], kq_ready.index(st), qt_s.index(st))
            tma.async_copy_global_to_shared(m_desc, [ws * 64, 0], tm_ready.index(st), m_s.index(st))
        mbarrier.wait(kh_free.index(st), used)
        mbarrier.expect(kh_ready.index(st), 16384)
        tma.async_copy_global_to_shared(kh_desc, [ws * 64, 0], kh_ready.index(st), kh_s.index(st))
        dec_s.index(st).store(dec)
        gl.thread_barrier()
        mbarrier.arrive(kh_ready.index(st), count=1)


@gluon.jit(do_not_specialize=["T", "rows", "n_seqs"])
def kda_scan_kernel(
    kt_desc, qt_desc, kh_desc, tt_desc, m_desc, v_desc, o_desc, dec_ptr, o_ptr, s0_ptr, st_ptr, cu_ptr,
    HV, T, rows, n_seqs,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, VARLEN: gl.constexpr, NP: gl.constexpr, SPLIT: gl.constexpr,
    VALUES: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """State recurrence of one (sequence, value head) over prepared chunks; SPLIT: of half its value channels.

    Without VARLEN every range has T tokens, the last one those that are left of `rows`.
    """
    pid = gl.program_id(0)
    half = 0
    if SPLIT:
        half = pid & 1
        pid = pid >> 1
    seq = pid // HV
    hv = pid % HV
    if VARLEN:
        if NP <= 64:
            seq = _by_length(cu_ptr, n_seqs, seq, NP)
        upto = _chunks_before(cu_ptr, n_seqs, NP)
        order = gl.arange(0, NP, layout=LSEQ)
        slot0 = gl.max(gl.where(order < seq, upto, 0), axis=0)
        row0 = gl.load(cu_ptr + seq).to(gl.int32)
        length = gl.load(cu_ptr + seq + 1).to(gl.int32) - row0
    else:
        slot0 = seq * ((T + 63) // 64)
        row0 = seq * T
        length = gl.minimum(T, rows - row0)
    kt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    qt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    kh_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    dec_s = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT1)
    tt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S64)
    m_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S64)
    v0_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], S128)
    users: gl.constexpr = 1 if SPLIT else 2
    kq_ready = _bars(2, 1)
    tm_ready = _bars(2, 1)
    kh_ready = _bars(2, 2)
    free = _bars(2, users)
    kh_free = _bars(2, users)
    v0_full = _bars(2, 1)
    ops = (kt_s, qt_s, kh_s, dec_s, tt_s, m_s)
    sb0 = (v0_full, kq_ready, kh_ready, kh_free, tm_ready, free)
    lb = (kq_ready, kh_ready, kh_free, tm_ready, free)
    chunks = (length + 63) // 64
    if SPLIT:
        fence_async_shared()
        gl.warp_specialize(
            [
                (state_partition, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v0_s, ops, sb0, row0, length, seq, hv, HV,
                                   half, STATE_IN, STATE_OUT, gl.constexpr(2), VALUES, OUTPUT)),
                (_load_partition, (kt_desc, qt_desc, kh_desc, tt_desc, m_desc, dec_ptr, ops, lb, slot0, chunks, hv, HV,
                                   OUTPUT)),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        v1_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], S128)
        v1_full = _bars(2, 1)
        sb1 = (v1_full, kq_ready, kh_ready, kh_free, tm_ready, free)
        fence_async_shared()
        gl.warp_specialize(
            [
                (state_partition, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v0_s, ops, sb0, row0, length, seq, hv, HV,
                                   0, STATE_IN, STATE_OUT, gl.constexpr(2), VALUES, OUTPUT)),
                (state_partition, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v1_s, ops, sb1, row0, length, seq, hv, HV,
                                   1, STATE_IN, STATE_OUT, gl.constexpr(2), VALUES, OUTPUT)),
                (_load_partition, (kt_desc, qt_desc, kh_desc, tt_desc, m_desc, dec_ptr, ops, lb, slot0, chunks, hv, HV,
                                   OUTPUT)),
            ],
            [4, 1],
            [216, 32],
        )  # fmt: skip

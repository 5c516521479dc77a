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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openkda.ops.kda.hopper.factors import (  # fmt: skip
    F1,
    FLAT1,
    FLAT2,
    FLAT3,
    FR,
    LOG2E,
    S64,
    _clean,
    _columns,
    _ex2,
    _gates,
    _invert_tiles,
    _masked,
    _merge_tiles,
    _rcp,
    _rescale_columns,
    _rsqrt,
    _scores,
    _square_norm,
    _store_m,
    _store_t,
    _sum,
    _tile_factors,
)
from openkda.ops.kda.hopper.forward import (  # fmt: skip
    A_S,
    A_T,
    ACC_S,
    ACC_T,
    S128,
    _bars,
    _load_beta,
    _row_scale,
    _stage_output,
    _state_offsets,
    _values,
    _write_output,
    state_partition,
)

PIPELINED = gl.constexpr(2)
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
def _write_ranks(ranks_ptr, cu_ptr, n_seqs, mine, NP: gl.constexpr):
    """The pack's sequences, longest first, that none is left over at the end: (sequence, first slot, first row, length).
    Then the counter of the scan's tickets. One program does it."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]) if NP <= 64 else LSEQ
    LI: gl.constexpr = gl.SliceLayout(1, L) if NP <= 64 else LSEQ
    if mine:
        i = gl.arange(0, NP, layout=LI)
        start = gl.load(cu_ptr + i, mask=i < n_seqs, other=0).to(gl.int32)
        length = gl.load(cu_ptr + i + 1, mask=i < n_seqs, other=0).to(gl.int32) - start
        first = gl.convert_layout(_chunks_before(cu_ptr, n_seqs, NP), LI) - (length + 63) // 64
        place = i
        if NP <= 64:
            j = gl.arange(0, NP, layout=gl.SliceLayout(0, L))
            other = gl.load(cu_ptr + j + 1, mask=j < n_seqs, other=-1) - gl.load(cu_ptr + j, mask=j < n_seqs, other=0)
            other = other.to(gl.int32)
            longer = (other[None, :] > length[:, None]) | (
                (other[None, :] == length[:, None]) & (j[None, :] < i[:, None])
            )
            place = gl.sum(longer.to(gl.int32), axis=1)
        at = ranks_ptr + place * 4
        gl.store(at, i, mask=i < n_seqs)
        gl.store(at + 1, first, mask=i < n_seqs)
        gl.store(at + 2, start, mask=i < n_seqs)
        gl.store(at + 3, length, mask=i < n_seqs)
        gl.store(ranks_ptr + 4 * NP, 0)


@gluon.jit
def _locate(item, upto, cu_ptr, HV, T, VARLEN: gl.constexpr):
    """Slot, value head, first row and rows left of a work item; heads fastest: neighbours read neighbouring memory."""
    slot = item // HV
    hv = item % HV
    if VARLEN:
        seq = gl.sum((upto <= slot).to(gl.int32), axis=0)
        first = gl.max(gl.where(upto <= slot, upto, 0), axis=0)
        start = gl.load(cu_ptr + seq).to(gl.int32)
        row0 = start + (slot - first) * 64
        n = gl.load(cu_ptr + seq + 1).to(gl.int32) - row0
    else:
        per = (T + 63) // 64
        c = slot % per
        row0 = slot // per * T + c * 64
        n = T - c * 64
    return slot, hv, row0, n


@gluon.jit
def _store_quarters(tm_desc, ws, tm_s):
    """The three quarters of T and of M that are not zero; tm_s: M, T."""
    q_s = tm_s._reinterpret(gl.float16, [8, 32, 32], S64)
    tma.async_copy_shared_to_global(tm_desc, [ws * 192, 0], q_s.index(4))
    tma.async_copy_shared_to_global(tm_desc, [ws * 192 + 32, 0], q_s.index(5))
    tma.async_copy_shared_to_global(tm_desc, [ws * 192 + 64, 0], q_s.index(7))
    tma.async_copy_shared_to_global(tm_desc, [ws * 192 + 96, 0], q_s.index(0))
    tma.async_copy_shared_to_global(tm_desc, [ws * 192 + 128, 0], q_s.index(1))
    tma.async_copy_shared_to_global(tm_desc, [ws * 192 + 160, 0], q_s.index(3))


@gluon.jit
def _prepare_chunk(
    q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, beta_ptr, a_log_ptr, dt_ptr,
    slot, hv, row0, n, groups, HV, scale, bound,
):  # fmt: skip
    """Factors of one chunk and value head. What each tile of shared memory holds, in this order:

    g      g   decays                   M, T -> memory
    k      k              Kt -> memory
    q      q              Qt -> memory
    kc     keys to tile ends  Kh -> memory
    rest   sums                         inversion
    """
    q_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], S64)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], S64)
    g_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], S64)
    kc_s = gl.allocate_shared_memory(gl.float16, [64, 128], S64)
    ab_s = gl.allocate_shared_memory(gl.float16, [64, 32], S64)
    sums_s = gl.allocate_shared_memory(gl.float16, [64, 32], S64)
    ck_s = gl.allocate_shared_memory(gl.float16, [2, 4, 64], FLAT2)
    e1_s = gl.allocate_shared_memory(gl.float16, [4, 32], FLAT1)
    c2_s = gl.allocate_shared_memory(gl.float32, [128], FLAT1)
    b_s = gl.allocate_shared_memory(gl.float32, [64], FLAT1)
    t_s = sums_s._reinterpret(gl.float32, [2, 4, 128], FLAT2).index(0)
    xb_s = sums_s._reinterpret(gl.float16, [4, 4, 128], FLAT2).index(2)._reinterpret(gl.float16, [4, 4, 32], FLAT2)
    fk_s = sums_s._reinterpret(gl.float16, [4, 4, 128], FLAT2).index(3)._reinterpret(gl.float16, [4, 4, 32], FLAT2)
    xp_s = sums_s._reinterpret(gl.float16, [2, 4, 16, 16], FLAT3)
    lt_s = ab_s._reinterpret(gl.float32, [16, 4, 16], FLAT2)
    kt_s = k_s._reinterpret(gl.float16, [64, 128], S64)
    qt_s = q_s._reinterpret(gl.float16, [64, 128], S64)
    tm_s = g_s._reinterpret(gl.float16, [2, 64, 64], S64)
    full = _bars(2, 1)
    fence_async_shared()
    gl.thread_barrier()
    hq = hv // groups
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
    dec = _tile_factors(t_s, xb_s, fk_s, ck_s, e1_s)
    gl.store(dec_ptr + ws.to(gl.int64) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, FR)), dec)
    _columns(g_s, k_s, rk, kc_s, kc_s, ck_s, gl.constexpr(False))
    # Operands replace the raw tiles slice by slice; a warp reads and writes its own 16 rows only.
    acc = _scores((q_s, k_s, g_s), rq, rk, (kc_s, e1_s, xb_s, fk_s), kt_s, qt_s)
    _rescale_columns(kc_s, ck_s)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(x_desc, [ws * 192, 0], kt_s)
    tma.async_copy_shared_to_global(x_desc, [ws * 192 + 64, 0], qt_s)
    tma.async_copy_shared_to_global(x_desc, [ws * 192 + 128, 0], kc_s)
    low, m = _masked(acc, b_s)
    _store_m(tm_s.index(0), m[0], m[1])
    _invert_tiles(low[0], lt_s, xp_s.index(0))
    gl.thread_barrier()
    th, far = _merge_tiles(low[1], low[2], xp_s.index(0), xp_s.index(1), ab_s, sums_s)
    _store_t(tm_s.index(1), th, far, b_s)
    fence_async_shared()
    gl.thread_barrier()
    _store_quarters(tm_desc, ws, tm_s)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "n_seqs"])
def kda_prepare_kernel(
    q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, ranks_ptr, beta_ptr, a_log_ptr, dt_ptr, cu_ptr,
    HV, groups, T, n_seqs, scale, bound, VARLEN: gl.constexpr, NP: gl.constexpr, LAST_FIRST: gl.constexpr,
):  # fmt: skip
    """Factors of one chunk and value head, three programs an SM.

    LAST_FIRST: the scan begins with what was written last, which the L2 cache still holds.
    """
    item = gl.program_id(0)
    if LAST_FIRST:
        item = gl.num_programs(0) - 1 - item
    if VARLEN:
        upto = _chunks_before(cu_ptr, n_seqs, NP)
        _write_ranks(ranks_ptr, cu_ptr, n_seqs, item == 0, NP)
        if item < gl.max(upto, axis=0) * HV:
            slot, hv, row0, n = _locate(item, upto, cu_ptr, HV, T, VARLEN)
            _prepare_chunk(
                q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, beta_ptr, a_log_ptr, dt_ptr, slot, hv, row0, n,
                groups, HV, scale, bound,
            )  # fmt: skip
    else:
        slot, hv, row0, n = _locate(item, 0, cu_ptr, HV, T, VARLEN)
        _prepare_chunk(
            q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, beta_ptr, a_log_ptr, dt_ptr, slot, hv, row0, n,
            groups, HV, scale, bound,
        )  # fmt: skip


@gluon.jit
def _load_partition(
    x_desc, tm_desc, dec_ptr, ops, bars, slot0, chunks, hv, HV, STAGES: gl.constexpr, OUTPUT: gl.constexpr, before=0,
):  # fmt: skip
    """One warp that keeps STAGES chunks of operands in flight; without OUTPUT neither Qt nor M."""
    kt_s, qt_s, kh_s, dec_s, tt_s, m_s = ops
    kq_ready, kh_ready, kh_free, tm_ready, free = bars
    L: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i = gl.arange(0, 128, layout=L)
    t_q = tt_s._reinterpret(gl.float16, [4 * STAGES, 32, 32], S64)
    m_q = m_s._reinterpret(gl.float16, [4 * STAGES, 32, 32], S64)
    for c in range(chunks):
        st = (before + c) % STAGES
        used = (((before + c) // STAGES) & 1) ^ 1
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
def _zero_quarters(s, STAGES: gl.constexpr):
    """The upper right quarter of T or M is never copied."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    quarters = s._reinterpret(gl.float16, [4 * STAGES, 32, 32], S64)
    for st in gl.static_range(STAGES):
        quarters.index(4 * st + 2).store(gl.full([32, 32], 0.0, gl.float16, L))


@gluon.jit
def scan_partition(
    v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v_s, ops, bars, row0, length, n_seq, hv, HV, half,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, before=0,
):  # fmt: skip
    """`state_partition` of the scan, with registers to spare: a chunk's output leaves while the next one's R is computed.

    tensor   R ........ U . O ........ S ..... O ..
    threads  output c-1   decay S        wait
                                                 scale S, v
    """
    kt_s, qt_s, kh_s, dec_s, tt_s, m_s = ops
    v_full, kq_ready, kh_ready, kh_free, tm_ready, free = bars
    chunks = (length + 63) // 64
    col0 = hv * 128 + half * 64
    zeros = gl.zeros([64, 128], gl.float32, ACC_S)
    s = gl.load(s0_ptr + _state_offsets(n_seq * HV + hv, half)) if STATE_IN == 1 else zeros
    inv = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, ACC_S))
    zero = gl.zeros([64, 64], gl.float32, ACC_T)
    o = zero
    some = length > 0
    mbarrier.expect(v_full.index(before % 3), 8192, pred=some)
    tma.async_copy_global_to_shared(v_desc, [row0, col0], v_full.index(before % 3), v_s.index(before % 3), pred=some)
    for c in range(chunks):
        b = before + c
        st = b & 1
        phase = (b >> 1) & 1
        n = length - c * 64
        v_c = v_s.index(b % 3)
        more = c + 1 < chunks
        tma.store_wait(0)  # the output that left from the next values' buffer
        mbarrier.expect(v_full.index((b + 1) % 3), 8192, pred=more)
        tma.async_copy_global_to_shared(
            v_desc, [row0 + (c + 1) * 64, col0], v_full.index((b + 1) % 3), v_s.index((b + 1) % 3), pred=more
        )
        mbarrier.wait(v_full.index(b % 3), (b // 3) & 1)
        if n < 64:
            _clean(v_c, n, 0.0)
        v_max = gl.max(gl.abs(_values(v_c)), axis=1)
        sc, inv_new = _row_scale(s, v_max, inv)
        s = s * (sc * inv)[:, None]
        mbarrier.wait(kq_ready.index(st), phase)
        a = gl.convert_layout(s.to(gl.float16), A_T)
        r = warpgroup_mma(a, kt_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
        if c > 0:
            v_p = v_s.index((b + 2) % 3)
            _stage_output(o, inv, v_p)
            _write_output(o_desc, o_ptr, v_p, row0 + (c - 1) * 64, col0, 64, HV)
        inv = inv_new
        sc_t = gl.convert_layout(sc, gl.SliceLayout(1, ACC_T))[:, None]
        r = warpgroup_mma_wait(0, deps=[r])
        r = _values(v_c) * sc_t - r
        ar = gl.convert_layout(r.to(gl.float16), A_T)
        mbarrier.wait(tm_ready.index(st), phase)
        u = warpgroup_mma(ar, tt_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
        o = warpgroup_mma(a, qt_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(kh_ready.index(st), phase)
        s = s * dec_s.index(st).load(gl.SliceLayout(0, ACC_S))[None, :]
        u = warpgroup_mma_wait(1, deps=[u])
        u16 = u.to(gl.float16)
        s = warpgroup_mma(gl.convert_layout(u16, A_S), kh_s.index(st), s, is_async=True)
        o = warpgroup_mma(gl.convert_layout(u16, A_T), m_s.index(st).permute((1, 0)), o, is_async=True)
        s, o = warpgroup_mma_wait(0, deps=[s, o])
        gl.thread_barrier()
        mbarrier.arrive(free.index(st), count=1)
        mbarrier.arrive(kh_free.index(st), count=1)
    if some:
        v_p = v_s.index((before + chunks - 1) % 3)
        _stage_output(o, inv, v_p)
        _write_output(o_desc, o_ptr, v_p, row0 + (chunks - 1) * 64, col0, length - (chunks - 1) * 64, HV)
    tma.store_wait(0)
    if STATE_OUT:
        gl.store(st_ptr + _state_offsets(n_seq * HV + hv, half), s * inv[:, None])


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
    mbarrier.expect(v_full.index(f), 8192, pred=pred)
    tma.async_copy_global_to_shared(v_desc, [row, col0], v_full.index(f), v_s.index(f), pred=pred)


@gluon.jit
def rotated_partition(
    v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v_s, ops, bars, row0, length, n_seq, hv, HV, half,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, VALUES: gl.constexpr, OUTPUT: gl.constexpr, before=0,
):  # fmt: skip
    """Warpgroup that carries 64 value rows of the transposed state through prepared chunks, in registers. Nothing but
    R, U and S is in the chain from state to state:

        tensor   R ........ U ..... S ..... O ............
        threads  output c-1   decay S   u     scale S for c+1

    v_s: four tiles, for values on their way, values, outputs and outputs on their way. STATE_IN: 0 zeros, 1 from s0_ptr,
    2 the identity. VALUES=False takes v = 0, OUTPUT=False writes no o: from the identity the two give the transition
    matrix of the whole range. before: chunks that went through the buffers earlier.
    """
    kt_s, qt_s, kh_s, dec_s, tt_s, m_s = ops
    v_full, kq_ready, kh_ready, kh_free, tm_ready, free = bars
    chunks = (length + 63) // 64
    col0 = hv * 128 + half * 64
    if STATE_IN == 1:
        s = gl.load(s0_ptr + _state_offsets(n_seq * HV + hv, half))
    elif STATE_IN == 2:
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_S)) + half * 64
        s = gl.where(i[:, None] == gl.arange(0, 128, layout=gl.SliceLayout(0, ACC_S))[None, :], 1.0, 0.0)
    else:
        s = gl.zeros([64, 128], gl.float32, ACC_S)
    inv = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, ACC_S))
    zero = gl.zeros([64, 64], gl.float32, ACC_T)
    if length > 0:
        if VALUES:
            _fetch_values(v_desc, v_full, v_s, row0, col0, before, True)
            _fetch_values(v_desc, v_full, v_s, row0 + 64, col0, before + 1, chunks > 1)
            mbarrier.wait(v_full.index(before & 3), (before >> 2) & 1)
        o = zero
        old = inv
        s, a, sc, inv = _enter(s, inv, v_s.index(before & 3), length, VALUES)
        for c in range(chunks):
            b = before + c
            st = b & 1
            phase = (b >> 1) & 1
            v_c = v_s.index(b & 3)
            mbarrier.wait(kq_ready.index(st), phase)
            r = warpgroup_mma(a, kt_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
            if OUTPUT:  # noqa: SIM102 (a constant: the copy without it is not compiled)
                if c > 0:
                    v_p = v_s.index((b - 1) & 3)
                    _stage_output(o, old, v_p)
                    _write_output(o_desc, o_ptr, v_p, row0 + (c - 1) * 64, col0, 64, HV)
            r = warpgroup_mma_wait(0, deps=[r])
            r = _values(v_c) * gl.convert_layout(sc, gl.SliceLayout(1, ACC_T))[:, None] - r if VALUES else -r
            ar = gl.convert_layout(r.to(gl.float16), A_T)
            mbarrier.wait(tm_ready.index(st), phase)
            u = warpgroup_mma(ar, tt_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(kh_ready.index(st), phase)
            s = s * dec_s.index(st).load(gl.SliceLayout(0, ACC_S))[None, :]
            u = warpgroup_mma_wait(0, deps=[u])
            u16 = u.to(gl.float16)
            s = warpgroup_mma(gl.convert_layout(u16, A_S), kh_s.index(st), s, is_async=True)
            if OUTPUT:
                o = warpgroup_mma(a, qt_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
                o = warpgroup_mma(gl.convert_layout(u16, A_T), m_s.index(st).permute((1, 0)), o, is_async=True)
            s = warpgroup_mma_wait(2 if OUTPUT else 0, deps=[s])
            old = inv
            a_next = a
            if c + 1 < chunks:
                if VALUES:
                    mbarrier.wait(v_full.index((b + 1) & 3), ((b + 1) >> 2) & 1)
                s, a_next, sc, inv = _enter(s, inv, v_s.index((b + 1) & 3), length - (c + 1) * 64, VALUES)
            if OUTPUT:
                o = warpgroup_mma_wait(0, deps=[o])
                tma.store_wait(0)  # the output of chunk c - 1: its tile is free
            a = a_next
            gl.thread_barrier()
            mbarrier.arrive(free.index(st), count=1)
            mbarrier.arrive(kh_free.index(st), count=1)
            if VALUES:
                _fetch_values(v_desc, v_full, v_s, row0 + (c + 2) * 64, col0, b + 2, c + 2 < chunks)
        if OUTPUT:
            v_p = v_s.index((before + chunks - 1) & 3)
            _stage_output(o, old, v_p)
            _write_output(o_desc, o_ptr, v_p, row0 + (chunks - 1) * 64, col0, length - (chunks - 1) * 64, HV)
            tma.store_wait(0)
    if STATE_OUT:
        gl.store(st_ptr + _state_offsets(n_seq * HV + hv, half), s * inv[:, None])


@gluon.jit
def _state(
    v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v_s, ops, bars, row0, length, n_seq, hv, HV, half,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, before=0,
):  # fmt: skip
    if PIPELINED == 2:
        rotated_partition(v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v_s, ops, bars, row0, length, n_seq, hv, HV, half,
                          STATE_IN, STATE_OUT, gl.constexpr(True), gl.constexpr(True), before)  # fmt: skip
    elif PIPELINED == 1:
        scan_partition(v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v_s, ops, bars, row0, length, n_seq, hv, HV, half,
                       STATE_IN, STATE_OUT, before)  # fmt: skip
    else:
        state_partition(v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v_s, ops, bars, row0, length, n_seq, hv, HV, half,
                        STATE_IN, STATE_OUT, gl.constexpr(2), gl.constexpr(True), gl.constexpr(True), before)  # fmt: skip


@gluon.jit(do_not_specialize=["T", "rows", "n_seqs"])
def kda_scan_kernel(
    x_desc, tm_desc, v_desc, o_desc, dec_ptr, o_ptr, s0_ptr, st_ptr, cu_ptr, HV, T, rows, n_seqs,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, VARLEN: gl.constexpr, NP: gl.constexpr, SPLIT: gl.constexpr,
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
    v0_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
    users: gl.constexpr = 1 if SPLIT else 2
    kq_ready = _bars(2, 1)
    tm_ready = _bars(2, 1)
    kh_ready = _bars(2, 2)
    free = _bars(2, users)
    kh_free = _bars(2, users)
    v0_full = _bars(4, 1)
    ops = (kt_s, qt_s, kh_s, dec_s, tt_s, m_s)
    sb0 = (v0_full, kq_ready, kh_ready, kh_free, tm_ready, free)
    lb = (kq_ready, kh_ready, kh_free, tm_ready, free)
    chunks = (length + 63) // 64
    _zero_quarters(tt_s, 2)
    _zero_quarters(m_s, 2)
    if SPLIT:
        fence_async_shared()
        gl.warp_specialize(
            [
                (_state, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v0_s, ops, sb0, row0, length, seq, hv, HV,
                                   half, STATE_IN, STATE_OUT)),
                (_load_partition, (x_desc, tm_desc, dec_ptr, ops, lb, slot0, chunks, hv, HV,
                                   gl.constexpr(2), gl.constexpr(True))),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        v1_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
        v1_full = _bars(4, 1)
        sb1 = (v1_full, kq_ready, kh_ready, kh_free, tm_ready, free)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_state, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v0_s, ops, sb0, row0, length, seq, hv, HV,
                                   0, STATE_IN, STATE_OUT)),
                (_state, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v1_s, ops, sb1, row0, length, seq, hv, HV,
                                   1, STATE_IN, STATE_OUT)),
                (_load_partition, (x_desc, tm_desc, dec_ptr, ops, lb, slot0, chunks, hv, HV,
                                   gl.constexpr(2), gl.constexpr(True))),
            ],
            [4, 1],
            [232, 32],
        )  # fmt: skip


LINFO1 = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
LINFO4 = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def _entry(x, i: gl.constexpr, L: gl.constexpr):
    """Element i of four as a scalar."""
    return gl.sum(gl.where(gl.arange(0, 4, layout=L) == i, x, 0), axis=0)


@gluon.jit
def _walking_loads(
    x_desc, tm_desc, dec_ptr, ranks_ptr, ops, bars, next_s, next_full, next_free, chains, HV, NP: gl.constexpr,
):  # fmt: skip
    """The loading warp draws chains, announces them to the states and goes on to their operands."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    i = gl.arange(0, 4, layout=LINFO1)
    ticket = gl.program_id(0)
    turn = 0
    before = 0
    going = 1
    while going != 0:
        going = (ticket < chains).to(gl.int32)
        hv = ticket % HV
        entry = gl.load(ranks_ptr + gl.minimum(ticket // HV, NP - 1) * 4 + i, mask=i < 4 * going, other=-1)
        mbarrier.wait(next_free.index(turn & 1), ((turn >> 1) & 1) ^ 1)
        next_s.index(turn & 1).store(gl.where(i == 1, hv, entry))
        gl.thread_barrier()
        mbarrier.arrive(next_full.index(turn & 1), count=1)
        turn += 1
        chunks = (_entry(entry, 3, LINFO1) + 63) // 64
        _load_partition(x_desc, tm_desc, dec_ptr, ops, bars, _entry(entry, 1, LINFO1), chunks, hv, HV, gl.constexpr(2),
                        gl.constexpr(True), before)  # fmt: skip
        before += chunks
        drawn = gl.atomic_add(ranks_ptr + 4 * NP + lane, gl.where(lane == 0, 1, 0), mask=lane == 0)
        ticket = gl.num_programs(0) + gl.sum(gl.where(lane == 0, drawn, 0), axis=0)


@gluon.jit
def _walking_state(
    v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v_s, ops, bars, next_s, next_full, next_free, HV,
    half: gl.constexpr, STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr,
):  # fmt: skip
    turn = 0
    before = 0
    length = 0
    while length >= 0:
        mbarrier.wait(next_full.index(turn & 1), (turn >> 1) & 1)
        entry = next_s.index(turn & 1).load(LINFO4)
        seq = _entry(entry, 0, LINFO4)
        hv = _entry(entry, 1, LINFO4)
        row0 = _entry(entry, 2, LINFO4)
        length = _entry(entry, 3, LINFO4)
        gl.thread_barrier()
        mbarrier.arrive(next_free.index(turn & 1), count=1)
        turn += 1
        if length >= 0:
            _state(v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v_s, ops, bars, row0, length, seq, hv, HV, half,
                   STATE_IN, STATE_OUT, before)  # fmt: skip
        before += (length + 63) // 64


@gluon.jit(do_not_specialize=["chains"])
def kda_scan_pack_kernel(
    x_desc, tm_desc, v_desc, o_desc, dec_ptr, ranks_ptr, o_ptr, s0_ptr, st_ptr, HV, chains,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, NP: gl.constexpr,
):  # fmt: skip
    """The scan for packs: programs stay and draw the next (sequence, value head), longest first, so that its operands
    are on their way while the last one finishes."""
    kt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    qt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    kh_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    dec_s = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT1)
    tt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S64)
    m_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S64)
    v0_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
    v1_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
    next_s = gl.allocate_shared_memory(gl.int32, [2, 4], FLAT1)
    kq_ready = _bars(2, 1)
    tm_ready = _bars(2, 1)
    kh_ready = _bars(2, 2)
    free = _bars(2, 2)
    kh_free = _bars(2, 2)
    v0_full = _bars(4, 1)
    v1_full = _bars(4, 1)
    next_full = _bars(2, 1)
    next_free = _bars(2, 2)
    ops = (kt_s, qt_s, kh_s, dec_s, tt_s, m_s)
    sb0 = (v0_full, kq_ready, kh_ready, kh_free, tm_ready, free)
    sb1 = (v1_full, kq_ready, kh_ready, kh_free, tm_ready, free)
    lb = (kq_ready, kh_ready, kh_free, tm_ready, free)
    _zero_quarters(tt_s, 2)
    _zero_quarters(m_s, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_walking_state, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v0_s, ops, sb0, next_s, next_full, next_free, HV,
                              gl.constexpr(0), STATE_IN, STATE_OUT)),
            (_walking_state, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v1_s, ops, sb1, next_s, next_full, next_free, HV,
                              gl.constexpr(1), STATE_IN, STATE_OUT)),
            (_walking_loads, (x_desc, tm_desc, dec_ptr, ranks_ptr, ops, lb, next_s, next_full, next_free, chains, HV, NP)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "rows"])
def kda_ends_kernel(x_desc, tm_desc, v_desc, dec_ptr, local_ptr, transition_ptr, HV, T, rows):
    """State at the end of every range of T tokens from zero (local), and its transition matrix, side by side: both need
    the same operands. One CTA a (range, value head, half of the value channels)."""
    pid = gl.program_id(0)
    half = pid & 1
    seq = (pid >> 1) // HV
    hv = (pid >> 1) % HV
    row0 = seq * T
    length = gl.minimum(T, rows - row0)
    kt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    kh_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    dec_s = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT1)
    tt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S64)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
    kq_ready = _bars(2, 1)
    tm_ready = _bars(2, 1)
    kh_ready = _bars(2, 2)
    free = _bars(2, 2)
    kh_free = _bars(2, 2)
    v_full = _bars(4, 1)
    ops = (kt_s, kt_s, kh_s, dec_s, tt_s, tt_s)
    bars = (v_full, kq_ready, kh_ready, kh_free, tm_ready, free)
    lb = (kq_ready, kh_ready, kh_free, tm_ready, free)
    slot0 = seq * ((T + 63) // 64)
    _zero_quarters(tt_s, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (rotated_partition, (v_desc, v_desc, local_ptr, local_ptr, local_ptr, v_s, ops, bars, row0, length, seq, hv, HV,
                               half, gl.constexpr(0), gl.constexpr(True), gl.constexpr(True),
                               gl.constexpr(False))),
            (rotated_partition, (v_desc, v_desc, transition_ptr, transition_ptr, transition_ptr, v_s, ops, bars, row0,
                               length, seq, hv, HV, half, gl.constexpr(2), gl.constexpr(True),
                               gl.constexpr(False), gl.constexpr(False))),
            (_load_partition, (x_desc, tm_desc, dec_ptr, ops, lb, slot0, (length + 63) // 64, hv, HV, gl.constexpr(2),
                               gl.constexpr(False))),
        ],
        [4, 1],
        [232, 32],
    )  # fmt: skip

"""First pass of the Hopper forward: the factors of every chunk, each by itself, three programs an SM.

    q, k, g  ->  Kt, Qt, Kh, three quarters of T and M, decay        (workspace: 60.5 KB a chunk and head)

    SM     program | g, q, k come | gates, sums, norms | scaled rows, scores | inversion |
           program       | g, q, k come | gates, sums, norms | scaled rows, scores | inversion |
           program             | g, q, k come | gates, ...
    leave                                                           Kt, Qt   Kh     T, M

Each program waits for its own copies, and the other two compute meanwhile. Eight more token tensors of traffic than the fused
kernel, but the factors, which are what limits that one, use every SM however few the heads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from openkda.ops.kda.hopper.apart import _difference_columns, _last_rows, _marked_norm, are_near, places_in
from openkda.ops.kda.hopper.chains import chunks_before, write_ranks
from openkda.ops.kda.hopper.factors import (
    CUT,
    F1,
    FLAT1,
    FLAT2,
    FLAT3,
    FR,
    M3,
    S64,
    _clean,
    _columns,
    _gates,
    _invert_tiles,
    _load_beta,
    _masked,
    _merge_tiles,
    _rescale_columns,
    _scores,
    _square_norm,
    _store_m,
    _store_t,
    _tile_factors,
    barriers,
)
from openkda.ops.kda.hopper.instructions import LOG2E, _ex2, _rate, _rcp, _rsqrt, end_after_the_kernel_before


@gluon.jit
def _locate(item, upto, cu_ptr, HV, T, VARLEN: gl.constexpr, first=0):
    """Slot, value head, first row and rows left of a work item; heads fastest: neighbours read neighbouring memory. first: the
    token that slot 0 begins at, where one sequence is prepared in windows."""
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
        row0 = slot // per * T + first + c * 64
        n = T - first - c * 64
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
def chunk_tiles():
    """Shared memory of a chunk: q, k, g, keys to tile ends, bias, write strengths; what anchors and the inversion need."""
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
    return q_s, k_s, g_s, kc_s, c2_s, b_s, (t_s, xb_s, fk_s, ck_s, e1_s), (lt_s, xp_s, ab_s, sums_s)


@gluon.jit
def fetch_chunk(q_desc, k_desc, g_desc, q_s, k_s, g_s, row0, hv, groups):
    """Sends for the raw tiles; what to wait for, g, then q and k."""
    full = barriers(2, 1)
    fence_async_shared()
    gl.thread_barrier()
    hq = hv // groups
    mbarrier.expect(full.index(0), 16384)
    tma.async_copy_global_to_shared(g_desc, [row0, hv * 128], full.index(0), g_s)
    mbarrier.expect(full.index(1), 32768)
    tma.async_copy_global_to_shared(q_desc, [row0, hq * 128], full.index(1), q_s)
    tma.async_copy_global_to_shared(k_desc, [row0, hq * 128], full.index(1), k_s)
    return full


@gluon.jit
def store_norms(norm_ptr, rk, rq, n):
    """What keys and queries are multiplied by, of tiles that exist."""
    tile = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, M3)))[:, None]
    at = norm_ptr + (tile * 48 + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, M3)))[None, :])
    gl.store(at, rk, mask=tile * 16 < n)
    gl.store(at + 16, rq, mask=tile * 16 < n)


@gluon.jit
def store_inverse(tm_desc, ws, g_s, low, m, b_s, inversion, full):
    """Inverts what `_masked` left of a chunk and sends T and M, through the tile that held the decays."""
    lt_s, xp_s, ab_s, sums_s = inversion
    tm_s = g_s._reinterpret(gl.float16, [2, 64, 64], S64)
    _store_m(tm_s.index(0), m[0], m[1])
    _invert_tiles(low[0], lt_s, xp_s.index(0))
    gl.thread_barrier()
    th, far = _merge_tiles(low[1], low[2], xp_s.index(0), xp_s.index(1), ab_s, sums_s)
    _store_t(tm_s.index(1), th, far, b_s)
    fence_async_shared()
    gl.thread_barrier()
    _store_quarters(tm_desc, ws, tm_s)
    tma.store_wait(0)
    for i in gl.static_range(2):  # named last here, their memory is nobody else's before: see `factors.barriers`
        mbarrier.invalidate(full.index(i))


@gluon.jit
def first_tile(slot, row0, upto, cu_ptr, T, VARLEN: gl.constexpr):
    """Of a chunk, among the tiles of 16 tokens of a value head (`triton/launch.py` counts them)."""
    if VARLEN:
        seq = gl.sum((upto <= slot).to(gl.int32), axis=0)
        start = gl.load(cu_ptr + seq).to(gl.int32)
        tile = start // 16 + seq + (row0 - start) // 16
    else:
        per = (T + 63) // 64
        tile = slot // per * ((T + 15) // 16) + slot % per * 4
    return tile


@gluon.jit
def _prepare_scores(raw, rq, rk, work, kt_s, qt_s, ck_s, b_s, n, t_s, inversion, NEAR: gl.constexpr):
    """Everything scaled by rows, Kh, and the parts of L and M; NEAR: of keys that are nearly one direction (apart.py)."""
    kc_s = work[0]
    if NEAR:
        marks_s, work_s, rows_s, keys_s = places_in(inversion[2])
        _difference_columns(raw[2], raw[1], rk, b_s, marks_s, kc_s, work_s, keys_s, n)
    # Operands replace the raw tiles slice by slice; a warp reads and writes its own 16 rows only.
    acc = _scores(raw, rq, rk, work, kt_s, qt_s)
    _rescale_columns(kc_s, ck_s)
    if NEAR:
        acc = _last_rows(acc, b_s, t_s.load(FR), work_s, rows_s, keys_s, kc_s, n, CUT)
    return _masked(acc, b_s)


@gluon.jit
def _prepare_chunk(
    q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, beta_ptr, a_log_ptr, dt_ptr,
    slot, hv, row0, n, groups, HV, scale, bound, norm_ptr, NORMS: gl.constexpr = False,
    APART: gl.constexpr = False,
):  # fmt: skip
    """Factors of one chunk and value head; NORMS: and what its keys and queries were multiplied by. What each tile of shared
    memory holds, in this order:

    g      g   decays                   M, T -> memory
    k      k              Kt -> memory
    q      q              Qt -> memory
    kc     keys to tile ends  Kh -> memory
    rest   sums                         inversion
    """
    q_s, k_s, g_s, kc_s, c2_s, b_s, anchors, inversion = chunk_tiles()
    t_s, xb_s, fk_s, ck_s, e1_s = anchors
    kt_s = k_s._reinterpret(gl.float16, [64, 128], S64)
    qt_s = q_s._reinterpret(gl.float16, [64, 128], S64)
    full = fetch_chunk(q_desc, k_desc, g_desc, q_s, k_s, g_s, row0, hv, groups)
    chan = gl.arange(0, 128, layout=F1)
    c1 = -_rate(gl.load(a_log_ptr + hv).to(gl.float32)) * LOG2E
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
    rq = _rsqrt(_square_norm(q_s) + 1e-6)
    if APART:
        marks_s = places_in(inversion[2])[0]
        rk = _rsqrt(_marked_norm(k_s, marks_s) + 1e-6)
    else:
        rk = _rsqrt(_square_norm(k_s) + 1e-6)
    if NORMS:
        store_norms(norm_ptr, rk, rq, n)
    rq = scale * rq
    dec = _tile_factors(t_s.load(FR), xb_s, fk_s, ck_s, e1_s)
    at = dec_ptr + ws.to(gl.int64) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, FR))
    gl.store(at, dec)
    _columns(g_s, k_s, rk, kc_s)
    raw, work = (q_s, k_s, g_s), (kc_s, e1_s, xb_s, fk_s)
    # Two copies, or what is seldom run would stand between what always is.
    if APART:
        if are_near(marks_s, n):
            low, m = _prepare_scores(raw, rq, rk, work, kt_s, qt_s, ck_s, b_s, n, t_s, inversion, gl.constexpr(True))
        else:
            low, m = _prepare_scores(raw, rq, rk, work, kt_s, qt_s, ck_s, b_s, n, t_s, inversion, gl.constexpr(False))
    else:
        low, m = _prepare_scores(raw, rq, rk, work, kt_s, qt_s, ck_s, b_s, n, t_s, inversion, gl.constexpr(False))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(x_desc, [ws * 192, 0], kt_s)
    tma.async_copy_shared_to_global(x_desc, [ws * 192 + 64, 0], qt_s)
    tma.async_copy_shared_to_global(x_desc, [ws * 192 + 128, 0], kc_s)
    store_inverse(tm_desc, ws, g_s, low, m, b_s, inversion, full)


@gluon.jit(do_not_specialize=["T", "n_seqs", "first"])
def kda_prepare_kernel(
    q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, ranks_ptr, beta_ptr, a_log_ptr, dt_ptr, cu_ptr,
    HV, groups, T, n_seqs, first, scale, bound, VARLEN: gl.constexpr, NP: gl.constexpr, LAST_FIRST: gl.constexpr,
    APART: gl.constexpr,
):  # fmt: skip
    """Factors of one chunk and value head, three programs an SM; of tokens `first` on, where one sequence goes in windows.

    LAST_FIRST: the scan begins with what was written last, which the L2 cache still holds.
    """
    item = gl.program_id(0)
    if LAST_FIRST:
        item = gl.num_programs(0) - 1 - item
    if VARLEN:
        upto = chunks_before(cu_ptr, n_seqs, NP)
        if item == 0:
            write_ranks(ranks_ptr, cu_ptr, n_seqs, NP)
        if item < gl.max(upto, axis=0) * HV:
            slot, hv, row0, n = _locate(item, upto, cu_ptr, HV, T, VARLEN)
            _prepare_chunk(
                q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, beta_ptr, a_log_ptr, dt_ptr, slot, hv, row0, n,
                groups, HV, scale, bound, dec_ptr, False, APART,
            )  # fmt: skip
    else:
        slot, hv, row0, n = _locate(item, 0, cu_ptr, HV, T, VARLEN, first)
        _prepare_chunk(
            q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, beta_ptr, a_log_ptr, dt_ptr, slot, hv, row0, n,
            groups, HV, scale, bound, dec_ptr, False, APART,
        )  # fmt: skip
        end_after_the_kernel_before()


@gluon.jit(do_not_specialize=["T", "n_seqs", "tiles"])
def kda_prepare_backward_kernel(
    q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, ranks_ptr, beta_ptr, a_log_ptr, dt_ptr, cu_ptr, norm_ptr,
    HV, groups, T, n_seqs, tiles, scale, bound, VARLEN: gl.constexpr, NP: gl.constexpr,
):  # fmt: skip
    """The same, and norm [HV, tiles, 3, 16], in its first rows what keys and queries were multiplied by; in order of chunks."""
    item = gl.program_id(0)
    upto = 0
    last = 0
    if VARLEN:
        upto = chunks_before(cu_ptr, n_seqs, NP)
        last = gl.max(upto, axis=0) * HV
        if item == 0:
            write_ranks(ranks_ptr, cu_ptr, n_seqs, NP)
    else:
        last = item + 1
    if item < last:
        slot, hv, row0, n = _locate(item, upto, cu_ptr, HV, T, VARLEN)
        tile = first_tile(slot, row0, upto, cu_ptr, T, VARLEN)
        norm_ptr += (hv * tiles + tile).to(gl.int64) * 48
        _prepare_chunk(
            q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, beta_ptr, a_log_ptr, dt_ptr, slot, hv, row0, n, groups, HV,
            scale, bound, norm_ptr, True,
        )  # fmt: skip

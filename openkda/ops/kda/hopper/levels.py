"""Prepared chunks for gates without a bound, softplus or log decays as they come: what `prepare.py` writes, by other scores.

Nothing limits what 16 such tokens forget, so a decay cannot be undone inside a tile. Pairs inside one are grouped instead by
the aligned run of 16, 8, 4 or 2 tokens in whose halves they lie, with the border between the halves as anchor
(`triton/prepare.py`): no exponent is positive, float16 holds every operand, and one product of a tile with itself serves all
runs of a level. Which decays count for a token is a product of the log decays with zeros and ones. Pairs in two tiles are
those of `factors.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from openkda.ops.kda.hopper.apart import _difference_columns, _last_rows, _marked_norm, are_near, places_in
from openkda.ops.kda.hopper.chains import chunks_before, write_ranks
from openkda.ops.kda.hopper.factors import (
    A2H,
    A3H,
    APH,
    B2H,
    B3H,
    BPH,
    F1,
    FR,
    LBR,
    LG,
    LPAIR,
    M2,
    M3,
    MP,
    S64,
    WR,
    _clean,
    _columns,
    _flat,
    _half_view,
    _load_beta,
    _masked,
    _rescale_columns,
    _rows,
    _scaled,
    _square_norm,
    _store_pair,
    _tile_factors,
    _tri,
)
from openkda.ops.kda.hopper.instructions import (
    ALL_NAN,
    LOG2E,
    _ex2,
    _ex2_neg_abs,
    _lg2,
    _rate,
    _rcp,
    _rsqrt,
    end_after_the_kernel_before,
)
from openkda.ops.kda.hopper.prepare import _locate, chunk_tiles, fetch_chunk, first_tile, store_inverse, store_norms

FORGOTTEN = gl.constexpr(-57.7)  # of `ops/triton/api.py`
SOFTPLUS = gl.constexpr(1)
ROW3 = gl.constexpr(gl.SliceLayout(2, M3.value))
I3 = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, M3.value)))
J3 = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, M3.value)))


@gluon.jit
def _decays(g_s, c2_s, t_s, rate, GATE: gl.constexpr):
    """Raw gates to log2 decays in fp16, in place; tile sums go to t_s. The formula of `gradient_tiles._gate`."""
    view = _half_view(g_s)
    x = view.load(LG).to(gl.bfloat16, bitcast=True).to(gl.float32) * LOG2E
    if GATE == SOFTPLUS:
        x += c2_s.load(gl.SliceLayout(0, LG))[None, :]
        e = _ex2_neg_abs(x)
        more = gl.where(e < 0.0009765625, e * (LOG2E - 0.5 * LOG2E * e), _lg2(1.0 + e))
        x = (gl.maximum(x, 0.0, propagate_nan=ALL_NAN) + more) * -rate
    x = gl.maximum(x, FORGOTTEN, propagate_nan=ALL_NAN)
    view.store(x.to(gl.float16))
    t_s.store(gl.sum(x.reshape([4, 16, 128]), axis=1))


@gluon.jit
def _counted(n: gl.constexpr):
    """Of which tokens j the log decay lies between token i and the border of the halves, of n tokens each, of its run."""
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, A3H)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, A3H)))[None, None, :]
    m = (i // n == j // n) & ((j <= i) == (i // n % 2 == 1))
    return gl.where(m, 1.0, 0.0).to(gl.float16) + gl.full([4, 16, 16], 0.0, gl.float16, A3H)


@gluon.jit
def _level(q, k, g16, n: gl.constexpr, low, m):
    """Adds 16 channels to all products of rows and columns decayed to the borders between halves of n tokens."""
    e = _ex2(mma_v2(_counted(n), g16, gl.zeros([4, 16, WR], gl.float32, M3)))
    ke = (k * e).to(gl.float16)
    qe = (q * e).to(gl.float16)
    b = gl.convert_layout(ke.permute((0, 2, 1)), B3H, assert_trivial=True)
    low = mma_v2(gl.convert_layout(ke, A3H, assert_trivial=True), b, low)
    m = mma_v2(gl.convert_layout(qe, A3H, assert_trivial=True), b, m)
    return low, m


@gluon.jit
def _picked(x, n: gl.constexpr):
    """Of a level's products those whose row lies in the second half and whose column lies in the first half of one run."""
    i = gl.arange(0, 16, layout=I3)[None, :, None]
    j = gl.arange(0, 16, layout=J3)[None, None, :]
    return gl.where((i // (2 * n) == j // (2 * n)) & (i // n % 2 == 1) & (j // n % 2 == 0), x, 0.0)


@gluon.jit
def _half_scores(q_s, k_s, g_s, rq, rk, acc, half: gl.constexpr):
    l8, l4, l2, l1, m8, m4, m2, m1, own = acc
    g16 = g_s.slice(WR * half, WR, dim=1).load(LBR).reshape([4, 16, WR])
    g16 = gl.convert_layout(g16, B3H, assert_trivial=True)
    k = _rows(k_s, half, WR) * rk[:, :, None]
    q = _rows(q_s, half, WR) * rq[:, :, None]
    own += gl.sum(q * k, axis=2)  # a token with itself: no decay between
    l8, m8 = _level(q, k, g16, 8, l8, m8)
    l4, m4 = _level(q, k, g16, 4, l4, m4)
    l2, m2 = _level(q, k, g16, 2, l2, m2)
    l1, m1 = _level(q, k, g16, 1, l1, m1)
    return l8, l4, l2, l1, m8, m4, m2, m1, own


@gluon.jit
def _inside_tiles(q_s, k_s, g_s, rq, rk):
    """L and M of all pairs inside a tile, [4, 16, 16]."""
    z = gl.zeros([4, 16, 16], gl.float32, M3)
    acc = (z, z, z, z, z, z, z, z, gl.zeros([4, 16], gl.float32, ROW3))
    for s in range(4):
        q = q_s._reinterpret(gl.bfloat16, [4, 64, 32], S64).index(s)
        k = k_s._reinterpret(gl.bfloat16, [4, 64, 32], S64).index(s)
        g = g_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s)
        acc = _half_scores(q, k, g, rq, rk, acc, 0)
        acc = _half_scores(q, k, g, rq, rk, acc, 1)
    l8, l4, l2, l1, m8, m4, m2, m1, own = acc
    i = gl.arange(0, 16, layout=I3)[None, :, None]
    j = gl.arange(0, 16, layout=J3)[None, None, :]
    low = _picked(l8, 8) + _picked(l4, 4) + _picked(l2, 2) + _picked(l1, 1)
    m = _picked(m8, 8) + _picked(m4, 4) + _picked(m2, 2) + _picked(m1, 1)
    return low, m + gl.where(i == j, own[:, :, None], 0.0)


@gluon.jit
def _between(row_h, xb, kc_b, kc0_b, kc1_b, adj, far0, far1):
    """Adds 16 channels of one row operand to its scores with the tile before and with tiles 0 and 1."""
    a = _flat(row_h).reshape([2, 32, WR])
    adj = mma_v2(gl.convert_layout(a, APH, assert_trivial=True), kc_b, adj)
    a = gl.convert_layout(_flat(_scaled(row_h, xb)), A2H, assert_trivial=True)
    return adj, mma_v2(a, kc0_b, far0), mma_v2(a, kc1_b, far1)


@gluon.jit
def _half_between(g_s, q_s, k_s, rq, rk, kc_s, e1_s, xb_s, fk_s, acc, half: gl.constexpr):
    la, l0, l1, ma, m0, m1 = acc
    at: gl.constexpr = WR * half
    g16 = g_s.slice(at, WR, dim=1).load(LBR).reshape([4, 16, WR])
    g16 = gl.convert_layout(g16, B3H, assert_trivial=True)
    er = _ex2(mma_v2(_tri(False), g16, gl.zeros([4, 16, WR], gl.float32, M3)))
    xb = xb_s.slice(at, WR, dim=1).load(gl.SliceLayout(1, M3))[:, None, :]
    fk = fk_s.slice(at, WR, dim=1).load(gl.SliceLayout(1, M3))[:, None, :]
    kc_b = kc_s.reshape([2, 32, 32]).slice(0, 16, dim=1).slice(at, WR, dim=2).load(LPAIR).permute((0, 2, 1))
    kc_b = gl.convert_layout(kc_b, BPH, assert_trivial=True)
    e1 = e1_s.slice(at, WR, dim=0).load(gl.SliceLayout(1, B2H))[:, None]
    kc0_b = _scaled(kc_s.slice(0, 16, dim=0).slice(at, WR, dim=1).permute((1, 0)).load(B2H), e1)
    kc1_b = kc_s.slice(16, 16, dim=0).slice(at, WR, dim=1).permute((1, 0)).load(B2H)
    kh = (_rows(k_s, half, WR) * rk[:, :, None] * er).to(gl.float16)
    la, l0, l1 = _between(kh, xb, kc_b, kc0_b, kc1_b, la, l0, l1)
    qh = (_rows(q_s, half, WR) * rq[:, :, None] * er).to(gl.float16)
    ma, m0, m1 = _between(qh, xb, kc_b, kc0_b, kc1_b, ma, m0, m1)
    return (la, l0, l1, ma, m0, m1), _scaled(kh, fk), _scaled(qh, fk)


@gluon.jit
def _between_tiles(raw, rq, rk, work, kt_s, qt_s):
    """Scores of pairs in two tiles, after the columns are in kc_s; Kt and Qt replace k and q slice by slice."""
    q_s, k_s, g_s = raw
    kc_s, e1_s, xb_s, fk_s = work
    zp = gl.zeros([2, 32, 16], gl.float32, MP)
    z2 = gl.zeros([64, 16], gl.float32, M2)
    acc = (zp, z2, z2, zp, z2, z2)
    for s in range(4):
        q = q_s._reinterpret(gl.bfloat16, [4, 64, 32], S64).index(s)
        k = k_s._reinterpret(gl.bfloat16, [4, 64, 32], S64).index(s)
        g = g_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s)
        kc = kc_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s)
        e1, xb, fk = e1_s.index(s), xb_s.index(s), fk_s.index(s)
        acc, k0, q0 = _half_between(g, q, k, rq, rk, kc, e1, xb, fk, acc, 0)
        acc, k1, q1 = _half_between(g, q, k, rq, rk, kc, e1, xb, fk, acc, 1)
        _store_pair(kt_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s), k0, k1)
        _store_pair(qt_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s), q0, q1)
    return acc


@gluon.jit
def _level_scores(raw, rq, rk, work, kt_s, qt_s, ck_s, b_s, n, t_s, inversion, NEAR: gl.constexpr):
    """As `prepare._prepare_scores`."""
    q_s, k_s, g_s = raw
    kc_s = work[0]
    if NEAR:
        marks_s, work_s, rows_s, keys_s = places_in(inversion[2])
        _difference_columns(g_s, k_s, rk, b_s, marks_s, kc_s, work_s, keys_s, n)
    ld, md = _inside_tiles(q_s, k_s, g_s, rq, rk)
    # Operands replace the raw tiles slice by slice; a warp reads and writes its own 16 rows only.
    la, l0, l1, ma, m0, m1 = _between_tiles(raw, rq, rk, work, kt_s, qt_s)
    _rescale_columns(kc_s, ck_s)
    acc = ld, la, l0, l1, md, ma, m0, m1
    if NEAR:
        acc = _last_rows(acc, b_s, t_s.load(FR), work_s, rows_s, keys_s, kc_s, n, gl.constexpr(1.0))
    return _masked(acc, b_s, gl.constexpr(1.0))


@gluon.jit
def _chunk(
    q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, beta_ptr, a_log_ptr, dt_ptr, norm_ptr,
    slot, hv, row0, n, groups, HV, scale, GATE: gl.constexpr, NORMS: gl.constexpr,
):  # fmt: skip
    """Factors of one chunk and value head, in shared memory laid out as `prepare._prepare_chunk` does."""
    q_s, k_s, g_s, kc_s, c2_s, b_s, anchors, inversion = chunk_tiles()
    t_s, xb_s, fk_s, ck_s, e1_s = anchors
    kt_s = k_s._reinterpret(gl.float16, [64, 128], S64)
    qt_s = q_s._reinterpret(gl.float16, [64, 128], S64)
    full = fetch_chunk(q_desc, k_desc, g_desc, q_s, k_s, g_s, row0, hv, groups)
    rate = 1.0
    if GATE == SOFTPLUS:
        rate = _rate(gl.load(a_log_ptr + hv).to(gl.float32))
        c2_s.store(gl.load(dt_ptr + hv * 128 + gl.arange(0, 128, layout=F1)).to(gl.float32) * LOG2E)
    beta = _load_beta(beta_ptr, row0, n, hv, HV)
    b_s.store(_rcp(1.0 + _ex2(-LOG2E * beta.to(gl.float32))))
    ws = slot * HV + hv

    mbarrier.wait(full.index(0), 0)
    if n < 64:
        _clean(g_s, n, -3.0e38 if GATE == SOFTPLUS else 0.0)
    _decays(g_s, c2_s, t_s, rate, GATE)
    mbarrier.wait(full.index(1), 0)
    if n < 64:
        _clean(k_s, n, 0.0)
        _clean(q_s, n, 0.0)
    rq = _rsqrt(_square_norm(q_s) + 1e-6)
    if NORMS:
        rk = _rsqrt(_square_norm(k_s) + 1e-6)
        store_norms(norm_ptr, rk, rq, n)
    else:
        marks_s = places_in(inversion[2])[0]
        rk = _rsqrt(_marked_norm(k_s, marks_s) + 1e-6)
    rq = scale * rq
    dec = _tile_factors(t_s.load(FR), xb_s, fk_s, ck_s, e1_s)
    gl.store(dec_ptr + ws.to(gl.int64) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, FR)), dec)
    _columns(g_s, k_s, rk, kc_s)
    raw, work = (q_s, k_s, g_s), (kc_s, e1_s, xb_s, fk_s)
    if NORMS:
        low, m = _level_scores(raw, rq, rk, work, kt_s, qt_s, ck_s, b_s, n, t_s, inversion, gl.constexpr(False))
    else:
        if are_near(marks_s, n):
            low, m = _level_scores(raw, rq, rk, work, kt_s, qt_s, ck_s, b_s, n, t_s, inversion, gl.constexpr(True))
        else:
            low, m = _level_scores(raw, rq, rk, work, kt_s, qt_s, ck_s, b_s, n, t_s, inversion, gl.constexpr(False))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(x_desc, [ws * 192, 0], kt_s)
    tma.async_copy_shared_to_global(x_desc, [ws * 192 + 64, 0], qt_s)
    tma.async_copy_shared_to_global(x_desc, [ws * 192 + 128, 0], kc_s)
    store_inverse(tm_desc, ws, g_s, low, m, b_s, inversion, full)


@gluon.jit(do_not_specialize=["T", "n_seqs", "tiles"])
def kda_prepare_levels_kernel(
    q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, ranks_ptr, beta_ptr, a_log_ptr, dt_ptr, cu_ptr, norm_ptr,
    HV, groups, T, n_seqs, tiles, scale,
    VARLEN: gl.constexpr, NP: gl.constexpr, LAST_FIRST: gl.constexpr, NORMS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """As `prepare.kda_prepare_kernel` and `kda_prepare_backward_kernel` (NORMS). GATE: 0 log decays, 1 softplus. tiles: without
    NORMS the token that a window begins at."""
    item = gl.program_id(0)
    if LAST_FIRST:
        item = gl.num_programs(0) - 1 - item
    upto = 0
    end = item + 1
    if VARLEN:
        upto = chunks_before(cu_ptr, n_seqs, NP)
        end = gl.max(upto, axis=0) * HV
        if item == 0:
            write_ranks(ranks_ptr, cu_ptr, n_seqs, NP)
    if item < end:
        slot, hv, row0, n = _locate(item, upto, cu_ptr, HV, T, VARLEN, 0 if NORMS else tiles)
        if NORMS:
            tile = first_tile(slot, row0, upto, cu_ptr, T, VARLEN)
            norm_ptr += (hv * tiles + tile).to(gl.int64) * 48
        _chunk(
            q_desc, k_desc, g_desc, x_desc, tm_desc, dec_ptr, beta_ptr, a_log_ptr, dt_ptr, norm_ptr, slot, hv, row0, n, groups,
            HV, scale, GATE, NORMS,
        )  # fmt: skip
    if not (VARLEN or NORMS):
        end_after_the_kernel_before()

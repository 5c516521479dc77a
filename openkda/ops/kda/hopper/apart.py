"""Tiles whose keys are nearly one direction: their chunk's factors in another basis of U, of which the states know nothing.

Such keys, where nothing is forgotten, write what almost cancels: over a tile the u_j sum up to one of them. In float16 every
key, every score and every u_j is wrong on its own, and that adds up. So the last two tokens of a tile, f and e, take in place
of their own u

    U'_f = u_f + sum_(j < f of the tile) w_j u_j      w_j = kc_j . kc_f / |kc_f|^2, with kc_j = k_j 2^(G_e - G_j)
    U'_e = u_e + w_f U'_f                             w_f = kc_f . k_e

and the chunk's last token, besides, what tiles before it have in theirs. With U' = A U all products stay as they are, with
T' = A T, M' = M A^-1, Kh' = A^-T Kh: differences, small, and rounded as such. The last but one serves keys of which some
channels are forgotten at once and others never: what e adds to those is not what all others share.

    keys to tile ends   kc_j - w_j kc_f, kc_f - w_f k_e: so are the scores with later tiles, and Kh
    diagonal tiles      rows f and e of L and M: columns j less w_j times column f, column f less w_f times column e, where
                        the diagonal of L, of the system that is inverted, is 1 / beta
    the chunk's last    row of L and M against a tile's last column the same once more; Kh of that column less its part along
                        the last key

T' is the inverse of the changed L. Which tiles do so is read off a product of their keys, for each tile from its own tokens
(no output depends on a later one); of all others not a bit changes. No weak token (beta) is divided by.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from openkda.ops.kda.hopper.factors import (
    A3H,
    B3H,
    FLAT1,
    FLAT2,
    FLAT3,
    FR,
    M2,
    M3,
    MP,
    S64,
    _flat,
    _half_view,
    _inner_products,
    _row,
    _rows,
    _sum_operand,
    _tri,
)
from openkda.ops.kda.hopper.instructions import _ex2, _rcp

NEAR = gl.constexpr(0.5)  # mean cosine of a tile's keys from which it has another basis
FIRST = gl.constexpr(8)  # row of a tile from which keys are compared with those before: a shorter tile stays as it is
WEAK = gl.constexpr(1e-3)  # of the last token's beta
PAIR = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, M3.value)))
ROW = gl.constexpr(gl.SliceLayout(2, M3.value))
COL = gl.constexpr(gl.SliceLayout(1, M3.value))
ROW1 = gl.constexpr(gl.SliceLayout(0, ROW.value))
COL1 = gl.constexpr(gl.SliceLayout(0, COL.value))
LBS = gl.constexpr(_sum_operand(32))
# Marks [tile, 8] as products of a tile's keys leave them.
LM = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[1, 0], [2, 0]],
        block_bases=[],
        shape=[4, 8],
    )
)
LT = gl.constexpr(gl.BlockedLayout([4, 1, 1], [1, 1, 32], [1, 4, 1], [0, 1, 2]))


@gluon.jit
def places_in(ab_s):
    """Where chunks of near keys leave what they need later, in the inversion's first 4 KB: marks_s, work_s, rows_s, keys_s."""
    x = ab_s._reinterpret(gl.float32, [4, 256], FLAT1)
    y = x.index(3)._reinterpret(gl.float32, [4, 64], FLAT1)
    work_s = y.index(1)._reinterpret(gl.float32, [4, 16], FLAT2)
    rows_s = x.index(2)._reinterpret(gl.float32, [4, 64], FLAT1)
    return (
        y.index(0)._reinterpret(gl.int32, [64], FLAT1),
        work_s,
        rows_s,
        ab_s._reinterpret(gl.float32, [2, 512], FLAT1).index(0),
    )


@gluon.jit
def _norm_and_marks(x_s):
    """|x|^2 of the 64 rows of a raw tile, as `_square_norm`, and which rows from `FIRST` on [tile, 8] have a mean cosine with
    those of their tile before them that exceeds `NEAR`, all of one length."""
    d = _inner_products(x_s)
    row = gl.arange(0, 16, layout=ROW1)[None, :, None]
    col = gl.arange(0, 16, layout=COL1)[None, None, :]
    norm = gl.sum(gl.where(row == col, d, 0.0), axis=2)
    limit = gl.arange(0, 16, layout=ROW1)[None, :].to(gl.float32) * NEAR
    marks = (gl.sum(gl.where(row > col, d, 0.0), axis=2) > limit * norm).to(gl.int32)
    marks = gl.split(marks.reshape([4, 16 // FIRST, FIRST]).permute((0, 2, 1)))[1]
    return norm, gl.convert_layout(marks, LM, assert_trivial=True)


@gluon.jit
def store_marks(marks_s, marks):
    """[64], of which rows before `FIRST` of a tile are nobody's."""
    marks_s.reshape([4, 16]).slice(FIRST, 16 - FIRST, dim=1).store(marks)


@gluon.jit
def _marked_norm(x_s, marks_s):
    """|x|^2 of the 64 rows of a raw tile; the marks go to marks_s."""
    norm, marks = _norm_and_marks(x_s)
    store_marks(marks_s, marks)
    return norm


@gluon.jit
def are_near(marks_s, n):
    """Whether one of a tile's last two keys has a mark. n tokens are real."""
    i = gl.arange(0, 64, layout=PAIR)
    end = gl.minimum(n - (i & -16), 16) - 1
    i = i & 15
    near = (i >= FIRST) & (i <= end) & (i >= end - 1) & (marks_s.load(PAIR) > 0)
    return gl.max(near.to(gl.int32), axis=0) > 0


@gluon.jit
def by_channel(x_s):
    """[4 slices of 32 channels, tile, channel] in shared memory as [tile, channel], a channel's four in one thread."""
    x = x_s._reinterpret(gl.float32, [4, 4, 32], FLAT3).permute((1, 0, 2)).load(LT)
    return gl.convert_layout(x.reshape([4, 128]), FR, assert_trivial=True)


@gluon.jit
def _one(x_s, i):
    """Element i of a vector in shared memory."""
    return gl.max(x_s._reinterpret(gl.float32, [x_s.shape[0], 1], FLAT1).index(i).load(ONE), axis=0)


@gluon.jit
def _seen_from(n):
    """Which log decays make keys as they are one token behind f, if that one forgets as f did: those of tokens behind a key and
    up to f, and of f once more."""
    tile = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, A3H)))[:, None, None]
    end = gl.minimum(n - 16 * tile, 16) - 1
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, A3H)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, A3H)))[None, None, :]
    m = gl.where((j > i) & (j < end), 1.0, 0.0) + gl.where((i < end) & (j == end - 1), 1.0, 0.0)
    return m.to(gl.float16) + gl.full([4, 16, 16], 0.0, gl.float16, A3H)


@gluon.jit
def _difference_columns(g_s, k_s, rk, b_s, marks_s, kc_s, work_s, keys_s, n):
    """Keys scaled to the end of their tile become differences, from raw keys, in tiles that are near. work_s [4, 16]: w;
    keys_s [4 slices of channels, tile, channel]: k_e. What is taken at f knows of no token behind it."""
    row = gl.arange(0, 16, layout=ROW1)[None, :, None]
    col = gl.arange(0, 16, layout=COL1)[None, None, :]
    end = gl.minimum(n - 16 * gl.arange(0, 4, layout=TILE), 16)[:, None, None] - 1
    near = (marks_s.reshape([4, 16]).load(COL)[:, None, :] > 0) & (col >= FIRST)
    near = near & (b_s.reshape([4, 16]).load(COL)[:, None, :] > WEAK)
    near_f = gl.where(near & (col == end - 1) & (row < end - 1), 1.0, 0.0)
    near_e = gl.where(near & (col == end) & (row == end - 1), 1.0, 0.0)
    seen = _seen_from(n)
    d = gl.zeros([4, 16, 16], gl.float32, M3)
    df = gl.zeros([4, 16, 16], gl.float32, M3)
    for s in range(4):
        x = kc_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s).load(M2).reshape([4, 16, 32])
        c = gl.convert_layout(x.permute((0, 2, 1)), B3H, assert_trivial=True)
        d = mma_v2(gl.convert_layout(x, A3H, assert_trivial=True), c, d)
        g16 = _half_view(g_s)._reinterpret(gl.float16, [4, 64, 32], S64).index(s).load(LBS).reshape([4, 16, 32])
        hs = mma_v2(seen, gl.convert_layout(g16, B3H, assert_trivial=True), gl.zeros([4, 16, 32], gl.float32, M3))
        k = _rows(k_s._reinterpret(gl.bfloat16, [4, 64, 32], S64).index(s), 0, 32) * rk[:, :, None] * _ex2(hs)
        x = k.to(gl.float16)
        c = gl.convert_layout(x.permute((0, 2, 1)), B3H, assert_trivial=True)
        df = mma_v2(gl.convert_layout(x, A3H, assert_trivial=True), c, df)
    work_s.store(gl.sum(gl.where(row == col, df, 0.0), axis=2))
    gl.thread_barrier()
    w = df * _rcp(gl.maximum(work_s.load(COL), 1e-6))[:, None, :]
    w = gl.minimum(gl.maximum(w, -1.0), 1.0) * near_f + d * near_e
    w = gl.sum(w, axis=2)
    gl.thread_barrier()
    work_s.store(w)
    for s in range(4):
        g16 = _half_view(g_s)._reinterpret(gl.float16, [4, 64, 32], S64).index(s).load(LBS).reshape([4, 16, 32])
        g16 = gl.convert_layout(g16, B3H, assert_trivial=True)
        hs = mma_v2(_tri(True), g16, gl.zeros([4, 16, 32], gl.float32, M3))
        k = _rows(k_s._reinterpret(gl.bfloat16, [4, 64, 32], S64).index(s), 0, 32) * rk[:, :, None] * _ex2(hs)
        ke = gl.sum(gl.where(row == end, k, 0.0), axis=1)
        kf = gl.sum(gl.where(row == end - 1, k, 0.0), axis=1)
        keys_s._reinterpret(gl.float32, [4, 4, 32], FLAT2).index(s).store(ke)
        k -= gl.where(row < end - 1, kf[:, None, :], ke[:, None, :]) * w[:, :, None]
        kc_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s).store(_flat(k.to(gl.float16)))
    gl.thread_barrier()


@gluon.jit
def _last_rows(acc, b_s, t, work_s, rows_s, keys_s, kh_s, n, UP: gl.constexpr):
    """What `_scores` leaves of changed columns, with the rows that change; Kh of the tiles' last tokens. t [tile, channel]: the
    tiles' log decays; UP: as `_masked`."""
    ld, la, l0, l1, md, ma, m0, m1 = acc
    row = gl.arange(0, 16, layout=ROW1)[None, :, None]
    col = gl.arange(0, 16, layout=COL1)[None, None, :]
    tile = gl.arange(0, 4, layout=TILE)[:, None, None]
    end = gl.minimum(n - 16 * tile, 16) - 1
    # A row's part of what goes: w of columns j < f times `by`, of column f times `own`.
    w = work_s.load(COL)[:, None, :]
    early = gl.where(col < end - 1, w, 0.0)
    late = gl.where(col == end - 1, w, 0.0)
    token = gl.arange(0, 16, layout=ROW1)[None, :]
    end_t = gl.minimum(n - 16 * gl.arange(0, 4, layout=TILE), 16)[:, None] - 1
    less = _rcp(gl.maximum(b_s.reshape([4, 16]).load(ROW), WEAK)) * (1.0 / UP)
    own = gl.sum(gl.where(col == end, md, 0.0), axis=2)
    rows_s.index(0).reshape([4, 16]).store(own)
    by = gl.sum(gl.where(col == end - 1, ld, 0.0), axis=2)
    by = gl.where(token == end_t, by, gl.where(token == end_t - 1, less, 0.0))
    ld -= early * by[:, :, None] + late * gl.where(token == end_t, less, 0.0)[:, :, None]
    by = gl.sum(gl.where(col == end - 1, md, 0.0), axis=2)
    by = gl.where(token >= end_t - 1, by, 0.0)
    md -= early * by[:, :, None] + late * gl.where(token == end_t, own, 0.0)[:, :, None]
    col_p = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, MP)))[None, None, :]
    col_2 = gl.arange(0, 16, layout=gl.SliceLayout(0, M2))[None, :]
    rows_s.index(1).reshape([2, 32]).store(gl.sum(gl.where(col_p == 15, la, 0.0), axis=2))
    rows_s.index(2).store(gl.sum(gl.where(col_2 == 15, l0, 0.0), axis=1))
    rows_s.index(3).store(gl.sum(gl.where(col_2 == 15, l1, 0.0), axis=1))
    gl.thread_barrier()
    last = gl.minimum(n, 64) - 1
    upper = last // 16
    beta = _one(b_s, last)
    m = _one(rows_s.index(0), last) * UP
    wa = gl.where((upper % 2 == 1) & (beta > WEAK), _one(rows_s.index(1), last), 0.0)
    w0 = gl.where((upper >= 2) & (beta > WEAK), _one(rows_s.index(2), last), 0.0)
    w1 = gl.where((upper >= 2) & (beta > WEAK), _one(rows_s.index(3), last), 0.0)
    less = _rcp(gl.maximum(beta, WEAK))
    row_p = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, MP)))[:, None, None] * 32
    row_p += gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, MP)))[None, :, None]
    at = (row_p == last) & (col_p == 15)
    la = gl.where(at, la - wa * less, la)
    ma = gl.where(at, ma - wa * m, ma)
    at = (gl.arange(0, 64, layout=gl.SliceLayout(1, M2))[:, None] == last) & (col_2 == 15)
    l0 = gl.where(at, l0 - w0 * less, l0)
    m0 = gl.where(at, m0 - w0 * m, m0)
    l1 = gl.where(at, l1 - w1 * less, l1)
    m1 = gl.where(at, m1 - w1 * m, m1)
    channels = gl.arange(0, 4, layout=gl.SliceLayout(1, FR))[:, None]
    t1, t2, t3 = _row(t, channels, 1), _row(t, channels, 2), _row(t, channels, 3)
    after = gl.where(channels == 2, t3, gl.where(channels == 1, t2 + t3, t1 + t2 + t3))
    to_last = gl.where(channels == 0, w0, gl.where(channels == 1, w1, 0.0))
    to_last = gl.where((channels == upper - 1) & (upper % 2 == 1), wa, to_last)
    keys = by_channel(keys_s)
    keys = keys * _ex2(after) - to_last * gl.sum(gl.where(channels == upper, keys, 0.0), axis=0)[None, :]
    keys = gl.convert_layout(keys.reshape([4, 4, 32]), LT, assert_trivial=True)
    keys_s._reinterpret(gl.float32, [4, 4, 32], FLAT3).permute((1, 0, 2)).store(keys)
    gl.thread_barrier()
    at = (row == 15) & (tile < upper)
    for s in range(4):
        kh = kh_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s)
        x = gl.convert_layout(kh.load(M2).reshape([4, 16, 32]), M3, assert_trivial=True)
        last_key = keys_s._reinterpret(gl.float32, [4, 4, 32], FLAT2).index(s).load(COL)[:, None, :].to(gl.float16)
        kh.store(_flat(gl.where(at, last_key, x)))
    return ld, la, l0, l1, md, ma, m0, m1

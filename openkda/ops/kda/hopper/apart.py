"""Chunks whose keys are nearly one direction: their last key goes apart, in float32.

Such keys, where nothing is forgotten, write what almost cancels: over a chunk the u_j sum up to one of them. In float16 every
row of Kh is wrong in its own direction, which no later key reads, and that adds up. With w_j = k_last . k_j 2^(G_64 - G_j),
which is row `last` of L, u_last = beta (r_last - sum_j<last w_j u_j), and therefore exactly, for any vector c and
w_last = 1 / beta,

    S = 2^G_64 S + Kh^T U = 2^G_64 S + c r_last^T + (Kh - w c^T)^T U

What is left in the brackets is small when c is the last key. c = (1 - (1 - beta)^2) k_last leaves (beta - 1) k_last of the last
row, so that a small beta, of which T knows few digits, costs nothing. The keys' scores tell such chunks; all others pay for a
sum of sixteen scores a thread and a branch.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from openkda.ops.kda.hopper.factors import A3H, B3H, F1, FLAT1, LB, M2, M3, S64, W, _flat, _half_view, _tri
from openkda.ops.kda.hopper.instructions import _ex2, _rcp

NEAR = gl.constexpr(0.5)  # mean score of a tile's keys with those before them from which a chunk's last key goes apart
NOTHING = gl.constexpr(2.0)  # in place of that key where nothing goes apart; no component of a key is as large
FOUR = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def _store_nearness(near_s, ld):
    """Sums of the scores of keys with those before them in their tile, [tile]."""
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, M3)))[None, :, None]
    col = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, M3)))[None, None, :]
    near_s.store(gl.sum(gl.sum(gl.where(row > col, ld, 0.0), axis=2), axis=1))


@gluon.jit
def are_near(near_s, n):
    """Whether the keys of a chunk, of which n tokens are real, are nearly one direction."""
    m = gl.minimum(n, 64)
    pairs = m // 16 * 120 + m % 16 * (m % 16 - 1) // 2
    return gl.sum(near_s.load(FOUR), axis=0) > NEAR * pairs.to(gl.float32)


@gluon.jit
def _one(x_s, i):
    """Element i of a vector in shared memory."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(x_s._reinterpret(gl.float32, [64, 1], FLAT1).index(i).load(one), axis=0)


@gluon.jit
def _keys_apart(k_ptr, k_row, row0, head, n, g_s, rk, rk_s, b_s, ck_s, c_s, kh_s):
    """Takes the last key's part out of Kh in kh_s, and leaves that key in c_s. Raw keys come from memory once more: what Kh was
    rounded to is of no use."""
    chan = gl.arange(0, 128, layout=F1)
    last = gl.minimum(n, 64) - 1
    beta = _one(b_s, last)
    key = gl.load(k_ptr + (row0 + last).to(gl.int64) * k_row + (head * 128 + chan)).to(gl.float32) * _one(rk_s, last)
    c_s.store(key)
    gl.thread_barrier()
    x = gl.convert_layout(kh_s.load(M2).reshape([4, 16, 128]), M3, assert_trivial=True)
    y = c_s.load(gl.SliceLayout(0, gl.SliceLayout(1, M3)))[None, None, :].to(gl.float16)
    y, x = gl.broadcast(y, x)
    y = gl.convert_layout(y.permute((0, 2, 1)), B3H, assert_trivial=True)
    w = mma_v2(gl.convert_layout(x, A3H, assert_trivial=True), y, gl.zeros([4, 16, 16], gl.float32, M3))
    tile = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, M3)))[:, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, M3)))[None, :]
    w = gl.where(tile * 16 + row == last, _rcp(gl.maximum(beta, 1e-6)), gl.max(w, axis=2))
    gl.thread_barrier()
    c_s.store(key * (beta * (2.0 - beta)))
    gl.thread_barrier()
    token = tile * 16 + row
    at = k_ptr + ((row0 + token).to(gl.int64) * k_row + head * 128)[:, :, None]
    for s in range(2):
        g16 = _half_view(g_s)._reinterpret(gl.float16, [2, 64, W], S64).index(s).load(LB).reshape([4, 16, W])
        g16 = gl.convert_layout(g16, B3H, assert_trivial=True)
        hs = mma_v2(_tri(True), g16, gl.zeros([4, 16, W], gl.float32, M3))
        i = gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(1, M3)))[None, None, :] + s * W
        k = gl.load(at + i, mask=(token < n)[:, :, None], other=0.0).to(gl.float32) * rk[:, :, None]
        ck = ck_s.index(s).load(gl.SliceLayout(1, M3))[:, None, :].to(gl.float32)
        c = (
            c_s._reinterpret(gl.float32, [2, W], FLAT1)
            .index(s)
            .load(gl.SliceLayout(0, gl.SliceLayout(1, M3)))[None, None, :]
        )
        kh = (k * _ex2(hs) * ck - w[:, :, None] * c).to(gl.float16)
        kh_s._reinterpret(gl.float16, [2, 64, W], S64).index(s).store(_flat(kh))

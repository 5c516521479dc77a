"""Tiles of the backward's last kernel (gradients.py): how they lie in registers, and the pairs of tokens within and between.

Everything is transposed: channels are the rows of a product and tokens its columns. A warp owns 16 channels and all 64 tokens
of a chunk, so nothing of a channel's sums leaves its warp; decayed q and k are left operands in the registers in which they
were computed; and the scores' gradients, the same for every channel, are right operands that all warps read from shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from openkda.ops.kda.hopper.instructions import ALL_NAN, LOG2E, _ex2, _ex2_neg, _ex2_neg_abs, _lg2, _rcp

LN2 = gl.constexpr(0.6931471805599453)
FORGOTTEN = gl.constexpr(-57.7)
NEARLY = gl.constexpr(-57.68)
BOUNDED = gl.constexpr(2)
SOFTPLUS = gl.constexpr(1)
CH = gl.constexpr(64)
MM = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
A16 = gl.constexpr(gl.DotOperandLayout(0, MM.value, 2))
B16 = gl.constexpr(gl.DotOperandLayout(1, MM.value, 2))
A32 = gl.constexpr(gl.DotOperandLayout(0, MM.value, 1))
B32 = gl.constexpr(gl.DotOperandLayout(1, MM.value, 1))
CHAN = gl.constexpr(gl.SliceLayout(1, MM.value))
TOK = gl.constexpr(gl.SliceLayout(0, MM.value))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
SMALL = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
TABLE = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
S128 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
S32 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
S1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _and(x, m):
    """The float16 elements of x where m holds ones."""
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [x, m], dtype=gl.float16, is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def _tf32(x):
    """x rounded to ten mantissa bits (the tensor core would cut the others off); NaN stays, see `round_mantissa`."""
    return gl.where(x == x, ((x.to(gl.int32, bitcast=True) + 0x1000) & -0x2000).to(gl.float32, bitcast=True), x)


@gluon.jit
def _a16(x):
    return gl.convert_layout(x, A16, assert_trivial=True)


@gluon.jit
def _a32(x):
    """Registers as a tf32 operand: tokens in an order of their own; the order of a contraction is free."""
    x = x.reshape([CH, 2, 4, 2]).permute((0, 1, 3, 2)).reshape([CH, 16])
    return gl.convert_layout(x, A32, assert_trivial=True)


@gluon.jit
def _b32(x):
    """A float16 operand [16 tokens, 16] as one of tf32, in the token order of _a32."""
    x = x.to(gl.float32).reshape([2, 4, 2, 16]).permute((0, 2, 1, 3)).reshape([16, 16])
    return gl.convert_layout(x, B32, assert_trivial=True)


@gluon.jit
def _tiles(s):
    """[64 tokens, 64 channels] as four tiles of 16 tokens."""
    return s._reinterpret(s.dtype, [4, 16, 64], S128)


@gluon.jit
def _wide(x):
    """float32 of 16 bits; of bfloat16 in the two instructions a pair that the compiler takes three for."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return x.to(gl.float32)


@gluon.jit
def _tile(s, t):
    """Tile t as float32 [channels, 16 tokens]."""
    return _wide(s.index(t).permute((1, 0)).load(MM))


@gluon.jit
def _keep(s, t, x):
    s.index(t).permute((1, 0)).store(x.to(s.dtype))


@gluon.jit
def _row(s, t):
    """Tile t of one number a token, [1, 16]."""
    return s._reinterpret(gl.float32, [4, 16], S1).index(t).load(TOK)[None, :]


@gluon.jit
def _forth(s, i, j):
    """Scores [rows of tile i, columns of tile j] as an operand [tokens of j, tokens of i]."""
    return s.index(4 * j + i).permute((1, 0)).load(B16)


@gluon.jit
def _back(s, i, j):
    """The same as [tokens of i, tokens of j]."""
    return s.index(4 * j + i).load(B16)


@gluon.jit
def _fetch_scores(dst, p):
    """Starts to copy [64, 64] as 16 tiles, those of a column of tiles one behind the other."""
    r = gl.arange(0, 256, layout=gl.SliceLayout(1, TABLE))[:, None]
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, TABLE))[None, :]
    at = r % 64 * 64 + r // 64 * 16 + c
    async_copy.async_copy_global_to_shared(dst._reinterpret(gl.float16, [256, 16], S32), p + at)


@gluon.jit
def _folded(x):
    """Sums over tokens as far as one thread holds them, [channels, 4]."""
    return gl.sum(gl.sum(x.reshape([CH, 2, 4, 2]), axis=3), axis=1)


@gluon.jit
def _across(x):
    return gl.convert_layout(gl.sum(x, axis=1), CHAN)


@gluon.jit
def _fetch(dst, p, stride, left, first, CHANNELS: gl.constexpr):
    """Starts to copy [64, 64], zeros for what does not exist."""
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    m = (t < left)[:, None] & (first + c < CHANNELS)[None, :]
    dst = dst._reinterpret(dst.dtype, [64, 64], S128)
    async_copy.async_copy_global_to_shared(dst, p + (t[:, None] * stride + c[None, :]), m)


@gluon.jit
def _write(p, s, stride, left, first, CHANNELS: gl.constexpr):
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    m = (t < left)[:, None] & (first + c < CHANNELS)[None, :]
    x = s._reinterpret(s.dtype, [64, 64], S128).load(ROWS)
    gl.store(p + (t[:, None] * stride + c[None, :]), x, m)


@gluon.jit
def _gate(z, dt, real, rate, bound, GATE: gl.constexpr):
    """Log2 decay of a raw gate input and its bias; and for `_gate_gradient` the sigmoid of a bounded gate, else the decay."""
    if GATE == BOUNDED:
        c = -rate * LOG2E
        s = _rcp(_ex2(gl.where(real, z * c + dt * c, 1e4)) + 1.0)
        return s * (bound * LOG2E), s
    elif GATE == SOFTPLUS:
        # log2(1 + e) would lose what is small beside the 1: two terms of its series there, good to 2^-21
        x = gl.where(real, z * LOG2E + dt * LOG2E, -1e30)
        e = _ex2_neg_abs(x)
        more = gl.where(e < 0.0009765625, e * (LOG2E - 0.5 * LOG2E * e), _lg2(1.0 + e))
        g = gl.maximum((gl.maximum(x, 0.0) + more) * -rate, FORGOTTEN, propagate_nan=ALL_NAN)
        return g, g
    else:
        g = gl.maximum((z + dt) * LOG2E, FORGOTTEN, propagate_nan=ALL_NAN)
        return g, g


@gluon.jit
def _gate_gradient(dg, z, dt, real, s, rate, bound, unit, GATE: gl.constexpr):
    """(gradient of the raw gate input, of A_log per element) from that of the natural log decay. Of a bounded gate the second
    lacks dt times the first."""
    if GATE == BOUNDED:
        dz = dg * (s - s * s) * (bound * rate * unit)
        return dz, dz * z
    else:
        dg = gl.where(s <= FORGOTTEN, 0.0, dg * unit)
        if GATE == SOFTPLUS:
            dg = gl.where(real, dg, 0.0)
            return dg * (-rate * _rcp(_ex2_neg(z * LOG2E + dt * LOG2E) + 1.0)), dg * (s * LN2)
        else:
            return dg, dg


@gluon.jit
def _level_table(M_s, A_s, at: gl.constexpr, n: gl.constexpr):
    """For pairs in the two halves, of n tokens each, of an aligned run, in tiles of the scores' gradients that lie above the
    diagonal: of which tokens j the log decay counts for token i; which pairs there are, ones in every bit."""
    j = gl.arange(0, 16, layout=gl.SliceLayout(1, SMALL))[:, None]
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, SMALL))[None, :]
    ones = gl.full([16, 16], -1, gl.int16, SMALL).to(gl.float16, bitcast=True)
    zero = gl.full([16, 16], 0.0, gl.float16, SMALL)
    counts = (i // n == j // n) & ((j > i) != (i // n % 2 == 1))
    run = i // (2 * n) == j // (2 * n)
    M_s.index(at).store(gl.where(counts, 1.0, 0.0).to(gl.float16))
    A_s.index(at).store(gl.where(run & (j // n % 2 == 1) & (i // n % 2 == 0), ones, zero))


@gluon.jit
def _inside_bounded(qn, kn, kd, M_s, A_s, t, zero):
    """Pairs inside tile t, all at once, from rows decayed from the tile's start and columns by as much the other way: 16
    tokens of a bounded gate stay in float32's range. What rows get (q, k) and what columns get, their own decay pending."""
    a = mma_v2(_a32(kd), _b32(_forth(M_s, t, t)), zero, input_precision="tf32")
    e = mma_v2(_a32(kd), _b32(_forth(A_s, t, t)), zero, input_precision="tf32")
    c = mma_v2(_a32(qn), _b32(_back(M_s, t, t)), zero, input_precision="tf32")
    c = mma_v2(_a32(kn), _b32(_back(A_s, t, t)), c, input_precision="tf32")
    return a, e, c


@gluon.jit
def _level(q, k, g, dq, dk, dP, M_s, A_s, t, at: gl.constexpr, n: gl.constexpr, zero):
    """Adds the pairs in the two halves, of n tokens each, of an aligned run; decays from the border between the halves."""
    e = _ex2(mma_v2(_a16(g), M_s.index(at).load(B16), zero))
    forth = A_s.index(at).permute((1, 0)).load(B16)
    back = A_s.index(at).load(B16)
    qe = (q * e).to(gl.float16)
    ke = (k * e).to(gl.float16)
    a = mma_v2(_a16(ke), _and(_forth(M_s, t, t), forth), zero)
    d = mma_v2(_a16(ke), _and(_forth(A_s, t, t), forth), zero)
    d = mma_v2(_a16(qe), _and(_back(M_s, t, t), back), d)
    d = mma_v2(_a16(ke), _and(_back(A_s, t, t), back), d)
    tok = gl.arange(0, 16, layout=TOK)[None, :]
    dP += qe.to(gl.float32) * a
    dP += ke.to(gl.float32) * gl.where(tok // n % 2 == 1, d, -d)
    return dq + a * e, dk + d * e, dP


@gluon.jit
def _inside_levels(q, k, g, own, M_s, A_s, t, zero):
    """Pairs inside tile t for any gate, grouped by the aligned run of 16, 8, 4 or 2 tokens in whose halves they lie."""
    dq = own * k  # a token with itself: no decay between, so nothing for dP
    dk = own * q
    dq, dk, dP = _level(q, k, g, dq, dk, zero, M_s, A_s, t, 4, 8, zero)
    dq, dk, dP = _level(q, k, g, dq, dk, dP, M_s, A_s, t, 8, 4, zero)
    dq, dk, dP = _level(q, k, g, dq, dk, dP, M_s, A_s, t, 9, 2, zero)
    return _level(q, k, g, dq, dk, dP, M_s, A_s, t, 12, 1, zero)


@gluon.jit
def _member(place, cu_p, N):
    """The member of a pack that owns a chunk; see `find_sequence` in ops/triton/api.py."""
    low = place * 0
    high = low + N
    while high - low > 1:
        middle = (low + high) // 2
        if (gl.load(cu_p + middle) // 64 + middle).to(gl.int32) <= place:
            low = middle
        else:
            high = middle
    return low


@gluon.jit
def _place(cu_p, place, T, N, PACKED: gl.constexpr):
    """(first row, rows left, first tile) of a chunk; left <= 0: there is none."""
    if PACKED:
        low = _member(place, cu_p, N)
        start = gl.load(cu_p + low).to(gl.int64)
        first = (place - (start // 64 + low).to(gl.int32)) * 64
        left = (gl.load(cu_p + low + 1).to(gl.int64) - start).to(gl.int32) - first
        return start + first, left, start // 16 + low + first // 16, start * 0
    else:
        per = (T + 63) // 64
        batch = (place // per).to(gl.int64)
        first = place % per * 64
        return first.to(gl.int64), T - first, batch * ((T + 15) // 16) + first // 16, batch

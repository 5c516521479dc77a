"""Tiles of the backward's last kernel (gradients.py): how they lie in registers, and the pairs of tokens within and between.

Everything is transposed: channels are the rows of a product and tokens its columns. A warp owns 16 channels and all 64 tokens
of a chunk, so nothing of a channel's sums leaves its warp; decayed q and k are left operands in the registers in which they
were computed; and the scores' gradients, the same for every channel, are right operands that all warps read from shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

LOG2E = gl.constexpr(1.4426950408889634)
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
S128 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
S32 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
S1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _ex2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _rcp(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _lg2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _and(x, m):
    """The float16 elements of x where m holds ones."""
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [x, m], dtype=gl.float16, is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def _tf32(x):
    """x rounded to ten mantissa bits (the tensor core would cut the others off)."""
    return ((x.to(gl.int32, bitcast=True) + 0x1000) & -0x2000).to(gl.float32, bitcast=True)


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
def _tile(s, t: gl.constexpr):
    """Tile t of [64 tokens, 64 channels] as float32 [channels, 16 tokens]."""
    return s.slice(16 * t, 16, dim=0).permute((1, 0)).load(MM).to(gl.float32)


@gluon.jit
def _keep(s, t: gl.constexpr, x):
    s.slice(16 * t, 16, dim=0).permute((1, 0)).store(x.to(s.dtype))


@gluon.jit
def _row(s, which: gl.constexpr, t: gl.constexpr):
    """Tile t of one number a token, [1, 16]."""
    return s.index(which).slice(16 * t, 16, dim=0).load(TOK)[None, :]


@gluon.jit
def _forth(s, i: gl.constexpr, j: gl.constexpr):
    """Scores [rows of tile i, columns of tile j] as an operand [tokens of j, tokens of i]."""
    return s.slice(16 * i, 16, dim=0).slice(16 * j, 16, dim=1).permute((1, 0)).load(B16)


@gluon.jit
def _back(s, i: gl.constexpr, j: gl.constexpr):
    """The same as [tokens of i, tokens of j]."""
    return s.slice(16 * i, 16, dim=0).slice(16 * j, 16, dim=1).load(B16)


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
    async_copy.async_copy_global_to_shared(dst, p + (t[:, None] * stride + c[None, :]), m)


@gluon.jit
def _write(p, s, stride, left, first, CHANNELS: gl.constexpr):
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    m = (t < left)[:, None] & (first + c < CHANNELS)[None, :]
    gl.store(p + (t[:, None] * stride + c[None, :]), s.load(ROWS), m)


@gluon.jit
def _log2_decay(z, rate, bound, GATE: gl.constexpr):
    """Log2 decay of a raw gate input (bias added)."""
    if GATE == BOUNDED:
        per = 1.0 / (bound * LOG2E)
        return _rcp(_ex2(z * (-rate * LOG2E)) * per + per)
    elif GATE == SOFTPLUS:
        # log1p(e) by Kahan's quotient: w - 1 is what the rounding of 1 + e kept. A plain log loses the slow decays.
        e = _ex2(gl.maximum(z, -z) * -LOG2E)
        w = e + 1.0
        log1p = gl.where(w == 1.0, e, _lg2(w) * LN2 * (e * _rcp(w - 1.0)))
        return gl.maximum((gl.maximum(z, 0.0) + log1p) * -(rate * LOG2E), FORGOTTEN)
    else:
        return gl.maximum(z * LOG2E, FORGOTTEN)


@gluon.jit
def _gate_gradient(dg, z, g, rate, bound, unit, GATE: gl.constexpr):
    """(gradient of the raw gate input, of A_log per element) from that of the natural log decay. g: log2 decay."""
    if GATE == BOUNDED:
        s = _rcp(_ex2(z * (-rate * LOG2E)) + 1.0)
        dz = dg * (s * (1.0 - s)) * (bound * rate * unit)
        return dz, dz * z
    else:
        dg = gl.where(g.to(gl.float32) <= NEARLY, 0.0, dg * unit)
        if GATE == SOFTPLUS:
            return dg * (-rate * _rcp(_ex2(z * -LOG2E) + 1.0)), dg * (g.to(gl.float32) * LN2)
        else:
            return dg, dg


@gluon.jit
def _level_table(w_s, at: gl.constexpr, n: gl.constexpr):
    """For pairs in the two halves, of n tokens each, of an aligned run: of which tokens j the log decay counts for token i
    (at); which pairs there are as [column, row] (at + 1) and as [row, column] (at + 2), ones in every bit."""
    j = gl.arange(0, 16, layout=gl.SliceLayout(1, SMALL))[:, None]
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, SMALL))[None, :]
    ones = gl.full([16, 16], -1, gl.int16, SMALL).to(gl.float16, bitcast=True)
    zero = gl.full([16, 16], 0.0, gl.float16, SMALL)
    counts = (i // n == j // n) & ((j > i) != (i // n % 2 == 1))
    run = i // (2 * n) == j // (2 * n)
    w_s.index(at).store(gl.where(counts, 1.0, 0.0).to(gl.float16))
    w_s.index(at + 1).store(gl.where(run & (i // n % 2 == 1) & (j // n % 2 == 0), ones, zero))
    w_s.index(at + 2).store(gl.where(run & (j // n % 2 == 1) & (i // n % 2 == 0), ones, zero))


@gluon.jit
def _inside_bounded(q, k, up, down, M_s, A_s, t: gl.constexpr, zero):
    """Pairs inside tile t: (dq, dk, dP), all at once; 16 tokens of a bounded gate stay in float32's range."""
    kd = _tf32(k * down)
    a = mma_v2(_a32(kd), _b32(_forth(M_s, t, t)), zero, input_precision="tf32")
    e = mma_v2(_a32(kd), _b32(_forth(A_s, t, t)), zero, input_precision="tf32")
    qu = _tf32(q * up)
    dP = qu * a
    c = mma_v2(_a32(qu), _b32(_back(M_s, t, t)), zero, input_precision="tf32")
    ku = _tf32(k * up)
    dP += ku * e
    c = mma_v2(_a32(ku), _b32(_back(A_s, t, t)), c, input_precision="tf32")
    return a * up, e * up + c * down, dP - kd * c


@gluon.jit
def _inside_levels(q, k, g, own, w_s, M_s, A_s, t: gl.constexpr, zero):
    """The same for any gate: pairs grouped by the aligned run of 16, 8, 4 or 2 tokens in whose halves they lie, decays from
    the border between the halves."""
    dq = own * k  # a token with itself: no decay between, so nothing for dP
    dk = own * q
    dP = zero
    Mf = _forth(M_s, t, t)
    Af = _forth(A_s, t, t)
    Mb = _back(M_s, t, t)
    Ab = _back(A_s, t, t)
    tok = gl.arange(0, 16, layout=TOK)[None, :]
    for level in gl.static_range(4):
        e = _ex2(mma_v2(_a16(g), w_s.index(3 * level).load(B16), zero))
        forth = w_s.index(3 * level + 1).load(B16)
        back = w_s.index(3 * level + 2).load(B16)
        qe = (q * e).to(gl.float16)
        ke = (k * e).to(gl.float16)
        a = mma_v2(_a16(ke), _and(Mf, forth), zero)
        d = mma_v2(_a16(ke), _and(Af, forth), zero)
        d = mma_v2(_a16(qe), _and(Mb, back), d)
        d = mma_v2(_a16(ke), _and(Ab, back), d)
        dq += a * e
        dk += d * e
        dP += qe.to(gl.float32) * a
        dP += ke.to(gl.float32) * gl.where(tok // (8 >> level) % 2 == 1, d, -d)
    return dq, dk, dP


@gluon.jit
def _from_earlier(d_s, fs, w_s, u, r_s, t: gl.constexpr, zero, none):
    """What the rows of tile t get from earlier tiles and from the entering state, its own decay pending."""
    b = zero
    before = none
    for o in gl.static_range(t - 1, -1, -1):
        f = fs[o]
        if o < t - 1:
            f = f * _ex2(before).to(gl.float16)[:, None]
        b = mma_v2(_a16(f), _forth(d_s, t, o), b)
        before += r_s.index(o).load(CHAN)
    return b + _tile(w_s, t) * (_ex2(before) * u)[:, None]


@gluon.jit
def _from_later(M_s, A_s, f, qs, ks, w_s, u, r_s, dP, t: gl.constexpr, zero, none):
    """What the columns of tile t get from later tiles and from the leaving state, its own decay pending; and dP."""
    b = zero
    later = none
    for o in gl.static_range(t + 1, 4):
        c = mma_v2(_a16(qs[o]), _back(M_s, o, t), zero)
        c = mma_v2(_a16(ks[o]), _back(A_s, o, t), c)
        if o > t + 1:
            w = _ex2(later)
            dP -= (f * w.to(gl.float16)[:, None]).to(gl.float32) * c
            b += c * w[:, None]
        else:
            dP -= f.to(gl.float32) * c
            b += c
        later += r_s.index(o).load(CHAN)
    w = _tile(w_s, t) * (_ex2(later) * u)[:, None]
    return b + w, dP - f.to(gl.float32) * w

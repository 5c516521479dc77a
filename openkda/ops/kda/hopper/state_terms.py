"""What the entering and the leaving state say to the gradients of one chunk, computed where it is used (gradients.py).

The algebra is that of `products.states_kernel`, transposed: key channels are the rows and tokens the columns of every product,
as `gradient_tiles.py` wants them. The two halves of 64 value channels carry powers of two of their own and come one after the
other through the same five tiles of shared memory, three of which then hold the results.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from openkda.ops.kda.hopper.gradient_tiles import A16, B16, CH, CHAN, MM, ROWS, S1, TOK, _wide
from openkda.ops.kda.hopper.products import ROW0, ROW1, _power_of_two


@gluon.jit
def _start(dst, p, stride, left):
    """Starts to copy [64, 64]. Opaque rows, or the addresses stay in registers from one half to the next."""
    t = gl.arange(0, 64, layout=ROW1)
    t = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [t], dtype=gl.int32, is_pure=False, pack=1)
    c = gl.arange(0, 64, layout=ROW0)
    m = (t < left)[:, None] & (c < 64)[None, :]
    async_copy.async_copy_global_to_shared(dst, p + (t[:, None] * stride + c[None, :]), m)


@gluon.jit
def fetch_half(tiles, pointers, strides, half, left):
    """Starts to copy do, U and dD of a chunk, [64 tokens, 64 value channels], and S and dS', [64 value channels, 64]."""
    do_s, u_s, dd_s, S_s, dS_s = tiles
    do_p, u_p, dd_p, s_p, ds_p = pointers
    do_stride, token_stride, BK = strides
    _start(do_s, do_p + half * 64, do_stride, left)
    _start(u_s, u_p + half * 64, token_stride, left)
    _start(dd_s, dd_p + half * 64, token_stride, left)
    _start(S_s, s_p + half * 64 * BK, BK, 64)
    _start(dS_s, ds_p + half * 64 * BK, BK, 64)


@gluon.jit
def _as_operand(do_s, scaled_s, down_s):
    """do as float16 where it lies, with a power of two a token that goes to down_s."""
    x = _wide(do_s.load(ROWS))
    up, down = _power_of_two(gl.max(gl.abs(x), axis=1), 12)
    scaled_s.store((x * up[:, None]).to(gl.float16))
    down_s.store(down)


@gluon.jit
def _quarter(state_s, s, at: gl.constexpr):
    """state^T s^T for 32 of the 64 tokens of s, in two steps of 32 value channels, for fewer registers."""
    x = gl.zeros([CH, 32], gl.float32, MM)
    for v in gl.static_range(2):
        a = state_s.slice(32 * v, 32, dim=0).permute((1, 0)).load(A16)
        x = mma_v2(a, s.slice(at, 32, dim=0).slice(32 * v, 32, dim=1).permute((1, 0)).load(B16), x)
    return x


@gluon.jit
def _token_units(p, left, at: gl.constexpr):
    """Powers of two of 32 of a chunk's tokens, 1 for those that do not exist."""
    t = at + gl.arange(0, 32, layout=TOK)
    return gl.load(p + (t // 16 * 32 + t % 16), t < left, other=1.0)


@gluon.jit
def _by_units(state_s, s, p, factor, left):
    x0 = _quarter(state_s, s, 0) * (_token_units(p, left, 0) * factor)[None, :]
    x1 = _quarter(state_s, s, 32) * (_token_units(p, left, 32) * factor)[None, :]
    return x0, x1


@gluon.jit
def _by_downs(state_s, s, down_s, factor):
    downs = down_s._reinterpret(gl.float32, [2, 32], S1)
    x0 = _quarter(state_s, s, 0) * (downs.index(0).load(TOK) * factor)[None, :]
    x1 = _quarter(state_s, s, 32) * (downs.index(1).load(TOK) * factor)[None, :]
    return x0, x1


@gluon.jit
def _both(S_s, dS_s, unit):
    x = gl.zeros([CH], gl.float32, gl.SliceLayout(1, A16))
    for v in gl.static_range(2):
        a = S_s.slice(32 * v, 32, dim=0).permute((1, 0)).load(A16)
        b = dS_s.slice(32 * v, 32, dim=0).permute((1, 0)).load(A16)
        x += gl.sum(a.to(gl.float32) * b.to(gl.float32), axis=1)
    return x * unit


@gluon.jit
def _put_by(x):
    """The first half of the value channels while the second is computed: float16 with a power of two a row, two tokens a word.
    In float32 three of them filled the registers; the sum is rounded to float16 anyway."""
    x0, x1 = x
    most = gl.maximum(gl.max(gl.abs(x0), axis=1), gl.max(gl.abs(x1), axis=1))
    up, down = _power_of_two(most, 14)
    low = (x0 * up[:, None]).to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    high = (x1 * up[:, None]).to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) << 16
    return low | high, down


@gluon.jit
def _added(x, first):
    word, down = first
    low = word.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    high = (word >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return x[0] + low * down[:, None], x[1] + high * down[:, None]


@gluon.jit
def first_half(tiles, scaled_s, down_s, units, left, scale):
    """d(qd), d(kd), d(ke) and `both` from 64 value channels, which have arrived."""
    do_s, u_s, dd_s, S_s, dS_s = tiles
    u_unit_p, dd_unit_p, s_unit_p, ds_unit_p = units
    s_unit = gl.load(s_unit_p)
    ds_unit = gl.load(ds_unit_p)
    _as_operand(do_s, scaled_s, down_s)
    gl.thread_barrier()
    q = _put_by(_by_downs(S_s, scaled_s, down_s, s_unit * scale))
    k = _put_by(_by_units(S_s, dd_s, dd_unit_p, -s_unit, left))
    e = _put_by(_by_units(dS_s, u_s, u_unit_p, ds_unit, left))
    return q, k, e, _both(S_s, dS_s, s_unit * ds_unit)


@gluon.jit
def second_half(first, tiles, scaled_s, down_s, units, left, scale):
    """The same from the other 64, added; they replace do, dD and U. Returns their units and `both`."""
    do_s, u_s, dd_s, S_s, dS_s = tiles
    u_unit_p, dd_unit_p, s_unit_p, ds_unit_p = units
    q, k, e, both = first
    s_unit = gl.load(s_unit_p + 1)
    ds_unit = gl.load(ds_unit_p + 1)
    _as_operand(do_s, scaled_s, down_s)
    gl.thread_barrier()
    uq = _kept(scaled_s, _added(_by_downs(S_s, scaled_s, down_s, s_unit * scale), q))
    uk = _kept(dd_s, _added(_by_units(S_s, dd_s, dd_unit_p + 16, -s_unit, left), k))
    ue = _kept(u_s, _added(_by_units(dS_s, u_s, u_unit_p + 16, ds_unit, left), e))
    both += _both(S_s, dS_s, s_unit * ds_unit)
    return uq, uk, ue, gl.convert_layout(both, CHAN)


@gluon.jit
def _kept(s, x):
    """x [channels, 64 tokens] as float16 with one power of two, in s [64 tokens, channels], which has been read; what
    multiplies it back."""
    x0, x1 = x
    most = gl.max(gl.maximum(gl.max(gl.abs(x0), axis=1), gl.max(gl.abs(x1), axis=1)), axis=0)
    up, down = _power_of_two(most, 14)
    gl.thread_barrier()
    s.slice(0, 32, dim=0).permute((1, 0)).store((x0 * up).to(gl.float16))
    s.slice(32, 32, dim=0).permute((1, 0)).store((x1 * up).to(gl.float16))
    return down

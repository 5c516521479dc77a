"""Backward, third kernel, on Hopper: the products over value channels that the gradients of one chunk need.

The algebra, the inputs and the outputs are those of `triton/products.py`, for 128 value channels, whose two halves of 64 carry
powers of two of their own. `states_kernel` says what the states say, a program for 64 key channels of a chunk; `pairs_kernel`
says what tokens say of each other, a program a chunk. All of a program's 80 or 48 KB are on their way before anything is
computed; every operand comes from shared memory as it lies there, and only do is scaled to float16 first. dD . U of a token
with itself is the diagonal of what dA is the triangle of.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from openkda.ops.kda.hopper.gradient_tiles import A16, B16, MM, ROWS, S128, _a16, _place, _wide
from openkda.ops.kda.hopper.instructions import ALL_NAN, LOG2E, _ex2

CHAN0 = gl.constexpr(gl.SliceLayout(0, MM.value))
TOK1 = gl.constexpr(gl.SliceLayout(1, MM.value))
ROW1 = gl.constexpr(gl.SliceLayout(1, ROWS.value))
LEAST = gl.constexpr(2.0**-100)
ROW0 = gl.constexpr(gl.SliceLayout(0, ROWS.value))


@gluon.jit
def _power_of_two(x, TOP: gl.constexpr):
    """(s, 1 / s): x * s in [2^TOP, 2^(TOP + 1)); see `power_of_two` in ops/triton/api.py."""
    e = gl.maximum((x.to(gl.int32, bitcast=True) >> 23) & 0xFF, 2 * TOP + 2)
    return ((254 + TOP - e) << 23).to(gl.float32, bitcast=True), ((e - TOP) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _halves(dst, p, stride, left):
    """Starts to copy [64, 128] as two halves of 64 columns, zeros for rows that do not exist."""
    t = gl.arange(0, 64, layout=ROW1)[:, None]
    c = gl.arange(0, 64, layout=ROW0)[None, :]
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(dst.index(half), p + (t * stride + c + 64 * half), t < left)


@gluon.jit
def _blocks(dst, p, stride):
    """Starts to copy [128, 64] as two halves of 64 rows."""
    t = gl.arange(0, 64, layout=ROW1)[:, None]
    c = gl.arange(0, 64, layout=ROW0)[None, :]
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(dst.index(half), p + ((t + 64 * half) * stride + c))


@gluon.jit
def _operand(do_s):
    """do as a float16 operand, a power of two a row, and what multiplies the rows of a product back."""
    x0 = _wide(do_s.index(0).load(MM))
    x1 = _wide(do_s.index(1).load(MM))
    most = gl.maximum(gl.max(gl.abs(x0), axis=1), gl.max(gl.abs(x1), axis=1))
    up, down = _power_of_two(most, 12)
    return _a16((x0 * up[:, None]).to(gl.float16)), _a16((x1 * up[:, None]).to(gl.float16)), down


@gluon.jit
def _times(a, s, half: gl.constexpr, acc):
    """acc + a s for a [64, 64] and half of s [2, 64, 64]."""
    return mma_v2(a, s.index(half).load(B16), acc)


@gluon.jit
def _times_transposed(a, s, half: gl.constexpr, acc):
    return mma_v2(a, s.index(half).permute((1, 0)).load(B16), acc)


@gluon.jit
def _scaled_out(p, p_unit, s, x, stride):
    """x [64, 64] as float16 with one power of two, by way of s."""
    up, down = _power_of_two(gl.max(gl.max(gl.abs(x), axis=1), axis=0), 14)
    gl.store(p_unit, down)
    s.store((x * up).to(gl.float16))
    t = gl.arange(0, 64, layout=ROW1)[:, None]
    c = gl.arange(0, 64, layout=ROW0)[None, :]
    gl.store(p + (t * stride + c), s.load(ROWS))


@gluon.jit(do_not_specialize=["T", "N", "slots", "tiles"])
def states_kernel(
    cu_p, do_p, u_p, dd_p, s_p, ds_p, u_unit_p, dd_unit_p, s_unit_p, ds_unit_p, wide_p, both_p, unit_p,
    sob, sot, soh, T, N, slots, tiles, scale,
    HV: gl.constexpr, BK: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """d(qd), d(kd), d(ke) and `both` of one chunk, value head and 64 key channels."""
    NS: gl.constexpr = BK // 64
    pid = gl.program_id(0)
    part = pid % NS
    h = (pid // NS % HV).to(gl.int64)
    place = pid // NS // HV
    row, left, tile0, batch = _place(cu_p, place, T, N, PACKED)
    if left <= 0:
        return
    block = h * slots + place.to(gl.int64)
    token = (batch * T + row) * HV + h
    u_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S128)
    dd_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S128)
    do_s = gl.allocate_shared_memory(do_p.dtype.element_ty, [2, 64, 64], S128)
    S_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S128)
    dS_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S128)
    _halves(do_s, do_p + batch * sob + h * soh + row * sot, sot, left)
    _blocks(S_s, s_p + block * (128 * BK) + part * 64, BK)
    async_copy.commit_group()
    _halves(dd_s, dd_p + token * 128, HV * 128, left)
    _blocks(dS_s, ds_p + block * (128 * BK) + part * 64, BK)
    _halves(u_s, u_p + token * 128, HV * 128, left)
    async_copy.commit_group()
    t = gl.arange(0, 64, layout=TOK1)
    at = (h * tiles + tile0) * 32 + t // 16 * 32 + t % 16
    real = t < left
    s0 = gl.load(s_unit_p + block * 2)
    s1 = gl.load(s_unit_p + block * 2 + 1)
    e0 = gl.load(ds_unit_p + block * 2)
    e1 = gl.load(ds_unit_p + block * 2 + 1)
    d0 = gl.load(dd_unit_p + at, real, other=0.0) * s0
    d1 = gl.load(dd_unit_p + at + 16, real, other=0.0) * s1
    u0 = gl.load(u_unit_p + at, real, other=0.0) * e0
    u1 = gl.load(u_unit_p + at + 16, real, other=0.0) * e1
    zero = gl.zeros([64, 64], gl.float32, MM)
    async_copy.wait_group(1)
    gl.thread_barrier()
    x0, x1, down = _operand(do_s)
    qd = _times(x0, S_s, 0, zero) * (down * (s0 * scale))[:, None]
    qd += _times(x1, S_s, 1, zero) * (down * (s1 * scale))[:, None]
    async_copy.wait_group(0)
    gl.thread_barrier()
    kd = _times(dd_s.index(0).load(A16), S_s, 0, zero) * (-d0)[:, None]
    kd += _times(dd_s.index(1).load(A16), S_s, 1, zero) * (-d1)[:, None]
    ke = _times(u_s.index(0).load(A16), dS_s, 0, zero) * u0[:, None]
    ke += _times(u_s.index(1).load(A16), dS_s, 1, zero) * u1[:, None]
    both = gl.sum(S_s.index(0).load(ROWS).to(gl.float32) * dS_s.index(0).load(ROWS).to(gl.float32), axis=0) * (s0 * e0)
    both += gl.sum(S_s.index(1).load(ROWS).to(gl.float32) * dS_s.index(1).load(ROWS).to(gl.float32), axis=0) * (s1 * e1)
    gl.store(both_p + block * BK + part * 64 + gl.arange(0, 64, layout=ROW0), both)
    p_unit = unit_p + (block * NS + part) * 4
    p = wide_p + block * (192 * BK) + part * 64
    _scaled_out(p, p_unit + 1, u_s.index(0), qd, BK)
    _scaled_out(p + 64 * BK, p_unit + 2, dd_s.index(0), kd, BK)
    _scaled_out(p + 128 * BK, p_unit + 3, u_s.index(1), ke, BK)


@gluon.jit
def _along(p, stride, s, m, ALSO: gl.constexpr, q, q_stride, unit0, unit1):
    """Row sums of the tensor at p times s [2, 64, 64], whose halves carry powers of two a row; s itself goes to q if ALSO."""
    t = gl.arange(0, 64, layout=ROW1)[:, None]
    c = gl.arange(0, 64, layout=ROW0)[None, :]
    x = _wide(s.index(0).load(ROWS)) * unit0[:, None]
    y = _wide(s.index(1).load(ROWS)) * unit1[:, None]
    a = _wide(gl.load(p + (t * stride + c), m, other=0.0))
    b = _wide(gl.load(p + (t * stride + c + 64), m, other=0.0))
    if ALSO:
        gl.store(q + (t * q_stride + c), x.to(q.dtype.element_ty), m)
        gl.store(q + (t * q_stride + c + 64), y.to(q.dtype.element_ty), m)
    return gl.sum(a * x, axis=1) + gl.sum(b * y, axis=1)


@gluon.jit(do_not_specialize=["B", "T", "N", "slots", "tiles", "sbb", "sbt", "sbh"])
def pairs_kernel(
    v_p, beta_p, cu_p, o_p, do_p, u_p, dd_p, u_unit_p, dd_unit_p, dv_p, d_p, unit_p, dbeta_p, rows_p,
    svb, svt, svh, sbb, sbt, sbh, sob, sot, soh, B, T, N, slots, tiles, scale,
    HV: gl.constexpr, BK: gl.constexpr, PACKED: gl.constexpr, SIGMOID: gl.constexpr, FLOOR: gl.constexpr,
):  # fmt: skip
    """dM, dA, dv, dbeta and the two rows of numbers that the l2norm's backward needs, of one chunk and value head."""
    NS: gl.constexpr = BK // 64
    pid = gl.program_id(0)
    h = (pid % HV).to(gl.int64)
    place = pid // HV
    row, left, tile0, batch = _place(cu_p, place, T, N, PACKED)
    if left <= 0:
        return
    block = h * slots + place.to(gl.int64)
    token = (batch * T + row) * HV + h
    u_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S128)
    dd_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S128)
    do_s = gl.allocate_shared_memory(do_p.dtype.element_ty, [2, 64, 64], S128)
    _halves(do_s, do_p + batch * sob + h * soh + row * sot, sot, left)
    _halves(u_s, u_p + token * 128, HV * 128, left)
    _halves(dd_s, dd_p + token * 128, HV * 128, left)
    async_copy.commit_group()
    t = gl.arange(0, 64, layout=TOK1)
    j = gl.arange(0, 64, layout=CHAN0)
    r = gl.arange(0, 64, layout=ROW1)
    at = (h * tiles + tile0) * 32
    at_t = at + t // 16 * 32 + t % 16
    at_j = at + j // 16 * 32 + j % 16
    at_r = at + r // 16 * 32 + r % 16
    zero = gl.zeros([64, 64], gl.float32, MM)
    one = gl.full([64], 1.0, gl.float32, ROW1)
    async_copy.wait_group(0)
    gl.thread_barrier()
    m = (r < left)[:, None]
    doo = _along(o_p + token * 128, HV * 128, do_s, m, False, o_p, 0, one, one)
    ddv = _along(
        v_p + batch * svb + h * svh + row * svt, svt, dd_s, m, True, dv_p + token * 128, HV * 128,
        gl.load(dd_unit_p + at_r, r < left, other=0.0), gl.load(dd_unit_p + at_r + 16, r < left, other=0.0),
    )  # fmt: skip
    x0, x1, down = _operand(do_s)
    u0 = gl.load(u_unit_p + at_j, j < left, other=0.0)[None, :]
    u1 = gl.load(u_unit_p + at_j + 16, j < left, other=0.0)[None, :]
    d0 = gl.load(dd_unit_p + at_t, t < left, other=0.0)[:, None]
    d1 = gl.load(dd_unit_p + at_t + 16, t < left, other=0.0)[:, None]
    dM = _times_transposed(x0, u_s, 0, zero) * u0
    dM += _times_transposed(x1, u_s, 1, zero) * u1
    dM *= (down * scale)[:, None]
    dA = _times_transposed(dd_s.index(0).load(A16), u_s, 0, zero) * u0 * d0
    dA += _times_transposed(dd_s.index(1).load(A16), u_s, 1, zero) * u1 * d1
    i = t[:, None]
    k = j[None, :]
    ddu = gl.sum(gl.where(i == k, dA, 0.0), axis=1)
    dM = gl.where(i >= k, dM, 0.0)
    dA = gl.where(i > k, -dA, 0.0)
    # Below 2, as gradients.py wants it, which divides by the unit: what is nothing leaves room for the states' terms.
    most = gl.max(gl.max(gl.maximum(gl.abs(dM), gl.abs(dA)), axis=1), axis=0)
    up, unit = _power_of_two(gl.maximum(most, LEAST, propagate_nan=ALL_NAN), 0)
    for part in gl.static_range(NS):
        gl.store(unit_p + (block * NS + part) * 4, unit)
    r2 = r[:, None]
    c = gl.arange(0, 64, layout=ROW0)[None, :]
    u_s.index(0).store((dM * up).to(gl.float16))
    u_s.index(1).store((dA * up).to(gl.float16))
    gl.store(d_p + block * 8192 + (r2 * 64 + c), u_s.index(0).load(ROWS))
    gl.store(d_p + block * 8192 + 4096 + (r2 * 64 + c), u_s.index(1).load(ROWS))
    at = token + r * HV
    ddu = gl.convert_layout(ddu, ROW1)
    beta = gl.load(beta_p + batch * sbb + h * sbh + row * sbt + r * sbt, r < left, other=0.0).to(gl.float32)
    slope = one
    if SIGMOID:
        beta = 1.0 / (1.0 + _ex2(beta * -LOG2E))
        slope = beta * (1.0 - beta)
    beta = gl.where(gl.abs(beta) < FLOOR, FLOOR, beta)
    gl.store(dbeta_p + at, (ddu / beta / beta * slope).to(dbeta_p.dtype.element_ty), r < left)
    gl.store(rows_p + at, doo, r < left)
    gl.store(rows_p + B.to(gl.int64) * T * HV + at, 2.0 * ddu / beta - ddv, r < left)

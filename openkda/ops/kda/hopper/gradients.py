"""Backward, last kernel, on Hopper: the gradients of q, k and the gate input of one chunk of 64 tokens.

The algebra, the inputs and the outputs are those of `triton/gradients.py`, which runs everywhere else. One program owns 64
channels of a chunk. Its 64 KB are on their way before anything is computed; three programs share an SM.

Tiles of 16 tokens, in a loop: unrolled they took a fifth fewer instructions, spilled, and were no faster. Pairs in two tiles
meet at the end of the earlier or the start of the later one: float16 operands, decays of at most one. Pairs inside a tile go
through the tile's start where the gate is bounded (tf32: a decay undone is up to 2^115, which is why d stays below 2), and by
levels of 8, 4, 2 and 1 tokens for any other gate. Sums of log decays are products with zeros and ones of the log decays
rounded to float16 (which moves a weight e^-x by at most 9e-5), as in the Hopper forward.

A pair adds to dP at its row what it subtracts at its column; both sides multiply the same rounded operands (docs/decisions.md).
The sum of dP over later tokens is a product with ones as well, of two tf32 terms, good to 2^-22.

H200, H = 96, T = 8192, K = 128, bfloat16: 0.77 ms bounded, 1.35 softplus; copies and addresses alone 0.51.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from openkda.ops.kda.hopper.gradient_tiles import (
    B16,
    B32,
    BOUNDED,
    CHAN,
    FLAT,
    MM,
    S1,
    S32,
    S128,
    TOK,
    _a16,
    _a32,
    _across,
    _back,
    _fetch,
    _fetch_scores,
    _folded,
    _forth,
    _gate,
    _gate_gradient,
    _inside_bounded,
    _inside_levels,
    _keep,
    _level_table,
    _place,
    _row,
    _tf32,
    _tile,
    _tiles,
    _write,
)
from openkda.ops.kda.hopper.instructions import _ex2, _ex2_neg, _rate


@gluon.jit
def _sums():
    """Right operands of ones: over tokens up to each (float16); over each and those behind it (tf32, tokens as in _a32)."""
    j16 = gl.arange(0, 16, layout=gl.SliceLayout(1, B16))[:, None]
    i16 = gl.arange(0, 16, layout=gl.SliceLayout(0, B16))[None, :]
    until = gl.where(j16 <= i16, 1.0, 0.0).to(gl.float16)
    j32 = gl.arange(0, 16, layout=gl.SliceLayout(1, B32))[:, None]
    i32 = gl.arange(0, 16, layout=gl.SliceLayout(0, B32))[None, :]
    j32 = j32 // 8 * 8 + j32 % 4 * 2 + j32 // 4 % 2
    since = gl.where(j32 >= i32, 1.0, 0.0)
    return until, since


@gluon.jit
def _token_numbers(p_norm, p_rows, k_rows, HV: gl.constexpr, left, per_unit):
    """Four numbers a token, 0 where there is none: the norms' inverses of q and k; q . dq and k . dk in the unit of d."""
    rq_s = gl.allocate_shared_memory(gl.float32, [64], S1)
    rk_s = gl.allocate_shared_memory(gl.float32, [64], S1)
    aq_s = gl.allocate_shared_memory(gl.float32, [64], S1)
    ak_s = gl.allocate_shared_memory(gl.float32, [64], S1)
    t64 = gl.arange(0, 64, layout=FLAT)
    real = t64 < left
    p_n = p_norm + t64 // 16 * 48 + t64 % 16
    p_r = p_rows + t64 * HV
    r_k = gl.load(p_n, real, other=0.0)
    r_q = gl.load(p_n + 16, real, other=0.0)
    a_q = gl.load(p_r, real, other=0.0) * per_unit
    a_k = gl.load(p_r + k_rows, real, other=0.0) * per_unit
    rq_s.store(r_q)
    rk_s.store(r_k)
    aq_s.store(a_q)
    ak_s.store(a_k)
    return rq_s, rk_s, aq_s, ak_s


@gluon.jit
def _first_walk(tiles, r_s, rk_s, dt, until, rate, bound, left, GATE: gl.constexpr):
    """From the last tile to the first: the log2 decay of every tile goes to r_s, keys decayed to their tile's end to f_s.
    Returns what the keys, decayed to the chunk's end, say to the leaving state [channels, 4], and the chunk's log2 decay."""
    k_s, z_s, we_s, f_s = tiles
    tok = gl.arange(0, 16, layout=TOK)[None, :]
    zero = gl.zeros([64, 16], gl.float32, MM)
    written = _folded(zero)
    after = gl.zeros([64], gl.float32, CHAN)
    for turn in range(4):
        t = 3 - turn
        g, _ = _gate(_tile(z_s, t), dt, tok + 16 * t < left, rate, bound, GATE)
        g = g.to(gl.float16)
        k = _tile(k_s, t) * _row(rk_s, t)
        P = mma_v2(_a16(g), until, zero)
        R = gl.min(P, axis=1)  # a sum of log decays falls from token to token: that of the whole tile is the smallest
        if GATE == BOUNDED:
            f = (k * (_ex2_neg(P) * _ex2(R)[:, None])).to(gl.float16)
        else:
            f = (k * _ex2(R[:, None] - P)).to(gl.float16)
        written += _folded(f.to(gl.float32) * (_tile(we_s, t) * _ex2(after)[:, None]))
        after += R
        r_s.index(t).store(R)
        _keep(f_s, t, f)
    return written, after


@gluon.jit
def _from_earlier(M_s, A_s, f_s, r_s, t):
    """What rows of tile t get from pairs with earlier tiles (q, k), and the decay from the chunk's start; their own pending."""
    b = gl.zeros([64, 16], gl.float32, MM)
    c = gl.zeros([64, 16], gl.float32, MM)
    past = gl.zeros([64], gl.float32, CHAN)
    for back in range(t):
        o = t - 1 - back
        f = _a16(f_s.index(o).permute((1, 0)).load(MM) * _ex2(past).to(gl.float16)[:, None])
        b = mma_v2(f, _forth(M_s, t, o), b)
        c = mma_v2(f, _forth(A_s, t, o), c)
        past += r_s.index(o).load(CHAN)
    return b, c, _ex2(past)


@gluon.jit
def _from_later(M_s, A_s, wq_s, wk_s, we_s, f_s, r_s, dP, ue, t):
    """What columns of tile t get from pairs with later tiles and from the leaving state, their own decay pending; and dP."""
    f = f_s.index(t).permute((1, 0)).load(MM)
    zero = gl.zeros([64, 16], gl.float32, MM)
    b = zero
    past = gl.zeros([64], gl.float32, CHAN)
    for o in range(t + 1, 4):
        c = mma_v2(_a16(wq_s.index(o).permute((1, 0)).load(MM)), _back(M_s, o, t), zero)
        c = mma_v2(_a16(wk_s.index(o).permute((1, 0)).load(MM)), _back(A_s, o, t), c)
        w = _ex2(past)
        dP -= (f * w.to(gl.float16)[:, None]).to(gl.float32) * c
        b += c * w[:, None]
        past += r_s.index(o).load(CHAN)
    w = _tile(we_s, t) * (_ex2(past) * ue)[:, None]
    dP -= f.to(gl.float32) * w
    return b + w, dP


@gluon.jit
def _tile_gradients(
    raw, wide, scores, f_s, r_s, numbers, own, t, g, since, until, carry, units, GATE: gl.constexpr,
):  # fmt: skip
    """Replaces tile t of q and k by its gradients, and its wide tiles by what earlier tiles need of it. Returns the gradient of
    the natural log decay, and dP."""
    q_s, k_s = raw
    wq_s, wk_s, we_s = wide
    M_s, A_s = scores
    rq_s, rk_s, aq_s, ak_s = numbers
    ud, uq, uk, ue = units
    zero = gl.zeros([64, 16], gl.float32, MM)
    k = _tile(k_s, t) * _row(rk_s, t)
    q = _tile(q_s, t) * _row(rq_s, t)
    R = r_s.index(t).load(CHAN)
    P = mma_v2(_a16(g), until, zero)
    near = _ex2(P)
    if GATE == BOUNDED:
        # Ten mantissa bits, as float16 has: the same numbers serve both kinds of product and dP.
        q_row = _tf32(q * near)
        k_row = _tf32(k * near)
        far = _ex2_neg(P)
        k_column = _tf32(k * far)
        dq, dk, column = _inside_bounded(q_row, k_row, k_column, M_s, A_s, t, zero)
        qn = q_row.to(gl.float16)
        kn = k_row.to(gl.float16)
    else:
        far = _ex2(R[:, None] - P)
        dq, dk, dP = _inside_levels(q, k, g, own, M_s, A_s, t, zero)
        qn = (q * near).to(gl.float16)
        kn = (k * near).to(gl.float16)
        q_row = qn.to(gl.float32)
        k_row = kn.to(gl.float32)
    b, c, past = _from_earlier(M_s, A_s, f_s, r_s, t)
    b += _tile(wq_s, t) * (past * uq)[:, None]
    if GATE == BOUNDED:
        b += dq
        dP = q_row * b
        dq = near * b
    else:
        dP += q_row * b
        dq += near * b
    c += _tile(wk_s, t) * (past * uk)[:, None]
    if GATE == BOUNDED:
        c += dk
        dP += k_row * c - k_column * column
        dk = near * c
    else:
        dP += k_row * c
        dk += near * c
    b, dP = _from_later(M_s, A_s, wq_s, wk_s, we_s, f_s, r_s, dP, ue, t)
    if GATE == BOUNDED:
        dk += far * (column + b * _ex2(R)[:, None])
    else:
        dk += far * b
    _keep(wq_s, t, qn)
    _keep(wk_s, t, kn)
    _keep(q_s, t, (_row(rq_s, t) * ud) * (dq - q * _row(aq_s, t)))
    _keep(k_s, t, (_row(rk_s, t) * ud) * (dk - k * _row(ak_s, t)))
    coarse = (dP.to(gl.int32, bitcast=True) & -0x2000).to(gl.float32, bitcast=True)
    dg = mma_v2(_a32(coarse), since, carry[:, None] + zero, input_precision="tf32")
    dg = mma_v2(_a32(dP - coarse), since, dg, input_precision="tf32")
    return dg, dP


@gluon.jit(do_not_specialize=["B", "T", "N", "slots", "tiles"])
def gradients_kernel(
    q_p, k_p, g_p, A_log_p, dt_bias_p, cu_p, d_p, wide_p, both_p, unit_p, norm_p, rows_p,
    dq_p, dk_p, dz_p, ddt_p, dA_log_p,
    sqb, sqt, sqh, skb, skt, skh, sgb, sgt, sgh,
    B, T, N, slots, tiles, bound,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, GATE: gl.constexpr,
    HAS_A: gl.constexpr, HAS_DT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """q, k and g may be strided. d [HV, slots, 2, 64, 64] and wide [HV, slots, 3, 64, BK], float16, times unit
    [HV, slots, BK / 64, 4] (of d, d(qd), d(kd), d(ke)), |d| < 2; both [HV, slots, BK]; norm [HV, tiles, 3, 16], of k and q;
    rows [2, B, T, HV]: as for `triton/gradients.py`.
    Writes dq, dk, dz [B, T, HV, K], ddt and dA_log [slots, HV, K].
    """
    NS: gl.constexpr = (BK + 63) // 64
    pid = gl.program_id(0)
    part = pid % NS
    h = (pid // NS % HV).to(gl.int64)
    place = pid // NS // HV
    slot = place.to(gl.int64)
    row, left, tile0, batch = _place(cu_p, place, T, N, PACKED)
    c0 = part * 64
    chan = c0 + gl.arange(0, 64, layout=CHAN)
    m_c = chan < K
    p_sum = (slot * HV + h) * K
    if left <= 0:
        if HAS_DT:
            gl.store(ddt_p + p_sum + chan, gl.zeros([64], gl.float32, CHAN), m_c)
        if HAS_A:
            gl.store(dA_log_p + p_sum + chan, gl.zeros([64], gl.float32, CHAN), m_c)
        return
    block = h * slots + slot

    # One allocation each: a store to one needs no barrier before the next.
    q_s = _tiles(gl.allocate_shared_memory(q_p.dtype.element_ty, [64, 64], S128))
    k_s = _tiles(gl.allocate_shared_memory(q_p.dtype.element_ty, [64, 64], S128))
    z_s = _tiles(gl.allocate_shared_memory(g_p.dtype.element_ty, [64, 64], S128))
    wq_s = _tiles(gl.allocate_shared_memory(gl.float16, [64, 64], S128))
    wk_s = _tiles(gl.allocate_shared_memory(gl.float16, [64, 64], S128))
    we_s = _tiles(gl.allocate_shared_memory(gl.float16, [64, 64], S128))
    f_s = _tiles(gl.allocate_shared_memory(gl.float16, [64, 64], S128))
    M_s = gl.allocate_shared_memory(gl.float16, [16, 16, 16], S32)
    A_s = gl.allocate_shared_memory(gl.float16, [16, 16, 16], S32)
    r_s = gl.allocate_shared_memory(gl.float32, [4, 64], S1)
    _fetch(z_s, g_p + batch * sgb + h * sgh + row * sgt + c0, sgt, left, c0, K)
    _fetch(k_s, k_p + batch * skb + (h // GROUP) * skh + row * skt + c0, skt, left, c0, K)
    p_w = wide_p + block * (3 * 64 * BK) + c0
    _fetch(we_s, p_w + 2 * 64 * BK, BK, 64, c0, BK)
    async_copy.commit_group()
    _fetch(q_s, q_p + batch * sqb + (h // GROUP) * sqh + row * sqt + c0, sqt, left, c0, K)
    _fetch_scores(M_s, d_p + block * 8192)
    _fetch_scores(A_s, d_p + block * 8192 + 4096)
    _fetch(wq_s, p_w, BK, 64, c0, BK)
    _fetch(wk_s, p_w + 64 * BK, BK, 64, c0, BK)
    async_copy.commit_group()

    p_unit = unit_p + (block * NS + part) * 4
    ud = gl.load(p_unit)
    per_unit = 1.0 / ud
    uq = gl.load(p_unit + 1) * per_unit
    uk = gl.load(p_unit + 2) * per_unit
    ue = gl.load(p_unit + 3) * per_unit
    t64 = gl.arange(0, 64, layout=FLAT)
    p_norm = norm_p + (h * tiles + tile0) * 48
    p_rows = rows_p + (batch * T + row) * HV + h
    numbers = _token_numbers(p_norm, p_rows, B.to(gl.int64) * T * HV, HV, left, per_unit)
    if GATE != BOUNDED:
        own_s = gl.allocate_shared_memory(gl.float32, [64], S1)
        own_s.store(gl.load(d_p + block * 8192 + t64 * 65).to(gl.float32))
    rate = 1.0
    if HAS_A:
        rate = _rate(gl.load(A_log_p + h).to(gl.float32))
    dt_bias = gl.zeros([64], gl.float32, CHAN)
    if HAS_DT:
        dt_bias = gl.load(dt_bias_p + h * K + chan, m_c, other=0.0)
    both = gl.load(both_p + block * BK + chan, chan < BK, other=0.0)
    dt = dt_bias[:, None]
    tok = gl.arange(0, 16, layout=TOK)[None, :]
    until, since = _sums()
    zero = gl.zeros([64, 16], gl.float32, MM)
    async_copy.wait_group(1)
    gl.thread_barrier()

    written, after = _first_walk((k_s, z_s, we_s, f_s), r_s, numbers[1], dt, until, rate, bound, left, GATE)
    carry = _across(written) * ue + both * _ex2(after) * per_unit
    async_copy.wait_group(0)
    gl.thread_barrier()
    if GATE != BOUNDED:
        _level_table(M_s, A_s, 4, 8)
        _level_table(M_s, A_s, 8, 4)
        _level_table(M_s, A_s, 9, 2)
        _level_table(M_s, A_s, 12, 1)
    ddt = _folded(zero)
    dA = _folded(gl.zeros([64, 16], gl.float32, MM))
    for turn in range(4):
        t = 3 - turn
        z = _tile(z_s, t)
        real = tok + 16 * t < left
        g, s = _gate(z, dt, real, rate, bound, GATE)
        own = 0.0
        if GATE != BOUNDED:
            own = _row(own_s, t)
        dg, dP = _tile_gradients(
            (q_s, k_s), (wq_s, wk_s, we_s), (M_s, A_s), f_s, r_s, numbers, own, t, g.to(gl.float16), since, until,
            carry, (ud, uq, uk, ue), GATE,
        )  # fmt: skip
        carry += gl.sum(dP, axis=1)
        dz, da = _gate_gradient(dg, z, dt, real, s, rate, bound, ud, GATE)
        _keep(z_s, t, dz)
        if HAS_DT or HAS_A:
            ddt += _folded(dz)
        if HAS_A:
            dA += _folded(da)
    gl.thread_barrier()
    out = ((batch * T + row) * HV + h) * K + c0
    _write(dq_p + out, q_s, HV * K, left, c0, K)
    _write(dk_p + out, k_s, HV * K, left, c0, K)
    _write(dz_p + out, z_s, HV * K, left, c0, K)
    ddt = _across(ddt)
    dA = _across(dA)
    if GATE == BOUNDED:
        dA += dt_bias * ddt
    if HAS_DT:
        gl.store(ddt_p + p_sum + chan, ddt, m_c)
    if HAS_A:
        gl.store(dA_log_p + p_sum + chan, dA, m_c)

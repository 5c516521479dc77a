"""Backward, the forward's walk over chunks once more (half of `walks.py`), for what the gradients need of it.

    U = T v - w S        S <- Diag(decay) S + ke^T U            w = T kd of `prepare.py`

as in `scan.py`, without outputs; it leaves U, and S at the start of every SAVE-th chunk. In `scan.py` U = T (v - kd S): the
same, with one more product in the chain from state to state.

In 16 bits what is kept is float16 with a power of two a chunk and block of value channels: bfloat16, which needs none, showed
as up to 2.7e-2 of dv and dq for keys of nearly one direction, where sums over tokens cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import power_of_two, round_mantissa

D_LIMIT = tl.constexpr(1e36)


@triton.jit
def largest(x):
    """Of each row of [BV, n]."""
    return tl.max(tl.abs(x), axis=1)


@triton.jit
def operand(x, size, OP: tl.constexpr):
    """For float32 x [BV, n] with rows up to `size` the left side of a product, and what multiplies each row of that back."""
    if tl.float16 == OP:
        up, down = power_of_two(size, 12)
        return (x * up[:, None]).to(OP), down
    else:
        return x.to(OP), size * 0.0 + 1.0


@triton.jit
def keep_tokens(p, p_unit, x, m):
    """Stores x [BV, n] transposed, its columns being tokens: in float16 each with a power of two of its own, so that no token
    takes another one's bits."""
    if tl.float16 == p.dtype.element_ty:
        up, down = power_of_two(tl.max(tl.abs(x), axis=0), 12)
        tl.store(p_unit, down)
        x *= up[None, :]
    tl.store(p, tl.trans(x).to(p.dtype.element_ty), m)


@triton.jit
def keep_state(p, p_unit, Z, size, rows, m):
    """Stores Z times `rows`, whose rows are up to `size`: in float16 with one power of two for all, so that products over value
    channels need no work for it."""
    if tl.float16 == p.dtype.element_ty:
        up, down = power_of_two(tl.max(size, axis=0), 12)
        tl.store(p_unit, down)
        rows *= up
    tl.store(p, (Z * rows[:, None]).to(p.dtype.element_ty), m)


@triton.jit
def joint(state, x, OP: tl.constexpr):
    """(up, down) [BV] for an update of rows up to x that is added to rows up to `state` in one accumulator: a small update must
    not scale the state past float32's range."""
    if tl.float16 == OP:
        return power_of_two(tl.maximum(x, state * 1e-4), 12)
    else:
        return x * 0.0 + 1.0, x * 0.0 + 1.0


@triton.jit
def place(n, cu_p, T, C: tl.constexpr, SAVE: tl.constexpr, PACKED: tl.constexpr):
    """Of sequence n: batch row, first token, length, first chunk, first kept state."""
    if PACKED:
        start = tl.load(cu_p + n).to(tl.int64)
        length = (tl.load(cu_p + n + 1).to(tl.int64) - start).to(tl.int32)
        return n * 0, start, length, start // C + n, start // (C * SAVE) + n
    else:
        return n, n * 0, T, n * tl.cdiv(T, C), n * tl.cdiv(T, C * SAVE)


@triton.jit
def replay(
    v_p, u_p, cu_p, s0_p, s_p, u_unit_p, s_unit_p,
    w_p, ke_p, tm_p, decay_p, unit_p, token_p,
    svb, svt, svh, s0n, s0h, s0k, s0v,
    n, h, j, x, T, slots, saves,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SAVE: tl.constexpr, PACKED: tl.constexpr, HAS_S0: tl.constexpr, SCALED: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr, o_p=None, kd_p=None, qd_p=None, scale=1.0, OUT: tl.constexpr = False,
):  # fmt: skip
    """The value channels x, block j, of head h of sequence n. Returns the last state S and what its rows are multiplied by.

    OUT: the output too, from M T: o = scale (qd S + M T (v - kd S)).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    batch, start, length, slot, save = place(n, cu_p, T, C, SAVE, PACKED)
    t = tl.arange(0, C)
    c = tl.arange(0, BK)
    S = tl.zeros([BV, BK], tl.float32)
    rows = tl.full([BV], 1.0, tl.float32)  # the state is S times this: rescaling it would be one more pass over it
    if HAS_S0:
        p_s0 = s0_p + n * s0n + h * s0h + x[:, None] * s0v + c[None, :] * s0k
        S = tl.load(p_s0, (x < V)[:, None] & (c < K)[None, :], other=0.0).to(tl.float32)

    block = h * slots + slot
    p_wide = block * (C * BK) + t[:, None] * BK + c[None, :]
    p_square = tm_p + block * (2 * C * C) + t[:, None] * C + t[None, :]
    p_decay = decay_p + block * BK + c
    p_unit = unit_p + block * (2 * C) + t
    p_token = token_p + block * (3 * C) + t
    p_s = s_p + (h * saves + save) * (V * BK) + x[:, None] * BK + c[None, :]
    p_s_unit = s_unit_p + (h * saves + save) * NV + j
    p_u_unit = u_unit_p + (block * NV + j) * C + t
    p_v = v_p + batch * svb + h * svh + (start + t)[:, None] * svt + x[None, :]
    p_u = u_p + ((batch * T + start + t)[:, None] * HV + h) * V + x[None, :]
    if OUT:
        p_o = o_p + ((batch * T + start + t)[:, None] * HV + h) * V + x[None, :]
    for i in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        m_v = (t < length - i * C)[:, None] & (x < V)[None, :]
        w = tl.load(w_p + p_wide)
        ke = tl.load(ke_p + p_wide)
        T1 = tl.load(p_square)
        w_unit = tl.load(p_unit)
        vt = tl.trans(tl.load(p_v, m_v, other=0.0)).to(tl.float32)
        if SCALED:
            vt *= tl.load(p_token)[None, :]
        size = largest(S)
        a, down = operand(S, size, OP)
        size *= rows
        if i % SAVE == 0:
            keep_state(p_s + (i // SAVE) * (V * BK), p_s_unit + (i // SAVE) * NV, S, size, rows, (x < V)[:, None])
        U = tl.dot(round_mantissa(vt, PREC), tl.trans(T1), input_precision=PREC)
        U -= tl.dot(a, tl.trans(w), input_precision=PREC) * (down * rows)[:, None] * w_unit[None, :]
        u_size = largest(U)
        keep_tokens(p_u, p_u_unit, U, m_v)
        if OUT:
            D = vt - tl.dot(a, tl.trans(tl.load(kd_p + p_wide)), input_precision=PREC) * (down * rows)[:, None]
            D = tl.clamp(D, -D_LIMIT, D_LIMIT, propagate_nan=tl.PropagateNan.ALL)
            O = tl.dot(a, tl.trans(tl.load(qd_p + p_wide)), input_precision=PREC) * (down * rows)[:, None]
            O += tl.dot(round_mantissa(D, PREC), tl.trans(tl.load(p_square + C * C)), input_precision=PREC)
            O *= scale
            if SCALED:
                O *= 1.0 / tl.load(p_token + C)[None, :]
            tl.store(p_o, tl.trans(O).to(o_p.dtype.element_ty), m_v)
            p_o += C * (HV * V)
        up, down = joint(size, u_size, OP)
        decay = tl.load(p_decay)  # here and not above: 32 registers
        S = tl.dot((U * up[:, None]).to(OP), ke, S * decay[None, :] * (rows * up)[:, None], input_precision=PREC)
        rows = down
        p_wide += C * BK
        p_square += 2 * C * C
        p_decay += BK
        p_unit += 2 * C
        p_token += 3 * C
        p_u_unit += NV * C
        p_v += C * svt
        p_u += C * (HV * V)
    return S, rows

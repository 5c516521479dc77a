"""Backward, the serial walk from the last chunk to the first that carries the state's gradient (the other half of `walks.py`).

With T, M, kd, qd, ke and decay of `prepare.py`, one chunk of the forward is, from the entering state S,

    D = v - kd S        U = T D        o = scale (qd S + M U)        S' = Diag(decay) S + ke^T U

and its reverse, from the gradient dS' of the leaving state and do of the output,

    dD = T^T (scale M^T do + ke dS') = scale (M T)^T do + y dS'          y = T^T ke
    dS = Diag(decay) dS' + scale qd^T do - kd^T dD

dD is the gradient of v. A program owns BV value channels of one head of one sequence, holds dS^T [BV, BK] in float32
registers, and leaves dD, and dS' of every SAVE chunks (for `products.py`).

float16 operands carry a power of two per value channel, since nothing bounds a gradient; M T, which is small, is met in
tf32, which has float32's range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.replay import joint, keep_state, keep_tokens, largest, operand, place
from openkda.ops.triton.api import round_mantissa


@triton.jit
def reverse(
    dS, rows, do_p, dd_p, cu_p, ds1_p, ds_p, dd_unit_p, ds_unit_p,
    kd_p, qd_p, y_p, tm_p, decay_p, unit_p, token_p,
    sob, sot, soh, s1n, s1h, s1k, s1v,
    n, h, j, x, T, slots, saves, scale,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SAVE: tl.constexpr, PACKED: tl.constexpr, HAS_DS1: tl.constexpr, HAS_DO: tl.constexpr,
    SCALED: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The value channels x, block j, of head h of sequence n: dS^T [BV, BK] times rows [BV] of the state after it -> of
    the state before it."""
    NV: tl.constexpr = (V + BV - 1) // BV
    batch, start, length, slot, save = place(n, cu_p, T, C, SAVE, PACKED)
    t = tl.arange(0, C)
    c = tl.arange(0, BK)
    if HAS_DS1:
        m_s = (x < V)[:, None] & (c < K)[None, :]
        dS = dS * rows[:, None]
        rows = rows * 0.0 + 1.0
        dS += tl.load(ds1_p + n * s1n + h * s1h + x[:, None] * s1v + c[None, :] * s1k, m_s, other=0.0).to(tl.float32)

    chunks = tl.cdiv(length, C)
    block = h * slots + slot + chunks - 1
    p_wide = block * (C * BK) + t[:, None] * BK + c[None, :]
    p_square = tm_p + block * (2 * C * C) + C * C + t[:, None] * C + t[None, :]
    p_decay = decay_p + block * BK + c
    p_unit = unit_p + block * (2 * C) + C + t
    p_token = token_p + block * (3 * C) + C + t
    p_ds = ds_p + (h * saves + save) * (V * BK) + x[:, None] * BK + c[None, :]
    p_ds_unit = ds_unit_p + (h * saves + save) * NV + j
    p_dd_unit = dd_unit_p + (block * NV + j) * C + t
    row = start + (chunks - 1) * C + t
    if HAS_DO:
        p_do = do_p + batch * sob + h * soh + row[:, None] * sot + x[None, :]
    p_dd = dd_p + ((batch * T + row)[:, None] * HV + h) * V + x[None, :]
    for i in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - i
        m_v = (t < length - chunk * C)[:, None] & (x < V)[None, :]
        y = tl.load(y_p + p_wide)
        kd = tl.load(kd_p + p_wide)
        y_unit = tl.load(p_unit)
        size = largest(dS)
        a, down = operand(dS, size, OP)
        size *= rows
        if (chunk % SAVE == SAVE - 1) | (i == 0):
            at = chunk // SAVE
            keep_state(p_ds + at * (V * BK), p_ds_unit + at * NV, dS, size, rows, (x < V)[:, None])
        dD = tl.dot(a, tl.trans(y), input_precision=PREC) * (down * rows)[:, None] * y_unit[None, :]
        if HAS_DO:
            qd = tl.load(qd_p + p_wide)
            MT = tl.load(p_square)
            dot = tl.trans(tl.load(p_do, m_v, other=0.0)).to(tl.float32) * scale
            if SCALED:
                dot *= 1.0 / tl.load(p_token)[None, :]
            dD = tl.dot(round_mantissa(dot, PREC), MT, dD, input_precision=PREC)
        d_size = largest(dD)
        keep_tokens(p_dd, p_dd_unit, dD, m_v)
        if HAS_DO:
            d_size = tl.maximum(d_size, largest(dot))
        up, down = joint(size, d_size, OP)
        decay = tl.load(p_decay)  # here and not above: 32 registers
        dS *= decay[None, :] * (rows * up)[:, None]
        dS = tl.dot((dD * -up[:, None]).to(OP), kd, dS, input_precision=PREC)
        if HAS_DO:
            dS = tl.dot((dot * up[:, None]).to(OP), qd, dS, input_precision=PREC)
        rows = down
        p_wide -= C * BK
        p_square -= 2 * C * C
        p_decay -= BK
        p_unit -= 2 * C
        p_token -= 3 * C
        p_dd_unit -= NV * C
        if HAS_DO:
            p_do -= C * sot
        p_dd -= C * (HV * V)
    return dS, rows

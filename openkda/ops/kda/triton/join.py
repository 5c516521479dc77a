"""Backward, second kernel: four tiles of 16 tokens, as `prepare.py` leaves them, become one chunk of 64.

A walk over chunks of 64 takes a quarter of the steps of one over tiles. With kd, qd, ke, T, M and decay of the tiles, and d_i
the decay of tile i, those of the chunk are

    kd, qd of tile i: times d_0 .. d_(i - 1)          ke of tile i: times d_(i + 1) .. d_3
    scores between tiles, levels 16 and 32:  L_ij = kd_i (d between) ke_j^T      M_ij = qd_i (d between) ke_j^T
    T = (I + T_tiles L)^-1 T_tiles, by block substitution: W <- W - W L W for level 16, then for level 32

Preparing chunks of 64 in one go took two and a half times the instructions: masks over [64, 64] in every slice of channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.gate_math import find_sequence, round_mantissa
from openkda.ops.kda.triton.gradients import across
from openkda.ops.kda.triton.prepare import X_LIMIT


@triton.jit
def _decay(p, tile, count, m_c, BK: tl.constexpr):
    """Decay of a tile [4, BC]; 1 where there is no such tile."""
    return tl.load(p + tile * BK, ((tile >= 0) & (tile < count)) & m_c, other=1.0)


@triton.jit
def _below(W, L, PREC: tl.constexpr):
    """One step of the block substitution."""
    x = round_mantissa(W, PREC)
    inner = tl.dot(round_mantissa(L, PREC), x, input_precision=PREC)
    W -= tl.dot(x, round_mantissa(inner, PREC), input_precision=PREC)
    return tl.clamp(W, -X_LIMIT, X_LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["T", "N", "slots", "tiles"])
def join_kernel(
    cu_p, kd_p, qd_p, ke_p, tm_p, decay_p, kd64_p, qd64_p, ke64_p, tm64_p, decay64_p,
    T, N, slots, tiles,
    HV: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One program a chunk and value head. Reads [HV, tiles, 16, BK], [HV, tiles, 2, 16, 16] and [HV, tiles, BK]; writes
    [HV, slots, 64, BK], [HV, slots, 2, 64, 64] and [HV, slots, BK]."""
    C: tl.constexpr = 64
    pid = tl.program_id(0).to(tl.int64)
    h = pid % HV
    slot = pid // HV
    if PACKED:
        n = find_sequence(slot, cu_p, N, C)
        start = tl.load(cu_p + n).to(tl.int64)
        first = (slot - (start // C + n)) * C
        length = tl.load(cu_p + n + 1).to(tl.int64) - start
        tile0 = start // 16 + n + first // 16
    else:
        per = tl.cdiv(T, C)
        first = (slot % per) * C
        length = T.to(tl.int64)
        tile0 = slot // per * tl.cdiv(T, 16) + first // 16
    if first >= length:
        return
    left = (length - first).to(tl.int32)
    count = tl.minimum((left + 15) // 16, 4)
    block = h * slots + slot
    base = h * tiles + tile0
    tile = tl.arange(0, 4)[:, None]
    row = tile * 16 + tl.arange(0, 16)[None, :]
    m = (row < count * 16)[:, :, None]
    A16 = tl.zeros([C, C], tl.float32)
    M16 = tl.zeros([C, C], tl.float32)
    A32 = tl.zeros([C, C], tl.float32)
    M32 = tl.zeros([C, C], tl.float32)
    for c0 in tl.range(0, BK, BC, num_stages=1):
        c = c0 + tl.arange(0, BC)
        m_c = (c < BK)[None, :]
        at = row[:, :, None] * BK + c[None, None, :]
        kd = tl.load(kd_p + base * (16 * BK) + at, m, other=0.0)
        qd = tl.load(qd_p + base * (16 * BK) + at, m, other=0.0)
        ke = tl.load(ke_p + base * (16 * BK) + at, m, other=0.0)
        kt = tl.trans(tl.reshape(ke, [C, BC]))
        A16 = tl.dot(tl.reshape(kd, [C, BC]), kt, A16, input_precision=PREC)
        M16 = tl.dot(tl.reshape(qd, [C, BC]), kt, M16, input_precision=PREC)
        p_decay = decay_p + base * BK + c[None, :]
        before = _decay(p_decay, tile - 1, count, m_c, BK)
        after = _decay(p_decay, tile + 1, count, m_c, BK)
        near = tl.where(tile == 3, before, 1.0)[:, None, :]
        far = tl.where(tile == 0, after, 1.0)[:, None, :]
        kt = tl.trans(tl.reshape((ke * far).to(OP), [C, BC]))
        A32 = tl.dot(tl.reshape((kd * near).to(OP), [C, BC]), kt, A32, input_precision=PREC)
        M32 = tl.dot(tl.reshape((qd * near).to(OP), [C, BC]), kt, M32, input_precision=PREC)
        before *= _decay(p_decay, tile - 2, count, m_c, BK) * _decay(p_decay, tile - 3, count, m_c, BK)
        after *= _decay(p_decay, tile + 2, count, m_c, BK) * _decay(p_decay, tile + 3, count, m_c, BK)
        tl.store(kd64_p + block * (C * BK) + at, (kd * before[:, None, :]).to(OP))
        tl.store(qd64_p + block * (C * BK) + at, (qd * before[:, None, :]).to(OP))
        tl.store(ke64_p + block * (C * BK) + at, (ke * after[:, None, :]).to(OP))
        whole = after * _decay(p_decay, tile, count, m_c, BK)
        tl.store(decay64_p + block * BK + tile * 0 + c[None, :], whole, (tile == 0) & m_c)

    t = tl.arange(0, C)
    i = t[:, None]
    j = t[None, :]
    same = (i // 16 == j // 16) & (i // 16 < count)
    p_tile = tm_p + (base + i // 16) * 512 + i % 16 * 16 + j % 16
    square = tm64_p + block * (2 * C * C) + i * C + j
    M = tl.load(p_tile + 256, same, other=0.0)
    M = tl.where(across(i, j, 16), M16, tl.where(across(i, j, 32), M32, M))
    tl.store(square + C * C, M.to(tm64_p.dtype.element_ty))
    W = tl.load(p_tile, same, other=0.0)
    W = _below(W, tl.where(across(i, j, 16), A16, 0.0), PREC)
    W = _below(W, tl.where(across(i, j, 32), A32, 0.0), PREC)
    tl.store(square, W.to(tm64_p.dtype.element_ty))

"""Backward, second kernel: the two serial walks at once, forwards for states (`replay.py`) and backwards for their gradients
(`reverse_scan.py`). Neither needs anything of the other, and each is a chain of small products that leaves most of a processor
idle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.kda.triton.replay import replay
from openkda.ops.kda.triton.reverse_scan import reverse


@triton.jit(do_not_specialize=["T", "N", "slots", "saves", "reverses"])
def walks_kernel(
    v_p, do_p, u_p, dd_p, cu_p, chain_p, s0_p, s_p, ds1_p, ds0_p, ds_p, u_unit_p, dd_unit_p, s_unit_p, ds_unit_p,
    kd_p, qd_p, ke_p, w_p, y_p, tm_p, decay_p, unit_p, token_p,
    svb, svt, svh, sob, sot, soh, s0n, s0h, s0k, s0v, s1n, s1h, s1k, s1v,
    T, N, slots, saves, reverses, scale,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SAVE: tl.constexpr, PACKED: tl.constexpr, CHAIN: tl.constexpr, HAS_S0: tl.constexpr, HAS_DS1: tl.constexpr,
    HAS_DS0: tl.constexpr, HAS_DO: tl.constexpr, SCALED: tl.constexpr, OP: tl.constexpr,
    PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (direction, sequence, value head, block of BV value channels); the first `reverses` go backwards.

    s, ds [HV, saves, V, BK] with a power of two each [HV, saves, NV], u, dd [B, T, HV, V] with one per token [HV, slots, NV, C]
    in 16 bits; ds0 [sequences, HV, K, V]. With CHAIN backward sequence n is the members chain[n] .. chain[n + 1] - 1 of the
    pack, and the gradient of every member's last state is added on the way (`positions.py`).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    backwards = pid < reverses
    if not backwards:
        pid -= reverses
    j = pid % NV
    x = j * BV + tl.arange(0, BV)
    h = (pid // NV % HV).to(tl.int64)
    n = (pid // NV // HV).to(tl.int64)
    if backwards:
        dS = tl.zeros([BV, BK], tl.float32)
        rows = tl.full([BV], 1.0, tl.float32)
        if CHAIN:
            first = tl.load(chain_p + n)
            members = (tl.load(chain_p + n + 1) - first).to(tl.int32)
            for back in tl.range(0, members):
                dS, rows = reverse(
                    dS, rows, do_p, dd_p, cu_p, ds1_p, ds_p, dd_unit_p, ds_unit_p, kd_p, qd_p, y_p, tm_p, decay_p, unit_p,
                    token_p, sob, sot, soh, s1n, s1h, s1k, s1v, first + members - 1 - back, h, j, x, T, slots, saves, scale,
                    HV, K, BK, V, BV, C, SAVE, PACKED, HAS_DS1, HAS_DO, SCALED, OP, PREC, STAGES,
                )  # fmt: skip
        else:
            dS, rows = reverse(
                dS, rows, do_p, dd_p, cu_p, ds1_p, ds_p, dd_unit_p, ds_unit_p, kd_p, qd_p, y_p, tm_p, decay_p, unit_p,
                token_p, sob, sot, soh, s1n, s1h, s1k, s1v, n, h, j, x, T, slots, saves, scale,
                HV, K, BK, V, BV, C, SAVE, PACKED, HAS_DS1, HAS_DO, SCALED, OP, PREC, STAGES,
            )  # fmt: skip
        if HAS_DS0:
            c = tl.arange(0, BK)
            m_s = (x < V)[:, None] & (c < K)[None, :]
            tl.store(ds0_p + (n * HV + h) * (K * V) + c[None, :] * V + x[:, None], dS * rows[:, None], m_s)
    else:
        replay(
            v_p, u_p, cu_p, s0_p, s_p, u_unit_p, s_unit_p, w_p, ke_p, tm_p, decay_p, unit_p, token_p,
            svb, svt, svh, s0n, s0h, s0k, s0v, n, h, j, x, T, slots, saves,
            HV, K, BK, V, BV, C, SAVE, PACKED, HAS_S0, SCALED, OP, PREC, STAGES,
        )  # fmt: skip

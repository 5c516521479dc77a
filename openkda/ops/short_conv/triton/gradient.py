"""Backward of the short convolution: one walk over the tokens of a block gives dx, the state's gradient and a partial dw.

    u = sum_j w_j x_{t-3+j}      du_t = dy_t silu'(u_t)      dx_s = sum_j w_j du_{s+3-j}      dw_j = sum_t du_t x_{t-3+j}

dx of a token needs du of the next three, so a program walks three tokens beyond its own and sums dw over its own only. The
programs' partial sums are added in a second stage: no atomics, two runs are bit-equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.short_conv.triton.conv import locate, mix, silu_slope, taps, tensor_blocks, window


@triton.jit
def _token(
    p_x, p_g, p_f, p_dx, p_ds, sfw, a, b, c, ua, ub, uc, wa, wb, wc, wx, t, first, stop, length, m,
    W: tl.constexpr, HAS_S: tl.constexpr, HAS_F: tl.constexpr, SILU: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """Token t, which may lie behind the end: its x and du, and dx of token t - 3 on its way out."""
    live = m & (t < length)
    x = tl.load(p_x, live, other=0.0).to(tl.float32)
    u = tl.load(p_g, live, other=0.0).to(tl.float32)
    if SILU:
        _, slope = silu_slope(mix(a, b, c, x, wa, wb, wc, wx, W), QUICK)
        u *= slope
    dx = mix(u, uc, ub, ua, wa, wb, wc, wx, W)
    e = t - 3
    if HAS_F:
        last = (e >= length - (W - 1)) & (e >= 1 - W) & (e < length)
        dx += tl.load(p_f + (e - length + W - 1) * sfw, m & last, other=0.0).to(tl.float32)
    tl.store(p_dx, dx.to(p_dx.dtype.element_ty), m & (e >= first) & (e < stop))
    if HAS_S:
        tl.store(p_ds + e + W - 1, dx.to(p_ds.dtype.element_ty), m & (first == 0) & (e < 0) & (e >= 1 - W))
    return x, u


@triton.jit
def _block(
    x_p, s_p, g_p, f_p, dx_p, ds_p, wa, wb, wc, wx, pa, pb, pc, px,
    sxr, sxt, ssn, ssd, ssw, sgr, sgt, sfn, sfd, sfw, D, d, m, n, batch, start, length, first, T,
    BT: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, HAS_S: tl.constexpr, HAS_F: tl.constexpr,
    SILU: tl.constexpr, QUICK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes dx of the block's tokens, and with its sequence's first block ds; returns dw's sums with this block added."""
    x_p += (batch * sxr + start) * sxt + d
    old = x_p
    p_ds = ds_p
    p_f = f_p
    if HAS_S:
        old = s_p + n * ssn + d * ssd
        p_ds = ds_p + (n * D + d) * (W - 1)
    if HAS_F:
        p_f = f_p + n * sfn + d * sfd
    a, b, c = window(x_p, old, sxt, ssw, first, m, BD, W, HAS_S)
    stop = tl.minimum(first + BT, length)
    # Three zeros, not three names of one: Triton 3.6 takes a name that ends a loop's body as what another one was before the
    # loop for unchanged when both were the same value then, so ua would stay zero with two tokens a step.
    ua = tl.zeros([BD], tl.float32)
    ub = tl.zeros([BD], tl.float32)
    uc = tl.zeros([BD], tl.float32)
    p_x = x_p + first.to(tl.int64) * sxt
    p_g = g_p + (batch * sgr + start + first) * sgt + d
    p_dx = dx_p + (batch * T + start + first - 3) * D + d
    for t in tl.range(first, stop, STEP, num_stages=STAGES):
        for j in tl.static_range(STEP):
            x, u = _token(p_x, p_g, p_f, p_dx, p_ds, sfw, a, b, c, ua, ub, uc, wa, wb, wc, wx, t + j, first, stop, length, m,
                          W, HAS_S, HAS_F, SILU, QUICK)  # fmt: skip
            if W == 4:
                pa += u * a
            if W >= 3:
                pb += u * b
            pc += u * c
            px += u * x
            a, b, c = b, c, x
            ua, ub, uc = ub, uc, u
            p_x += sxt
            p_g += sgt
            p_dx += D
    # Three tokens more. Beyond a whole number of steps, or behind the sequence's end, they are dead: zeros.
    behind = first + (stop - first + STEP - 1) // STEP * STEP
    for j in tl.static_range(3):
        x, u = _token(p_x, p_g, p_f, p_dx, p_ds, sfw, a, b, c, ua, ub, uc, wa, wb, wc, wx, behind + j, first, stop, length, m,
                      W, HAS_S, HAS_F, SILU, QUICK)  # fmt: skip
        a, b, c = b, c, x
        ua, ub, uc = ub, uc, u
        p_x += sxt
        p_g += sgt
        p_dx += D
    return pa, pb, pc, px


@triton.jit
def _walk(
    x_p, w_p, s_p, g_p, f_p, dx_p, ds_p, dw_p, sxr, sxt, ssn, ssd, ssw, sgr, sgt, sfn, sfd, sfw, D,
    block, group, cu_p, T, N, slots, GROUP,
    BT: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr,
    HAS_S: tl.constexpr, HAS_F: tl.constexpr, SILU: tl.constexpr, QUICK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GROUP consecutive blocks of tokens, BD channels of one tensor: their sum of dw goes to row `group` of dw_p [., 4, D]."""
    d = block * BD + tl.arange(0, BD)
    m = d < D
    wa, wb, wc, wx = taps(w_p, d, m, W)
    pa = tl.zeros([BD], tl.float32)
    pb = tl.zeros([BD], tl.float32)
    pc = tl.zeros([BD], tl.float32)
    px = tl.zeros([BD], tl.float32)
    for slot in range(group * GROUP, tl.minimum(group * GROUP + GROUP, slots)):
        n, batch, start, length, first = locate(slot, cu_p, T, N, BT, PACKED)
        if (first < length) | (first == 0):
            pa, pb, pc, px = _block(
                x_p, s_p, g_p, f_p, dx_p, ds_p, wa, wb, wc, wx, pa, pb, pc, px,
                sxr, sxt, ssn, ssd, ssw, sgr, sgt, sfn, sfd, sfw, D, d, m, n, batch, start, length, first, T,
                BT, BD, STEP, W, HAS_S, HAS_F, SILU, QUICK, STAGES,
            )  # fmt: skip
    p = dw_p + group.to(tl.int64) * 4 * D + d
    tl.store(p, pa, m)
    tl.store(p + D, pb, m)
    tl.store(p + 2 * D, pc, m)
    tl.store(p + 3 * D, px, m)


@triton.jit(do_not_specialize=["xar", "xbr", "xcr", "gar", "gbr", "gcr", "T", "N", "slots", "GROUP"])
def conv_gradient_kernel(
    xa_p, wa_p, sa_p, ga_p, fa_p, dxa_p, dsa_p, dwa_p, xb_p, wb_p, sb_p, gb_p, fb_p, dxb_p, dsb_p, dwb_p,
    xc_p, wc_p, sc_p, gc_p, fc_p, dxc_p, dsc_p, dwc_p, cu_p,
    xar, xat, san, sad, saw, gar, gat, fan, fad, faw, DA, xbr, xbt, sbn, sbd, sbw, gbr, gbt, fbn, fbd, fbw, DB,
    xcr, xct, scn, scd, scw, gcr, gct, fcn, fcd, fcw, DC, T, N, slots, GROUP,
    BT: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr,
    PACKED: tl.constexpr, HAS_S: tl.constexpr, HAS_F: tl.constexpr, SILU: tl.constexpr, QUICK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program GROUP blocks of BT tokens and BD channels of one of COUNT tensors. dx [B, T, D], ds [N, D, W - 1]."""
    pid = tl.program_id(0)
    NA, NB, blocks = tensor_blocks(DA, DB, DC, BD, COUNT)
    block = pid % blocks
    group = pid // blocks
    if block < NA:
        _walk(xa_p, wa_p, sa_p, ga_p, fa_p, dxa_p, dsa_p, dwa_p, xar, xat, san, sad, saw, gar, gat, fan, fad, faw, DA,
              block, group, cu_p, T, N, slots, GROUP, BT, BD, STEP, W, PACKED, HAS_S, HAS_F, SILU, QUICK, STAGES)  # fmt: skip
    elif COUNT > 1:
        if block < NA + NB:
            _walk(xb_p, wb_p, sb_p, gb_p, fb_p, dxb_p, dsb_p, dwb_p, xbr, xbt, sbn, sbd, sbw, gbr, gbt, fbn, fbd, fbw,
                  DB, block - NA, group, cu_p, T, N, slots, GROUP,
                  BT, BD, STEP, W, PACKED, HAS_S, HAS_F, SILU, QUICK, STAGES)  # fmt: skip
        elif COUNT > 2:
            _walk(xc_p, wc_p, sc_p, gc_p, fc_p, dxc_p, dsc_p, dwc_p, xcr, xct, scn, scd, scw, gcr, gct, fcn, fcd, fcw,
                  DC, block - NA - NB, group, cu_p, T, N, slots, GROUP,
                  BT, BD, STEP, W, PACKED, HAS_S, HAS_F, SILU, QUICK, STAGES)  # fmt: skip

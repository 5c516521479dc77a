"""The state role of the fused kernel (forward.py): two warpgroups, 64 value channels each, and every other inversion."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openkda.ops.kda.hopper.chains import LENTRY, field, receive
from openkda.ops.kda.hopper.factors import A2H, APH, FLAT2, FLAT3, S64, _clean, _merge_tiles, _store_t, _substitute
from openkda.ops.kda.hopper.fused_factors import fetch, next_stage, parts_of_l
from openkda.ops.kda.hopper.state import (
    A_S,
    A_T,
    ACC_S,
    ACC_T,
    S128,
    _output,
    _row_scale,
    _send_for,
    _values,
    _write_output,
)
from openkda.ops.kda.hopper.unordered import unordered


@gluon.jit
def _invert(tm_s, b_s):
    """T = (1 + beta L)^-1 beta in place of the parts of L."""
    diagonal, neighbours, far = parts_of_l(tm_s)
    xp_s = far._reinterpret(gl.float16, [2, 4, 16, 16], FLAT3)
    unordered()
    la = neighbours.load(APH)
    lf = far.load(A2H)
    x = _substitute(diagonal._reinterpret(gl.float32, [16, 4, 16], FLAT2))
    gl.thread_barrier()
    xp_s.index(0).permute((0, 2, 1)).store(x.to(gl.float16))
    gl.thread_barrier()
    th, low = _merge_tiles(la, lf, xp_s.index(0), xp_s.index(1), diagonal, far)
    gl.thread_barrier()
    _store_t(tm_s.index(1), th, low, b_s)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _offsets(index, half):
    """As `state._state_offsets`, in 32 bits. With addresses that differ by constants this kernel has 1,000 instructions fewer,
    and takes 0.596 instead of 0.590 ms (H=96 8x1024); why is not known."""
    v = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_S))
    v = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], dtype=gl.int32, is_pure=False, pack=1)
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, ACC_S))
    return index.to(gl.int64) * 16384 + (k[None, :] * 128 + (v[:, None] + half * 64))


@gluon.jit
def fused_state_partition(
    v_desc, o_desc, o_ptr, s0_ptr, st_ptr, values, stages, others, sends, bars, places, HV,
    half: gl.constexpr, STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr,
):  # fmt: skip
    """Carries 64 value rows of the transposed state through chain after chain, in registers. Its chunks alternate with the
    other half's in who inverts. The output leaves through the tile that held Kt, so that the values of the next chunk can
    come as soon as R is computed."""
    q_s, k_s, g_s, kc_s = stages
    v_s, v_full = values
    dec_s, b_s = others
    kq_ready, lm_ready, t_ready, kt_read, free = bars
    turn = 0
    length = 0
    st = 0
    phase = 0
    even = 0
    while length >= 0:
        seq, hv, row0, length = receive(places, turn)
        turn += 1
        if length >= 0:
            col0 = hv * 128 + half * 64
            some = length > 0
            mbarrier.expect(v_full.index(0), 8192, pred=some)
            tma.async_copy_global_to_shared(v_desc, [row0, col0], v_full.index(0), v_s, pred=some)
            # Masked by a runtime value: where the compiler knows that zeros enter, it spills more registers in every role.
            entering = seq >= (0 if STATE_IN == 1 else 1 << 30)
            s = gl.load(s0_ptr + _offsets(seq * HV + hv, half), mask=entering, other=0.0)
            inv = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, ACC_S))
            zero = gl.zeros([64, 64], gl.float32, ACC_T)
            chunks = (length + 63) // 64
            for c in range(chunks):
                n = length - c * 64
                tm_s = g_s.index(st)._reinterpret(gl.float16, [2, 64, 64], S64)
                if even == half:
                    unordered()
                    mbarrier.wait(lm_ready.index(st), phase)
                    _invert(tm_s, b_s.index(st))
                    mbarrier.arrive(t_ready.index(st), count=1)
                unordered()
                mbarrier.wait(v_full.index(0), even)
                if n < 64:
                    _clean(v_s, n, 0.0)
                    fence_async_shared()
                v_max = gl.max(gl.abs(_values(v_s)), axis=1)
                sc, inv_new = _row_scale(s, v_max, inv)
                s = s * (sc * inv)[:, None]
                inv = inv_new
                mbarrier.wait(kq_ready.index(st), phase)
                kt = k_s.index(st)._reinterpret(gl.float16, [64, 128], S64)
                a = gl.convert_layout(s.to(gl.float16), A_T)
                sc_t = gl.convert_layout(sc, gl.SliceLayout(1, ACC_T))[:, None]
                # Nothing stands between a product and its wait: operands in registers are not safe before (state.py).
                r = warpgroup_mma(a, kt.permute((1, 0)), zero, use_acc=False, is_async=True)
                r = warpgroup_mma_wait(0, deps=[r])
                r = _values(v_s) * sc_t - r
                ar = gl.convert_layout(r.to(gl.float16), A_T)
                gl.thread_barrier()
                mbarrier.arrive(kt_read.index(0), count=1)
                _send_for(v_desc, v_full.index(0), v_s, row0 + (c + 1) * 64, col0, c + 1 < chunks)
                mbarrier.wait(t_ready.index(st), phase)
                u = warpgroup_mma(ar, tm_s.index(1).permute((1, 0)), zero, use_acc=False, is_async=True)
                u = warpgroup_mma_wait(0, deps=[u])
                u16 = u.to(gl.float16)
                au = gl.convert_layout(u16, A_T)
                qt = q_s.index(st)._reinterpret(gl.float16, [64, 128], S64)
                a = gl.convert_layout(s.to(gl.float16), A_T)
                o = warpgroup_mma(a, qt.permute((1, 0)), zero, use_acc=False, is_async=True)
                o = warpgroup_mma(au, tm_s.index(0).permute((1, 0)), o, is_async=True)
                o = warpgroup_mma_wait(0, deps=[o])
                mbarrier.wait(kt_read.index(0), even)  # the other half has read Kt too
                out = k_s.index(st)._reinterpret(gl.bfloat16, [2, 64, 64], S128).index(half)
                out.permute((1, 0)).store(_output(o, inv))
                s = s * dec_s.index(st).load(gl.SliceLayout(0, ACC_S))[None, :]
                _write_output(o_desc, o_ptr, out, row0 + c * 64, col0, n, HV)
                s = warpgroup_mma(gl.convert_layout(u16, A_S), kc_s.index(st), s, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                if n < 64:
                    fence_async_shared()
                descs, sends_s, full, groups = sends
                if half == 1:
                    word = sends_s.index(st).load(LENTRY)
                tma.store_wait(0)
                gl.thread_barrier()
                mbarrier.arrive(free.index(st), count=1)
                if half == 1:
                    unordered()
                    mbarrier.wait(free.index(st), phase)
                    fetch(descs, stages, full, st, field(word, 0), field(word, 1), groups, field(word, 2) > 0)
                st, phase = next_stage(st, phase)
                even = even ^ 1
            if STATE_OUT:
                gl.store(st_ptr + _offsets(seq * HV + hv, half), s * inv[:, None])

"""The fused Hopper forward kernel; see factors.py for the chunk algebra."""

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

from openkda.ops.kda.hopper.chains import announce, chain, field, turns, walking_state
from openkda.ops.kda.hopper.factors import (  # fmt: skip
    F1,
    FLAT1,
    FLAT2,
    LOG2E,
    LROW,
    S64,
    _clean,
    _columns,
    _ex2,
    _gates,
    _rcp,
    _rsqrt,
    _scores,
    _scores_to_operands,
    _square_norm,
    _tile_factors,
    barriers,
)

ACC_T = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
ACC_S = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
A_T = gl.constexpr(gl.DotOperandLayout(0, ACC_T.value, 2))
A_S = gl.constexpr(gl.DotOperandLayout(0, ACC_S.value, 2))
S128 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def _load_beta(beta_ptr, row0, n, hv, HV):
    """Raw write strengths of a chunk; -inf past the end, where the sigmoid is zero."""
    i = gl.arange(0, 64, layout=F1)
    return gl.load(beta_ptr + (row0 + i).to(gl.int64) * HV + hv, mask=i < n, other=float("-inf"))


@gluon.jit
def factor_partition(
    q_desc, k_desc, g_desc, beta_ptr, a_log_ptr, dt_ptr, ranks_ptr, raw, work, ops, bars, places, chains, T, groups, HV,
    scale, bound, VARLEN: gl.constexpr, NP: gl.constexpr,
):  # fmt: skip
    """Warpgroup that draws chains (a sequence and value head), announces them to the states, and turns their raw chunks
    into state operands, one chunk ahead of the state. The raw tiles of the next chunk, be it of the next chain, are on
    their way meanwhile."""
    q_s, k_s, g_s = raw
    kc_s, e1_s, t_s, xb_s, fk_s, ck_s, c2_s, b_s = work
    kt_s, qt_s, kh_s, dec_s, tt_s, m_s = ops
    qk_full, g_full, kq_ready, kh_ready, kh_free, tm_ready, free = bars

    chan = gl.arange(0, 128, layout=F1)
    bound2 = bound * LOG2E
    step = gl.num_programs(0)
    ticket = gl.program_id(0)
    entry = chain(ranks_ptr, ticket, chains, HV, T, VARLEN, NP)
    hv = field(entry, 1)
    row0 = field(entry, 2)
    length = field(entry, 3)
    drawn = gl.where(chan == 0, ticket, 0)
    if VARLEN:
        drawn = gl.atomic_add(ranks_ptr + 4 * NP + chan, gl.where(chan == 0, 1, 0), mask=chan == 0)
    some = length > 0
    mbarrier.expect(g_full, 16384, pred=some)
    tma.async_copy_global_to_shared(g_desc, [row0, hv * 128], g_full, g_s, pred=some)
    mbarrier.expect(qk_full.index(0), 32768, pred=some)
    tma.async_copy_global_to_shared(q_desc, [row0, hv // groups * 128], qk_full.index(0), q_s.index(0), pred=some)
    tma.async_copy_global_to_shared(k_desc, [row0, hv // groups * 128], qk_full.index(0), k_s.index(0), pred=some)
    beta = _load_beta(beta_ptr, row0, length, hv, HV)
    announce(entry, places, 0)
    before = 0
    turn = 1
    while length >= 0:
        ticket = step + gl.sum(gl.where(chan == 0, drawn, 0), axis=0)
        if VARLEN:
            drawn = gl.atomic_add(ranks_ptr + 4 * NP + chan, gl.where(chan == 0, 1, 0), mask=chan == 0)
        else:
            drawn = gl.where(chan == 0, ticket, 0)
        entry = chain(ranks_ptr, ticket, chains, HV, T, VARLEN, NP)
        announce(entry, places, turn)
        turn += 1
        hv_n = field(entry, 1)
        row_n = field(entry, 2)
        length_n = field(entry, 3)
        c1 = -gl.exp(gl.load(a_log_ptr + hv).to(gl.float32)) * LOG2E
        c2_s.store(gl.load(dt_ptr + hv * 128 + chan).to(gl.float32) * c1)
        chunks = (length + 63) // 64
        for c in range(chunks):
            n = length - c * 64
            b = before + c
            st = b & 1
            nst = (b + 1) & 1
            last = c + 1 == chunks
            row = gl.where(last, row_n, row0 + (c + 1) * 64)
            head = gl.where(last, hv_n, hv)
            left = gl.where(last, length_n, n - 64)
            more = left > 0
            mbarrier.expect(qk_full.index(nst), 32768, pred=more)
            column = head // groups * 128
            tma.async_copy_global_to_shared(q_desc, [row, column], qk_full.index(nst), q_s.index(nst), pred=more)
            tma.async_copy_global_to_shared(k_desc, [row, column], qk_full.index(nst), k_s.index(nst), pred=more)
            b_s.store(_rcp(1.0 + _ex2(-LOG2E * beta.to(gl.float32))))
            beta = _load_beta(beta_ptr, row, left, head, HV)

            qc = q_s.index(st)
            kc = k_s.index(st)
            mbarrier.wait(qk_full.index(st), (b >> 1) & 1)
            mbarrier.wait(g_full, b & 1)
            if n < 64:
                _clean(kc, n, 0.0)
                _clean(g_s, n, -3.0e38)
            _gates(g_s, c2_s, t_s, c1, bound2)
            rq = scale * _rsqrt(_square_norm(qc) + 1e-6)
            rk = _rsqrt(_square_norm(kc) + 1e-6)
            mbarrier.wait(kh_free.index(st), ((b >> 1) & 1) ^ 1)
            dec_s.index(st).store(_tile_factors(t_s, xb_s, fk_s, ck_s, e1_s))
            _columns(g_s, kc, rk, kc_s, kh_s.index(st), ck_s, gl.constexpr(True))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(kh_ready.index(st), count=1)

            mbarrier.wait(free.index(0), (b & 1) ^ 1)
            acc = _scores((qc, kc, g_s), rq, rk, (kc_s, e1_s, xb_s, fk_s), kt_s.index(0), qt_s.index(0))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(kq_ready.index(0), count=1)
            mbarrier.expect(g_full, 16384, pred=more)
            tma.async_copy_global_to_shared(g_desc, [row, head * 128], g_full, g_s, pred=more)

            # The scores are in registers by now, so the inversion's buffers reuse kc_s.
            _scores_to_operands(acc, b_s, m_s.index(0), tt_s.index(0), kc_s._reinterpret(gl.float16, [4, 64, 32], S64))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(tm_ready.index(0), count=1)
        before += chunks
        hv = hv_n
        row0 = row_n
        length = length_n


@gluon.jit
def _row_scale(s, v_max, inv_old):
    """Power of two that brings the larger of a state row and its values into (2^7, 2^8], and its inverse.

    Row-wise bound: with |k| = 1 and beta <= 1, |u| <= |v| + |S| + 63 max|v| stays below 75 * 2^8 < 65504.
    """
    m = gl.maximum(gl.max(gl.abs(s), axis=1) * inv_old, gl.convert_layout(v_max, gl.SliceLayout(1, ACC_S)))
    e = (m.to(gl.int32, bitcast=True) >> 23) & 255
    e = gl.minimum(gl.maximum(e, 80), 190)
    return ((261 - e) << 23).to(gl.float32, bitcast=True), ((e - 7) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _values(v_s):
    """A value tile, transposed, fp32."""
    return v_s.permute((1, 0)).load(ACC_T).to(gl.float32)


@gluon.jit
def _state_offsets(index, half):
    """Elements of [.., K, V] held by one state warpgroup. Opaque, or the offsets stay in registers all along."""
    v = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_S))
    v = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], dtype=gl.int32, is_pure=False, pack=1)
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, ACC_S))
    return index.to(gl.int64) * 16384 + (k[None, :] * 128 + (v[:, None] + half * 64))


@gluon.jit
def _stage_output(o, inv, v_s):
    """Unscales a chunk's output and puts it where its values were."""
    o = o * gl.convert_layout(inv, gl.SliceLayout(1, ACC_T))[:, None]
    v_s.permute((1, 0)).store(o.to(v_s.dtype))


@gluon.jit
def _write_output(o_desc, o_ptr, v_s, row, col0, n, HV):
    """Full chunks leave by the copy engine; it cannot mask, so a partial one is stored by threads."""
    if n >= 64:
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(o_desc, [row, col0], v_s)
    else:
        gl.thread_barrier()
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, LROW))[:, None]
        j = gl.arange(0, 64, layout=gl.SliceLayout(0, LROW))[None, :]
        gl.store(o_ptr + (row + i).to(gl.int64) * (HV * 128) + (col0 + j), v_s.load(LROW), mask=i < n)


@gluon.jit
def state_partition(
    v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v_s, ops, bars, row0, length, n_seq, hv, HV, half,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, before=0,
):  # fmt: skip
    """Warpgroup that carries 64 value rows of the transposed state through all chunks, in registers. Beside the factor role
    it has none to spare: the output is finished and stored before the state update needs its registers.

    before: chunks that went through the buffers earlier.
    """
    kt_s, qt_s, kh_s, dec_s, tt_s, m_s = ops
    v_full, kq_ready, kh_ready, kh_free, tm_ready, free = bars
    chunks = (length + 63) // 64
    col0 = hv * 128 + half * 64
    zeros = gl.zeros([64, 128], gl.float32, ACC_S)
    s = gl.load(s0_ptr + _state_offsets(n_seq * HV + hv, half)) if STATE_IN == 1 else zeros
    inv = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, ACC_S))
    zero = gl.zeros([64, 64], gl.float32, ACC_T)

    some = length > 0
    mbarrier.expect(v_full.index(before & 1), 8192, pred=some)
    tma.async_copy_global_to_shared(v_desc, [row0, col0], v_full.index(before & 1), v_s.index(before & 1), pred=some)
    for c in range(chunks):
        b = before + c
        st = b & 1
        n = length - c * 64
        v_c = v_s.index(st)
        mbarrier.wait(v_full.index(st), (b >> 1) & 1)
        if n < 64:
            _clean(v_c, n, 0.0)
        v_max = gl.max(gl.abs(_values(v_c)), axis=1)
        sc, inv_new = _row_scale(s, v_max, inv)
        s = s * (sc * inv)[:, None]
        inv = inv_new
        mbarrier.wait(kq_ready.index(0), b & 1)
        a = gl.convert_layout(s.to(gl.float16), A_T)
        r = warpgroup_mma(a, kt_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        sc_t = gl.convert_layout(sc, gl.SliceLayout(1, ACC_T))[:, None]
        r = warpgroup_mma_wait(0, deps=[r])
        r = _values(v_c) * sc_t - r
        ar = gl.convert_layout(r.to(gl.float16), A_T)
        mbarrier.wait(tm_ready.index(0), b & 1)
        u = warpgroup_mma(ar, tt_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        # The other buffer held the output of chunk c - 1: reload it once the copy engine has read it.
        tma.store_wait(0)
        gl.thread_barrier()
        nst = (b + 1) & 1
        more = c + 1 < chunks
        mbarrier.expect(v_full.index(nst), 8192, pred=more)
        tma.async_copy_global_to_shared(
            v_desc, [row0 + (c + 1) * 64, col0], v_full.index(nst), v_s.index(nst), pred=more
        )
        u = warpgroup_mma_wait(0, deps=[u])
        u16 = u.to(gl.float16)
        au = gl.convert_layout(u16, A_T)
        a = gl.convert_layout(s.to(gl.float16), A_T)
        o = warpgroup_mma(a, qt_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        o = warpgroup_mma(au, m_s.index(0).permute((1, 0)), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        gl.thread_barrier()
        mbarrier.arrive(free.index(0), count=1)
        _stage_output(o, inv, v_c)

        mbarrier.wait(kh_ready.index(st), (b >> 1) & 1)
        dec = dec_s.index(st).load(gl.SliceLayout(0, ACC_S))
        s = s * dec[None, :]
        s = warpgroup_mma(gl.convert_layout(u16, A_S), kh_s.index(st), s, is_async=True)
        _write_output(o_desc, o_ptr, v_c, row0 + c * 64, col0, n, HV)
        s = warpgroup_mma_wait(0, deps=[s])
        gl.thread_barrier()
        mbarrier.arrive(kh_free.index(st), count=1)
    tma.store_wait(0)
    if STATE_OUT:
        gl.store(st_ptr + _state_offsets(n_seq * HV + hv, half), s * inv[:, None])


@gluon.jit
def _work_buffers():
    """Scratch of the factor warpgroup."""
    kc_s = gl.allocate_shared_memory(gl.float16, [64, 128], S64)
    e1_s = gl.allocate_shared_memory(gl.float16, [4, 32], FLAT1)
    t_s = gl.allocate_shared_memory(gl.float32, [4, 128], FLAT2)
    xb_s = gl.allocate_shared_memory(gl.float16, [4, 4, 32], FLAT2)
    fk_s = gl.allocate_shared_memory(gl.float16, [4, 4, 32], FLAT2)
    ck_s = gl.allocate_shared_memory(gl.float16, [2, 4, 64], FLAT2)
    c2_s = gl.allocate_shared_memory(gl.float32, [128], FLAT1)
    b_s = gl.allocate_shared_memory(gl.float32, [64], FLAT1)
    return kc_s, e1_s, t_s, xb_s, fk_s, ck_s, c2_s, b_s


@gluon.jit
def _allocate():
    """Shared memory and barriers of a CTA, grouped by who uses them."""
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], S64)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], S64)
    g_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], S64)
    v0_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], S128)
    v1_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], S128)
    kt_s = gl.allocate_shared_memory(gl.float16, [1, 64, 128], S64)
    qt_s = gl.allocate_shared_memory(gl.float16, [1, 64, 128], S64)
    kh_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    dec_s = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT1)
    tt_s = gl.allocate_shared_memory(gl.float16, [1, 64, 64], S64)
    m_s = gl.allocate_shared_memory(gl.float16, [1, 64, 64], S64)
    work = _work_buffers()
    qk_full = barriers(2, 1)
    g_full = barriers(1, 1).index(0)
    v0_full = barriers(2, 1)
    v1_full = barriers(2, 1)
    kq_ready = barriers(1, 1)
    kh_ready = barriers(2, 1)
    kh_free = barriers(2, 2)
    tm_ready = barriers(1, 1)
    free = barriers(1, 2)
    fence_async_shared()
    ops = (kt_s, qt_s, kh_s, dec_s, tt_s, m_s)
    fbars = (qk_full, g_full, kq_ready, kh_ready, kh_free, tm_ready, free)
    sb0 = (v0_full, kq_ready, kh_ready, kh_free, tm_ready, free)
    sb1 = (v1_full, kq_ready, kh_ready, kh_free, tm_ready, free)
    return (q_s, k_s, g_s), (v0_s, v1_s), work, ops, fbars, sb0, sb1


@gluon.jit(do_not_specialize=["T", "chains"])
def kda_forward_kernel(
    q_desc, k_desc, g_desc, v_desc, o_desc, o_ptr, beta_ptr, a_log_ptr, dt_ptr, s0_ptr, st_ptr, ranks_ptr,
    HV, groups, T, chains, scale, bound,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, VARLEN: gl.constexpr, NP: gl.constexpr,
):  # fmt: skip
    """One CTA an SM, which draws one (sequence, value head) after the other: two state warpgroups, one of factors."""
    raw, values, work, ops, fbars, sb0, sb1 = _allocate()
    places = turns()
    fence_async_shared()
    gl.warp_specialize(
        [
            (factor_partition, (q_desc, k_desc, g_desc, beta_ptr, a_log_ptr, dt_ptr, ranks_ptr, raw, work, ops, fbars,
                                places, chains, T, groups, HV, scale, bound, VARLEN, NP)),
            (walking_state, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, values[0], ops, sb0, places, HV, gl.constexpr(0),
                             STATE_IN, STATE_OUT, gl.constexpr(state_partition))),
            (walking_state, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, values[1], ops, sb1, places, HV, gl.constexpr(1),
                             STATE_IN, STATE_OUT, gl.constexpr(state_partition))),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip

"""The two factor roles of the fused kernel (forward.py): gates, then scores, each on its own chunk.

gates   g, k  ->  decays in place of g, keys scaled to their tile's end, anchors; norms of k and q; decay of the chunk
scores  all of it  ->  Kt in place of k, Qt of q, Kh of the scaled keys, M and the parts of L in place of the decays

One warpgroup that did both took 8 us a chunk: one warp a scheduler cannot hide its own latencies, and the registers that two
state warpgroups leave are enough for two such roles, not for the same role twice.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from openkda.ops.kda.hopper.apart import (
    LM,
    _difference_columns,
    _last_rows,
    _norm_and_marks,
    are_near,
    by_channel,
    store_marks,
)
from openkda.ops.kda.hopper.chains import LENTRY, MARKS, announce, chain, field, marked, receive
from openkda.ops.kda.hopper.factors import (
    B3H,
    CUT,
    F1,
    FLAT1,
    FLAT2,
    FLAT3,
    M3,
    S64,
    _clean,
    _flat,
    _half_view,
    _load_beta,
    _masked,
    _rescale_columns,
    _rows,
    _scores,
    _square_norm,
    _store_m,
    _sum_operand,
    _tile_factors,
    _tri,
)
from openkda.ops.kda.hopper.instructions import LOG2E, _ex2, _rate, _rcp, _rsqrt, wait_for_the_kernel_before
from openkda.ops.kda.hopper.unordered import unordered

# Chunks before its end that a chain's successor is drawn; known one chunk later, needed two later.
DRAW = gl.constexpr(5)
SW = gl.constexpr(32)  # channels a step: 16 decays a thread
LBS = gl.constexpr(_sum_operand(32))


@gluon.jit
def _gate_columns(g_s, k_s, rk, kc_s, c2_s, t_s, c1, per, s):
    """Slice s of 32 channels: raw gates to log2 decays in fp16, in place, their tile sums to t_s, keys scaled to the end of
    their tile to kc_s. The decays are the operand of the sums as they leave the gate: they need not come back from memory."""
    view = _half_view(g_s)._reinterpret(gl.float16, [4, 64, SW], S64).index(s)
    unordered()
    x = view.load(LBS).to(gl.bfloat16, bitcast=True).to(gl.float32)
    c2 = c2_s._reinterpret(gl.float32, [4, SW], FLAT1).index(s).load(gl.SliceLayout(0, LBS))
    x = _rcp(_ex2(x * c1 + c2[None, :]) * per + per)
    x16 = x.to(gl.float16)
    unordered()
    view.store(x16)
    t_s._reinterpret(gl.float32, [4, 4, SW], FLAT2).index(s).store(gl.sum(x.reshape([4, 16, SW]), axis=1))
    b = gl.convert_layout(x16.reshape([4, 16, SW]), B3H, assert_trivial=True)
    hs = mma_v2(_tri(True), b, gl.zeros([4, 16, SW], gl.float32, M3))
    k = _rows(k_s._reinterpret(gl.bfloat16, [4, 64, SW], S64).index(s), 0, SW)
    col = (k * rk[:, :, None] * _ex2(hs)).to(gl.float16)
    kc_s._reinterpret(gl.float16, [4, 64, SW], S64).index(s).store(_flat(col))


@gluon.jit
def _anchors(hand, i):
    """What chunk i & 1 hands from gates to scores: factors between anchors (factors.py): e1, xb, fk, ck."""
    h_s, e1_s = hand[0], hand[1]
    x = h_s._reinterpret(gl.float16, [6, 512], FLAT1)
    return (
        e1_s.index(i)._reinterpret(gl.float16, [4, 32], FLAT1),
        x.index(3 * i)._reinterpret(gl.float16, [4, 4, 32], FLAT2),
        x.index(3 * i + 1)._reinterpret(gl.float16, [4, 4, 32], FLAT2),
        x.index(3 * i + 2)._reinterpret(gl.float16, [2, 4, 64], FLAT2),
    )


@gluon.jit
def next_stage(st, phase):
    """Stages are used in turn; the phase of their barriers changes after the last."""
    wrap = st == 2
    return gl.where(wrap, 0, st + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def fetch(descs, stages, full, st, row, hv, groups, pred):
    """Raw tiles of a chunk on their way to a stage."""
    q_desc, k_desc, g_desc = descs
    q_s, k_s, g_s = stages[0], stages[1], stages[2]
    qk_full, g_full = full
    column = hv // groups * 128
    mbarrier.expect(qk_full.index(st), 32768, pred=pred)
    unordered()
    tma.async_copy_global_to_shared(k_desc, [row, column], qk_full.index(st), k_s.index(st), pred=pred)
    unordered()
    tma.async_copy_global_to_shared(q_desc, [row, column], qk_full.index(st), q_s.index(st), pred=pred)
    mbarrier.expect(g_full.index(st), 16384, pred=pred)
    unordered()
    tma.async_copy_global_to_shared(g_desc, [row, hv * 128], g_full.index(st), g_s.index(st), pred=pred)


@gluon.jit
def _next_chain(ticket, drawn, ranks_ptr, chains, HV, T, places, turn, step, VARLEN: gl.constexpr, AGAIN: gl.constexpr):
    """Announces the chain of the ticket drawn, or of the next one in turn: ticket, value head, first row, length."""
    if AGAIN:
        ticket = marked(ranks_ptr, ticket + step, chains, step)
    elif VARLEN:
        ticket = step + gl.sum(gl.where(gl.arange(0, 128, layout=F1) == 0, drawn, 0), axis=0)
    else:
        ticket += step
    entry = chain(ranks_ptr, ticket, chains, HV, T, VARLEN)
    announce(entry, places, turn)
    return ticket, field(entry, 1), field(entry, 2), field(entry, 3)


@gluon.jit
def gate_partition(
    descs, beta_ptr, a_log_ptr, dt_ptr, ranks_ptr, stages, dec_s, hand, c2_s, sends_s, bars, places, chains, T, groups, HV,
    scale, bound, VARLEN: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """Draws chains (a sequence and value head), announces them to the others and starts on their chunks. It draws late: who is
    done first takes the next, and with chains of different lengths that is not known while they begin.

    For each chunk it leaves in sends_s where the one after next but one begins, in this chain or the next, and whether it
    knows: a state sends for it when it leaves the stage. What it could not know it sends for itself: the first three chunks,
    and those of chains that begin and end in between.

    Behind a chain it writes which of its tiles had near keys (apart.py); AGAIN, it takes those chains only.
    """
    q_s, k_s, g_s, kc_s = stages
    h_s, n_s, b_s = hand[0], hand[2], hand[3]
    full, ready, kq_ready, free = bars
    qk_full, g_full = full
    chan = gl.arange(0, 128, layout=F1)
    per = _rcp(bound * LOG2E)
    DRAWS: gl.constexpr = VARLEN and not AGAIN
    step = gl.num_programs(0)
    ticket = gl.program_id(0)
    if AGAIN:
        ticket = marked(ranks_ptr, ticket, chains, step)
    elif VARLEN:
        wait_for_the_kernel_before()
    entry = chain(ranks_ptr, ticket, chains, HV, T, VARLEN)
    hv = field(entry, 1)
    row0 = field(entry, 2)
    length = field(entry, 3)
    drawn = gl.where(chan == 0, ticket, 0)
    hv_n = 0
    row_n = 0
    length_n = -1
    sent0 = 0
    sent1 = 0
    sent2 = 0
    word = gl.arange(0, 4, layout=LENTRY)
    beta = _load_beta(beta_ptr, row0, length, hv, HV)
    rate = gl.load(a_log_ptr + hv)  # the next chain's are on their way before it begins
    bias = gl.load(dt_ptr + hv * 128 + chan)
    announce(entry, places, 0)
    st = 0
    phase = 0
    odd = 0
    turn = 1
    while length >= 0:
        c1 = -_rate(rate.to(gl.float32)) * LOG2E
        c2_s.store(bias.to(gl.float32) * c1)
        gl.thread_barrier()
        chunks = (length + 63) // 64
        mine = ticket
        seen = gl.full([4, 8], 0, gl.int32, LM)
        if chunks == 0:
            if DRAWS:
                drawn = gl.atomic_add(ranks_ptr + chan, gl.where(chan == 0, 1, 0), mask=chan == 0)
            ticket, hv_n, row_n, length_n = _next_chain(
                ticket, drawn, ranks_ptr, chains, HV, T, places, turn, step, VARLEN, AGAIN
            )
            turn += 1
            rate = gl.load(a_log_ptr + hv_n)
            bias = gl.load(dt_ptr + hv_n * 128 + chan)
        for c in range(chunks):
            if DRAWS:  # noqa: SIM102 (a constant)
                if c == gl.maximum(chunks - DRAW, 0):
                    drawn = gl.atomic_add(ranks_ptr + chan, gl.where(chan == 0, 1, 0), mask=chan == 0)
            if c == gl.maximum(chunks - DRAW + 1, 0):
                ticket, hv_n, row_n, length_n = _next_chain(
                    ticket, drawn, ranks_ptr, chains, HV, T, places, turn, step, VARLEN, AGAIN
                )
                turn += 1
                rate = gl.load(a_log_ptr + hv_n)
                bias = gl.load(dt_ptr + hv_n * 128 + chan)
            n = length - c * 64
            last = c + 1 == chunks
            row = gl.where(last, row_n, row0 + (c + 1) * 64)
            head = gl.where(last, hv_n, hv)
            left = gl.where(last, length_n, n - 64)
            kc = k_s.index(st)
            gc = g_s.index(st)
            if sent0 == 0:
                unordered()
                mbarrier.wait(free.index(st), phase ^ 1)
                fetch(descs, stages, full, st, row0 + c * 64, hv, groups, True)
            # Of the chunk two before: scores are done with what it handed over.
            other, turned = next_stage(st, phase ^ 1)
            unordered()
            mbarrier.wait(kq_ready.index(other), turned)
            mbarrier.wait(qk_full.index(st), phase)
            b_s.index(st).store(_rcp(1.0 + _ex2(-LOG2E * beta.to(gl.float32))))  # the stage is this chunk's only now
            beta = _load_beta(beta_ptr, row, left, head, HV)
            over = c + 3 - chunks
            known = (over * 64 < length_n).to(gl.int32)
            to_row = gl.where(over < 0, row0 + (c + 3) * 64, row_n + over * 64)
            to_head = gl.where(over < 0, hv, hv_n)
            known = gl.where(over < 0, 1, known)
            sends_s.index(st).store(gl.where(word == 0, to_row, gl.where(word == 1, to_head, known)))
            sent0 = sent1
            sent1 = sent2
            sent2 = known
            if n < 64:
                _clean(kc, n, 0.0)
                fence_async_shared()
            norm, marks = _norm_and_marks(kc)
            rk = _rsqrt(norm + 1e-6)
            if AGAIN:
                store_marks(hand[5].index(odd), marks)
            seen |= marks
            rq = scale * _rsqrt(_square_norm(q_s.index(st)) + 1e-6)
            norms = n_s._reinterpret(gl.float32, [4, 4, 16], FLAT2)
            norms.index(2 * odd).store(rk)
            unordered()
            norms.index(2 * odd + 1).store(rq)
            mbarrier.wait(g_full.index(st), phase)
            if n < 64:
                _clean(gc, n, -3.0e38)
                fence_async_shared()
            if AGAIN:  # noqa: SIM108 (a constant)
                t_s = hand[4].index(odd)  # scores want them once more
            else:
                t_s = h_s._reinterpret(gl.float32, [3, 512], FLAT1).index(2 * odd)  # where the anchors follow
            following = next_stage(st, phase)
            for s in gl.static_range(4):  # copies: nothing stands between them, and 8x1024 takes 1.2 % less
                _gate_columns(gc, kc, rk, kc_s.index(st), c2_s, t_s, c1, per, s)
            e1, xb, fk, ck = _anchors(hand, odd)
            dec_s.index(st).store(_tile_factors(by_channel(t_s), xb, fk, ck, e1))
            gl.thread_barrier()
            mbarrier.arrive(ready.index(st), count=1)
            st, phase = following
            odd = odd ^ 1
        if not AGAIN:
            at = mine * 4 + gl.arange(0, 4, layout=gl.SliceLayout(1, LM))
            gl.store(ranks_ptr + MARKS + at, gl.max(seen, axis=1))
        hv = hv_n
        row0 = row_n
        length = length_n


@gluon.jit
def parts_of_l(tm_s):
    """Where L waits for its inversion, in the tile that T will have: diagonal tiles [column, tile, row] in fp32, neighbours
    [pair, row, column], the far block [row, column], in whose upper half, where there are no scores, lie the neighbours."""
    halves = tm_s.index(1)._reinterpret(gl.float16, [2, 64, 32], S64)
    neighbours = tm_s.index(1)._reinterpret(gl.float16, [4, 2, 32, 16], FLAT3).index(2)
    return halves.index(0), neighbours, halves.index(1)


@gluon.jit
def score_partition(stages, hand, bars, places, AGAIN: gl.constexpr):
    """Scores of a chunk and everything that is scaled by rows; the inversion is left to the states, who have the time. AGAIN:
    chunks of keys that are nearly one direction as apart.py has them."""
    q_s, k_s, g_s, kc_s = stages
    n_s, b_s = hand[2], hand[3]
    ready, kq_ready, lm_ready = bars
    turn = 0
    length = 0
    st = 0
    phase = 0
    odd = 0
    while length >= 0:
        length = receive(places, turn)[3]
        turn += 1
        for c in range((length + 63) // 64):
            unordered()
            mbarrier.wait(ready.index(st), phase)
            norms = n_s._reinterpret(gl.float32, [4, 4, 16], FLAT2)
            rk = norms.index(2 * odd).load(gl.SliceLayout(2, M3))
            rq = norms.index(2 * odd + 1).load(gl.SliceLayout(2, M3))
            kt = k_s.index(st)._reinterpret(gl.float16, [64, 128], S64)
            qt = q_s.index(st)._reinterpret(gl.float16, [64, 128], S64)
            e1, xb, fk, ck = _anchors(hand, odd)
            raw = (q_s.index(st), k_s.index(st), g_s.index(st))
            if AGAIN:
                n = length - c * 64
                sums_s, marks_s = hand[4], hand[5].index(odd)
                work_s, rows_s, keys_s = hand[6]
                near = are_near(marks_s, n)
                if near:
                    _difference_columns(
                        raw[2], raw[1], rk, b_s.index(st), marks_s, kc_s.index(st), work_s, keys_s, n,
                    )  # fmt: skip
            acc = _scores(raw, rq, rk, (kc_s.index(st), e1, xb, fk), kt, qt)
            _rescale_columns(kc_s.index(st), ck)
            if AGAIN:  # noqa: SIM102 (a constant)
                if near:
                    acc = _last_rows(
                        acc, b_s.index(st), by_channel(sums_s.index(odd)), work_s, rows_s, keys_s, kc_s.index(st), n, CUT,
                    )  # fmt: skip
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(kq_ready.index(st), count=1)
            tm_s = g_s.index(st)._reinterpret(gl.float16, [2, 64, 64], S64)
            diagonal, neighbours, far = parts_of_l(tm_s)
            low, m = _masked(acc, b_s.index(st))
            diagonal._reinterpret(gl.float32, [16, 4, 16], FLAT3).permute((1, 2, 0)).store(low[0])
            unordered()
            far.store(low[2])
            unordered()
            _store_m(tm_s.index(0), m[0], m[1])
            neighbours.store(low[1])
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(lm_ready.index(st), count=1)
            st, phase = next_stage(st, phase)
            odd = odd ^ 1

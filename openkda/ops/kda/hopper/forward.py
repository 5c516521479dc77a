"""The fused Hopper forward: a CTA an SM, which draws one (sequence, value head) after the other; nothing but q, k, v, g, o and
states goes through memory. See factors.py for the chunk algebra.

Four warpgroups in a row, each on its own chunk, and three stages of shared memory that go round. A stage holds four tiles of
64 x 128 half words, and every role leaves its result where its operand was:

    tile     arrives   gates               scores           states
    g        g         decays              M, parts of L    T in place of L
    k        k                             Kt               output on its way
    q        q                             Qt
    kc                 keys to tile ends   Kh

    gates     c+2      1,500 instructions a warp: gate, column sums, norms, anchors; draws chains, sends for tiles
    scores    c+1      1,750: row sums, scores, scaled rows
    states    c        two warpgroups: R, U, O, S; every other chunk one of them inverts L
    engine    c+3      g, k, q, as soon as the states have left the stage of c

The roles wait for one another at mbarriers: ready (gates to scores), kq_ready (scores to states, and to gates, whose notes on
the chunk before the last it frees), lm_ready (scores to states), t_ready (the half that inverted to the other), free (states to
gates). Registers: ptxas gives each role its own number.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from openkda.ops.kda.hopper.chains import marked, turns
from openkda.ops.kda.hopper.factors import FLAT1, FLAT2, S64, barriers
from openkda.ops.kda.hopper.fused_factors import gate_partition, score_partition
from openkda.ops.kda.hopper.fused_state import fused_state_partition
from openkda.ops.kda.hopper.state import S128

GATES, STATES = gl.constexpr(80), gl.constexpr(152)  # registers a thread; scores get what is left of 512: 128


@gluon.jit
def allocate(AGAIN: gl.constexpr = False):
    """Shared memory and barriers of a CTA."""
    q_s = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 128], S64)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 128], S64)
    g_s = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 128], S64)
    kc_s = gl.allocate_shared_memory(gl.float16, [3, 64, 128], S64)
    v0_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], S128)
    v1_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], S128)
    # of a stage: decay, beta
    dec_s = gl.allocate_shared_memory(gl.float32, [3, 128], FLAT1)
    b_s = gl.allocate_shared_memory(gl.float32, [3, 64], FLAT1)
    # from gates to scores, every other chunk: anchors (and tile sums before them), decay over tile 1, norms of k and q
    h_s = gl.allocate_shared_memory(gl.float16, [6, 512], FLAT1)
    e1_s = gl.allocate_shared_memory(gl.float16, [2, 128], FLAT1)
    n_s = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT1)
    c2_s = gl.allocate_shared_memory(gl.float32, [128], FLAT1)
    sends_s = gl.allocate_shared_memory(gl.int32, [3, 4], FLAT1)
    qk_full = barriers(3, 1)
    g_full = barriers(3, 1)
    ready = barriers(3, 1)
    kq_ready = barriers(3, 1)
    lm_ready = barriers(3, 1)
    t_ready = barriers(3, 1)
    kt_read = barriers(1, 2)
    free = barriers(3, 2)
    v0 = (v0_s, barriers(1, 1))
    v1 = (v1_s, barriers(1, 1))
    fence_async_shared()
    stages = (q_s, k_s, g_s, kc_s)
    hand = (h_s, e1_s, n_s, b_s)
    if AGAIN:  # besides, tile sums and marks of every other chunk; what chunks of near keys need in scores
        sums_s = gl.allocate_shared_memory(gl.float32, [2, 512], FLAT1)
        marks_s = gl.allocate_shared_memory(gl.int32, [2, 64], FLAT1)
        work_s = gl.allocate_shared_memory(gl.float32, [4, 16], FLAT2)
        rows_s = gl.allocate_shared_memory(gl.float32, [4, 64], FLAT1)
        keys_s = gl.allocate_shared_memory(gl.float32, [512], FLAT1)
        hand = (h_s, e1_s, n_s, b_s, sums_s, marks_s, (work_s, rows_s, keys_s))  # type: ignore[assignment]
    gate_bars = ((qk_full, g_full), ready, kq_ready, free)
    score_bars = (ready, kq_ready, lm_ready)
    state_bars = (kq_ready, lm_ready, t_ready, kt_read, free)
    return stages, hand, (c2_s, sends_s), (dec_s, b_s), (v0, v1), (gate_bars, score_bars, state_bars)


@gluon.jit
def walk(
    q_desc, k_desc, g_desc, v_desc, o_desc, o_ptr, beta_ptr, a_log_ptr, dt_ptr, s0_ptr, st_ptr, ranks_ptr,
    HV, groups, T, chains, scale, bound,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, VARLEN: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """Chain after chain, by four roles."""
    stages, hand, own, others, values, bars = allocate(AGAIN)
    descs = (q_desc, k_desc, g_desc)
    sends = (descs, own[1], bars[0][0], groups)
    places = turns(3)
    fence_async_shared()
    entering = s0_ptr if STATE_IN == 1 else dt_ptr  # read by nobody then
    gl.warp_specialize(
        [
            (score_partition, (stages, hand, bars[1], places, AGAIN)),
            (fused_state_partition, (v_desc, o_desc, o_ptr, entering, st_ptr, values[0], stages, others, sends, bars[2], places,
                                     HV, gl.constexpr(0), STATE_IN, STATE_OUT)),
            (fused_state_partition, (v_desc, o_desc, o_ptr, entering, st_ptr, values[1], stages, others, sends, bars[2], places,
                                     HV, gl.constexpr(1), STATE_IN, STATE_OUT)),
            (gate_partition, (descs, beta_ptr, a_log_ptr, dt_ptr, ranks_ptr, stages, others[0], hand, own[0], own[1],
                              bars[0], places, chains, T, groups, HV, scale, bound, VARLEN, AGAIN)),
        ],
        [4, 4, 4],
        [STATES, STATES, GATES],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "chains"])
def kda_forward_kernel(
    q_desc, k_desc, g_desc, v_desc, o_desc, o_ptr, beta_ptr, a_log_ptr, dt_ptr, s0_ptr, st_ptr, ranks_ptr,
    HV, groups, T, chains, scale, bound,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, VARLEN: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """AGAIN: behind a launch without: once more the chains that had tiles of near keys, which apart.py treats; all other
    chunks come out with the same bits. Where there is none it costs 10 to 14 us, and 4 more where gates stand before states
    below, for its code has to come from memory; in one kernel with the first walk 2, but that then takes 1.4 % longer."""
    if AGAIN:
        if marked(ranks_ptr, gl.program_id(0), chains, gl.num_programs(0)) < chains:
            walk(
                q_desc, k_desc, g_desc, v_desc, o_desc, o_ptr, beta_ptr, a_log_ptr, dt_ptr, s0_ptr, st_ptr, ranks_ptr,
                HV, groups, T, chains, scale, bound, STATE_IN, STATE_OUT, VARLEN, AGAIN,
            )  # fmt: skip
    else:
        walk(
            q_desc, k_desc, g_desc, v_desc, o_desc, o_ptr, beta_ptr, a_log_ptr, dt_ptr, s0_ptr, st_ptr, ranks_ptr,
            HV, groups, T, chains, scale, bound, STATE_IN, STATE_OUT, VARLEN, AGAIN,
        )  # fmt: skip

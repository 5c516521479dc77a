"""Micro-measurements behind the schedule of the Hopper forward (docs/decisions.md, Hopper).

    PYTHONPATH=. python benchmarks/micro_hopper.py [roles]

Prints: cycles of a dependent register-A WGMMA, in bf16 and fp16, n = 64 and 128; microseconds a 64-token step of
each role of the fused kernel with the others replaced by stubs that only signal; a TMA-fed empty step.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openkda.ops.kda.hopper import launch
from openkda.ops.kda.hopper.chains import announce, chain, field, receive, turns
from openkda.ops.kda.hopper.forward import GATES, STATES, allocate
from openkda.ops.kda.hopper.fused_factors import gate_partition, next_stage, score_partition
from openkda.ops.kda.hopper.fused_state import fused_state_partition


@gluon.jit
def wgmma_chain(out_ptr, reps, K: gl.constexpr, N: gl.constexpr, DTYPE: gl.constexpr):
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    SH: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LB: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    b = gl.allocate_shared_memory(DTYPE, [K, N], SH, gl.full([K, N], 0.01, DTYPE, LB))
    a = gl.full([64, K], 0.01, DTYPE, gl.DotOperandLayout(0, ACC, 2))
    acc = gl.zeros([64, N], gl.float32, ACC)
    fence_async_shared()
    gl.thread_barrier()
    for _ in range(reps):
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))[:, None]
    j = gl.arange(0, N, layout=gl.SliceLayout(0, ACC))[None, :]
    gl.store(out_ptr + i * N + j, acc)


@gluon.jit
def empty_steps(q_desc, k_desc, g_desc, v_desc, out_ptr, chunks, STAGES: gl.constexpr):
    """Streams the four inputs of one head through shared memory and does nothing with them."""
    S64: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    buf = gl.allocate_shared_memory(gl.bfloat16, [4 * STAGES, 64, 128], S64)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    col = gl.program_id(0) * 128
    for c in range(chunks + STAGES - 1):
        if c < chunks:
            s = c % STAGES
            mbarrier.expect(full.index(s), 65536)
            tma.async_copy_global_to_shared(q_desc, [c * 64, col], full.index(s), buf.index(4 * s))
            tma.async_copy_global_to_shared(k_desc, [c * 64, col], full.index(s), buf.index(4 * s + 1))
            tma.async_copy_global_to_shared(g_desc, [c * 64, col], full.index(s), buf.index(4 * s + 2))
            tma.async_copy_global_to_shared(v_desc, [c * 64, col], full.index(s), buf.index(4 * s + 3))
        d = c - (STAGES - 1)
        if d >= 0:
            mbarrier.wait(full.index(d % STAGES), (d // STAGES) & 1)
            gl.thread_barrier()
    gl.store(out_ptr + gl.program_id(0), chunks)


@gluon.jit
def gate_stub(bars, places, chains, HV, T):
    ready, kq_ready, free = bars[1], bars[2], bars[3]
    ticket = gl.program_id(0)
    length = 0
    turn = 0
    st = 0
    phase = 0
    while length >= 0:
        entry = chain(0, ticket, chains, HV, T, gl.constexpr(False))
        announce(entry, places, turn)
        turn += 1
        ticket += gl.num_programs(0)
        length = field(entry, 3)
        for _ in range((length + 63) // 64):
            other, turned = next_stage(st, phase ^ 1)
            mbarrier.wait(kq_ready.index(other), turned)
            mbarrier.wait(free.index(st), phase ^ 1)
            gl.thread_barrier()
            mbarrier.arrive(ready.index(st), count=1)
            st, phase = next_stage(st, phase)


@gluon.jit
def score_stub(bars, places):
    ready, kq_ready, lm_ready = bars
    turn = 0
    length = 0
    st = 0
    phase = 0
    while length >= 0:
        length = receive(places, turn)[3]
        turn += 1
        for _ in range((length + 63) // 64):
            mbarrier.wait(ready.index(st), phase)
            gl.thread_barrier()
            mbarrier.arrive(kq_ready.index(st), count=1)
            mbarrier.arrive(lm_ready.index(st), count=1)
            st, phase = next_stage(st, phase)


@gluon.jit
def state_stub(bars, places):
    kq_ready, lm_ready, free = bars[0], bars[1], bars[4]
    turn = 0
    length = 0
    st = 0
    phase = 0
    while length >= 0:
        length = receive(places, turn)[3]
        turn += 1
        for _ in range((length + 63) // 64):
            mbarrier.wait(kq_ready.index(st), phase)
            mbarrier.wait(lm_ready.index(st), phase)
            gl.thread_barrier()
            mbarrier.arrive(free.index(st), count=1)
            st, phase = next_stage(st, phase)


@gluon.jit
def gates(
    descs, beta_ptr, a_log_ptr, dt_ptr, stages, dec_s, hand, own, bars, places, T, HV, scale, bound, REAL: gl.constexpr
):  # fmt: skip
    if REAL:
        gate_partition(descs, beta_ptr, a_log_ptr, dt_ptr, beta_ptr, stages, dec_s, hand, own[0], own[1], bars, places, HV,
                       T, 1, HV, scale, bound, gl.constexpr(False), gl.constexpr(False))  # fmt: skip
    else:
        gate_stub(bars, places, HV, HV, T)


@gluon.jit
def scores(stages, hand, bars, places, REAL: gl.constexpr):
    if REAL:
        score_partition(stages, hand, bars, places, gl.constexpr(False))
    else:
        score_stub(bars, places)


@gluon.jit
def states(
    v_desc,
    o_desc,
    o_ptr,
    st_ptr,
    values,
    stages,
    others,
    sends,
    bars,
    places,
    HV,
    half: gl.constexpr,
    REAL: gl.constexpr,
):
    if REAL:
        fused_state_partition(v_desc, o_desc, o_ptr, st_ptr, st_ptr, values, stages, others, sends, bars, places, HV, half,
                              gl.constexpr(1), gl.constexpr(True))  # fmt: skip
    else:
        state_stub(bars, places)


@gluon.jit(do_not_specialize=["T"])
def role_kernel(
    q_desc, k_desc, g_desc, v_desc, o_desc, o_ptr, beta_ptr, a_log_ptr, dt_ptr, st_ptr, T, HV, scale, bound,
    WITH_GATES: gl.constexpr, WITH_SCORES: gl.constexpr, WITH_STATES: gl.constexpr,
):  # fmt: skip
    """Some roles of the fused forward at work, the others signalling only."""
    stages, hand, own, others, values, bars = allocate()
    descs = (q_desc, k_desc, g_desc)
    sends = (descs, own[1], bars[0][0], 1)
    places = turns(3)
    fence_async_shared()
    gl.warp_specialize(
        [
            (scores, (stages, hand, bars[1], places, WITH_SCORES)),
            (gates, (descs, beta_ptr, a_log_ptr, dt_ptr, stages, others[0], hand, own, bars[0], places, T,
                     HV, scale, bound, WITH_GATES)),
            (states, (v_desc, o_desc, o_ptr, st_ptr, values[0], stages, others, sends, bars[2], places, HV, gl.constexpr(0),
                      WITH_STATES)),
            (states, (v_desc, o_desc, o_ptr, st_ptr, values[1], stages, others, sends, bars[2], places, HV, gl.constexpr(1),
                      WITH_STATES)),
        ],
        [4, 4, 4],
        [GATES, STATES, STATES],
    )  # fmt: skip


def ms(fn):
    return triton.testing.do_bench(fn, warmup=5, rep=30, return_mode="median")


def chains():
    out = torch.empty(64 * 128, device="cuda")
    clock = (
        torch.cuda.get_device_properties(0).clock_rate / 1e6
        if hasattr(torch.cuda.get_device_properties(0), "clock_rate")
        else 1.98
    )
    for dtype in (gl.bfloat16, gl.float16):
        for n in (64, 128):
            for k in (16, 128):
                t = [ms(partial(wgmma_chain[(132,)], out, r, k, n, dtype, num_warps=4)) for r in (2000, 4000)]
                us = (t[1] - t[0]) / 2
                print(f"register-A wgmma 64x{n}x{k} {dtype}: {us * 1e3:.1f} ns a dependent step (at {clock:.2f} GHz)")


def main():
    if "roles" not in sys.argv:
        chains()
    t, h = 8192, 96
    q, k, v, g, o = (torch.randn(1, t, h, 128, device="cuda").bfloat16() for _ in range(5))
    beta, a_log, dt = torch.randn(1, t, h, device="cuda").bfloat16(), torch.zeros(h, device="cuda"), None
    dt = torch.zeros(h, 128, device="cuda")
    rows = [launch._tiles(x, [64, 128], launch._ROWS) for x in (q, k, g, v)]
    half = [launch._tiles(x, [64, 64], launch._HALF) for x in (v, o)]
    out = torch.empty(256, device="cuda")
    st = torch.zeros(h, 128, 128, device="cuda")
    tail = (o, beta, a_log, dt, st, t, h, 0.088, -5.0)
    for heads in (96, 12):
        for stages in (2, 3):
            x = ms(partial(empty_steps[(heads,)], *rows, out, t // 64, stages, num_warps=4))
            rate = heads * t * 1024 / x / 1e9
            print(f"empty step, {stages} stages, {heads} heads: {x * 1e3 / (t // 64):.2f} us, {rate:.2f} TB/s")
    alone = {"gates": (1, 0, 0), "scores": (0, 1, 0), "states": (0, 0, 1), "gates and scores": (1, 1, 0)}
    for name, roles in alone.items():
        x = ms(partial(role_kernel[(h,)], *rows[:3], *half, *tail, *map(bool, roles), num_warps=4))
        print(f"{name} alone, {h} heads: {x:.3f} ms, {x * 1e3 / (t // 64):.2f} us a step", flush=True)


if __name__ == "__main__":
    main()

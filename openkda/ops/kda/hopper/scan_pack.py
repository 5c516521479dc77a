"""The scan for packs: programs stay and draw one (sequence, value head) after the other, longest first, so that the operands
of the next are on their way while the last one finishes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from openkda.ops.kda.hopper.chains import announce, field, turns, walking_state
from openkda.ops.kda.hopper.factors import barriers
from openkda.ops.kda.hopper.forward import S128
from openkda.ops.kda.hopper.scan import load_partition, operand_barriers, operand_tiles, scan_partition, zero_quarters

LENTRY1 = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))


@gluon.jit
def _walking_loads(
    x_desc, tm_desc, dec_ptr, ranks_ptr, ops, bars, places, chains, HV, NP: gl.constexpr,
):  # fmt: skip
    """The loading warp draws chains, announces them to the states and goes on to their operands."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    i = gl.arange(0, 4, layout=LENTRY1)
    ticket = gl.program_id(0)
    turn = 0
    before = 0
    going = 1
    while going != 0:
        going = (ticket < chains).to(gl.int32)
        hv = ticket % HV
        entry = gl.load(ranks_ptr + gl.minimum(ticket // HV, NP - 1) * 4 + i, mask=i < 4 * going, other=-1)
        announce(gl.where(i == 1, hv, entry), places, turn)
        turn += 1
        chunks = (field(entry, 3, LENTRY1) + 63) // 64
        slot0 = field(entry, 1, LENTRY1)
        load_partition(x_desc, tm_desc, dec_ptr, ops, bars, slot0, chunks, hv, HV, gl.constexpr(True), before)
        before += chunks
        drawn = gl.atomic_add(ranks_ptr + 4 * NP + lane, gl.where(lane == 0, 1, 0), mask=lane == 0)
        ticket = gl.num_programs(0) + gl.sum(gl.where(lane == 0, drawn, 0), axis=0)


@gluon.jit(do_not_specialize=["chains"])
def kda_scan_pack_kernel(
    x_desc, tm_desc, v_desc, o_desc, dec_ptr, ranks_ptr, o_ptr, s0_ptr, st_ptr, HV, chains,
    STATE_IN: gl.constexpr, STATE_OUT: gl.constexpr, NP: gl.constexpr,
):  # fmt: skip
    """One CTA an SM, which draws one (sequence, value head) after the other: two state warpgroups and a loading warp."""
    ops = operand_tiles()
    v0_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
    v1_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], S128)
    lb = operand_barriers(2)
    sb0 = (barriers(4, 1), lb)
    sb1 = (barriers(4, 1), lb)
    places = turns()
    zero_quarters(ops[4])  # T
    zero_quarters(ops[5])  # M
    fence_async_shared()
    gl.warp_specialize(
        [
            (walking_state, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v0_s, ops, sb0, places, HV,
                              gl.constexpr(0), STATE_IN, STATE_OUT, gl.constexpr(scan_partition))),
            (walking_state, (v_desc, o_desc, o_ptr, s0_ptr, st_ptr, v1_s, ops, sb1, places, HV,
                              gl.constexpr(1), STATE_IN, STATE_OUT, gl.constexpr(scan_partition))),
            (_walking_loads, (x_desc, tm_desc, dec_ptr, ranks_ptr, ops, lb, places, chains, HV, NP)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip

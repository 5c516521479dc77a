"""Backward on Hopper: the forward's walk over prepared chunks once more, for what the gradients need of it.

The algebra is that of `scan.py` without outputs. A CTA per (sequence, head), two warpgroups of 64 value channels each, leaves
U of every token and the state that enters every chunk, as float16 with powers of two (`triton/replay.py` says why).
Both leave by the copy engine: the state is staged while R is multiplied, U where its values were while the state is updated.

    tensor    R .............. | U ....... | S ............. | R of c + 1
    threads   S to float16     | decay S   | U to float16   scale S for c + 1
    copies    S leaves           operands of c + 1, values of c + 2 come   U leaves
"""

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

from openkda.ops.kda.hopper.chains import LENTRY, field
from openkda.ops.kda.hopper.factors import FLAT1, S64, _clean, barriers
from openkda.ops.kda.hopper.products import _power_of_two
from openkda.ops.kda.hopper.scan import load_partition, operand_barriers, zero_quarters
from openkda.ops.kda.hopper.state import (
    A_S,
    A_T,
    ACC_S,
    ACC_T,
    S128,
    _send_for,
    _state_offsets,
    _values,
    _write_output,
)
from openkda.ops.kda.hopper.unordered import unordered

ROW_S = gl.constexpr(gl.SliceLayout(1, ACC_S.value))
ROW_T = gl.constexpr(gl.SliceLayout(1, ACC_T.value))
MOST = gl.constexpr(
    2.0**126
)  # a factor for what is 0 would else be infinite: a state beside values of 10^7, nothing behind much
TOKEN = gl.constexpr(gl.SliceLayout(0, ACC_T.value))


@gluon.jit
def row_scale(m):
    """Power of two that brings m into (2^7, 2^8], and its inverse; see `_row_scale` in state.py. Over all of float32's range:
    nothing bounds an upstream gradient."""
    e = (m.to(gl.int32, bitcast=True) >> 23) & 255
    e = gl.minimum(gl.maximum(e, 8), 254)
    return ((261 - e) << 23).to(gl.float32, bitcast=True), ((e - 7) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def fetch(desc, full, tiles, row, col0, i, pred):
    """The i-th tile on its way; three go round."""
    f = i % 3
    _send_for(desc, full.index(f), tiles.index(f), row, col0, pred)


@gluon.jit
def await_tile(full, i):
    mbarrier.wait(full.index(i % 3), (i // 3) & 1)


@gluon.jit
def keep_state(desc, row, s, inv, size, buffer, unit_ptr):
    """Sends s times inv, whose rows are up to `size`, as float16 with one power of two for all its 64 rows."""
    up, down = _power_of_two(gl.max(size, axis=0), 12)
    gl.store(unit_ptr, down)
    buffer.store((s * gl.minimum(inv * up, MOST)[:, None]).to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [row, 0], buffer)


@gluon.jit
def keep_tokens(desc, ptr, row, col0, x, inv, tile, unit_ptr, n, HV):
    """Sends x [64 value channels, 64 tokens] times inv, transposed, as float16 with a power of two a token; through `tile`,
    where nobody reads values any more."""
    x = x * gl.convert_layout(inv, ROW_T)[:, None]
    up, down = _power_of_two(gl.max(gl.abs(x), axis=0), 12)
    t = gl.arange(0, 64, layout=TOKEN)
    gl.store(unit_ptr + (t // 16 * 32 + t % 16), down, mask=t < n)
    tile = tile._reinterpret(gl.float16, [64, 64], S128)
    tile.permute((1, 0)).store((x * up[None, :]).to(gl.float16))
    _write_output(desc, ptr, tile, row, col0, n, HV)


@gluon.jit
def locate(ranks_ptr, seq, HV, T, rows, VARLEN: gl.constexpr):
    """Of the range `seq`: sequence, first slot of the workspace, first row, length, first kept state, first tile of 16."""
    if VARLEN:
        entry = gl.load(ranks_ptr + seq * 4 + gl.arange(0, 4, layout=LENTRY))
        seq = field(entry, 0)
        slot0 = field(entry, 1)
        row0 = field(entry, 2)
        length = field(entry, 3)
        save0 = row0 // 64 + seq
        tile0 = row0 // 16 + seq
    else:
        slot0 = seq * ((T + 63) // 64)
        row0 = seq * T
        length = gl.minimum(T, rows - row0)
        save0 = slot0
        tile0 = seq * ((T + 15) // 16)
    return seq, slot0, row0, length, save0, tile0


@gluon.jit
def _ready(s, inv, v_c, n):
    """Readies a chunk: its values cleaned, the state scaled; its float16 copy, new scale and inverse, and its rows' sizes."""
    if n < 64:
        _clean(v_c, n, 0.0)
    v_max = gl.max(gl.abs(_values(v_c)), axis=1)
    size = gl.max(gl.abs(s), axis=1) * inv
    sc, inv_new = row_scale(gl.maximum(size, gl.convert_layout(v_max, ROW_S)))
    s = s * gl.minimum(sc * inv, MOST)[:, None]
    return s, gl.convert_layout(s.to(gl.float16), A_T), sc, inv_new, size


@gluon.jit
def replay_partition(
    v_desc, u_desc, s_desc, u_ptr, u_unit_ptr, s_unit_ptr, s0_ptr, v_s, s_s, ops, bars, row0, length, save, tile0, seq, hv,
    HV, half, STATE_IN: gl.constexpr,
):  # fmt: skip
    """Warpgroup that carries 64 value rows of the transposed state through prepared chunks. v_s: three tiles, for values and
    then U; s_s: one for states. save: of the first chunk's state, among those of all heads."""
    kt_s, kh_s, dec_s, tt_s = ops
    v_full, operand_bars = bars
    kq_ready, kh_ready, kh_free, tm_ready, free = operand_bars
    chunks = (length + 63) // 64
    col0 = hv * 128 + half * 64
    s = gl.zeros([64, 128], gl.float32, ACC_S)
    if STATE_IN:
        s = gl.load(s0_ptr + _state_offsets(seq * HV + hv, half))
    inv = gl.full([64], 1.0, gl.float32, ROW_S)
    zero = gl.zeros([64, 64], gl.float32, ACC_T)
    if length > 0:
        fetch(v_desc, v_full, v_s, row0, col0, 0, True)
        fetch(v_desc, v_full, v_s, row0 + 64, col0, 1, chunks > 1)
        await_tile(v_full, 0)
        s, a, sc, inv, size = _ready(s, inv, v_s.index(0), length)
        for c in range(chunks):
            st = c & 1
            phase = (c >> 1) & 1
            v_c = v_s.index(c % 3)
            mbarrier.wait(kq_ready.index(st), phase)
            r = warpgroup_mma(a, kt_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
            keep_state(s_desc, (save + c) * 128 + half * 64, s, inv, size, s_s, s_unit_ptr + (save + c) * 2 + half)
            r = warpgroup_mma_wait(0, deps=[r])
            r = _values(v_c) * gl.convert_layout(sc, ROW_T)[:, None] - r
            ar = gl.convert_layout(r.to(gl.float16), A_T)
            mbarrier.wait(tm_ready.index(st), phase)
            u = warpgroup_mma(ar, tt_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(kh_ready.index(st), phase)
            s = s * dec_s.index(st).load(gl.SliceLayout(0, ACC_S))[None, :]
            u = warpgroup_mma_wait(0, deps=[u])
            s = warpgroup_mma(gl.convert_layout(u.to(gl.float16), A_S), kh_s.index(st), s, is_async=True)
            keep_tokens(
                u_desc, u_ptr, row0 + c * 64, col0, u, inv, v_c, u_unit_ptr + (tile0 + c * 4).to(gl.int64) * 32 + half * 16,
                length - c * 64, HV,
            )  # fmt: skip
            s = warpgroup_mma_wait(0, deps=[s])
            if c + 1 < chunks:
                await_tile(v_full, c + 1)
                s, a, sc, inv, size = _ready(s, inv, v_s.index((c + 1) % 3), length - (c + 1) * 64)
            tma.store_wait(1)  # of this chunk all but U
            gl.thread_barrier()
            mbarrier.arrive(free.index(st), count=1)
            unordered()
            mbarrier.arrive(kh_free.index(st), count=1)
            fetch(v_desc, v_full, v_s, row0 + (c + 2) * 64, col0, c + 2, c + 2 < chunks)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "rows", "saves", "tiles"])
def kda_replay_kernel(
    x_desc, tm_desc, v_desc, u_desc, s_desc, dec_ptr, ranks_ptr, u_ptr, u_unit_ptr, s_unit_ptr, s0_ptr,
    HV, T, rows, saves, tiles, STATE_IN: gl.constexpr, VARLEN: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """One (sequence, value head); SPLIT: half its value channels. u [B, T, HV, 128] and s [HV, saves, 128 value channels, 128],
    float16; u_unit [HV, tiles, 2, 16], s_unit [HV, saves, 2]."""
    pid = gl.program_id(0)
    half = 0
    if SPLIT:
        half = pid & 1
        pid = pid >> 1
    hv = pid % HV
    seq, slot0, row0, length, save0, tile0 = locate(ranks_ptr, pid // HV, HV, T, rows, VARLEN)
    save = hv * saves + save0
    tile = hv * tiles + tile0
    kt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    kh_s = gl.allocate_shared_memory(gl.float16, [2, 64, 128], S64)
    dec_s = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT1)
    tt_s = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S64)
    v0_s = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 64], S128)
    s0_s = gl.allocate_shared_memory(gl.float16, [64, 128], S128)
    lb = operand_barriers(1 if SPLIT else 2)
    sb0 = (barriers(3, 1), lb)
    chunks = (length + 63) // 64
    ops = (kt_s, kh_s, dec_s, tt_s)
    loads = (kt_s, kt_s, kh_s, dec_s, tt_s, tt_s)
    zero_quarters(tt_s)
    if SPLIT:
        fence_async_shared()
        gl.warp_specialize(
            [
                (replay_partition, (v_desc, u_desc, s_desc, u_ptr, u_unit_ptr, s_unit_ptr, s0_ptr, v0_s, s0_s, ops, sb0, row0,
                                     length, save, tile, seq, hv, HV, half, STATE_IN)),
                (load_partition, (x_desc, tm_desc, dec_ptr, loads, lb, slot0, chunks, hv, HV, gl.constexpr(False))),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        v1_s = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 64], S128)
        s1_s = gl.allocate_shared_memory(gl.float16, [64, 128], S128)
        sb1 = (barriers(3, 1), lb)
        fence_async_shared()
        gl.warp_specialize(
            [
                (replay_partition, (v_desc, u_desc, s_desc, u_ptr, u_unit_ptr, s_unit_ptr, s0_ptr, v0_s, s0_s, ops, sb0, row0,
                                     length, save, tile, seq, hv, HV, 0, STATE_IN)),
                (replay_partition, (v_desc, u_desc, s_desc, u_ptr, u_unit_ptr, s_unit_ptr, s0_ptr, v1_s, s1_s, ops, sb1, row0,
                                     length, save, tile, seq, hv, HV, 1, STATE_IN)),
                (load_partition, (x_desc, tm_desc, dec_ptr, loads, lb, slot0, chunks, hv, HV, gl.constexpr(False))),
            ],
            [4, 1],
            [232, 32],
        )  # fmt: skip

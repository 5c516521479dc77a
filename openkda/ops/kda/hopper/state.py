"""What a warpgroup does that carries 64 value channels of a state: shared by the fused kernel and the scan.

The state is kept transposed, [value channel, key channel], in the accumulators of a WGMMA: each product's result is then the
next one's register operand. Operands are float16 with one power of two per row (docs/decisions.md).

A product reads operands from registers while it runs, which neither Triton nor ptxas knows: what nobody names any more is given
away at once. So either nothing stands between a product and its wait, or the operand goes through the wait with the result.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from openkda.ops.kda.hopper.factors import LROW
from openkda.ops.kda.hopper.unordered import unordered

ACC_T = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
ACC_S = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
A_T = gl.constexpr(gl.DotOperandLayout(0, ACC_T.value, 2))
A_S = gl.constexpr(gl.DotOperandLayout(0, ACC_S.value, 2))
S128 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


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
def _send_for(desc, full, tile, row, col0, pred):
    """Of 64 tokens 64 channels, to a tile whose last reader a barrier of the source has waited for."""
    unordered()
    mbarrier.expect(full, 8192, pred=pred)
    unordered()
    tma.async_copy_global_to_shared(desc, [row, col0], full, tile, pred=pred)


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
    first = index.to(gl.int64) * 16384 + half * 64
    return first + v[:, None].to(gl.int64) + k[None, :].to(gl.int64) * 128


@gluon.jit
def _output(o, inv):
    """A chunk's output without its rows' powers of two."""
    return (o * gl.convert_layout(inv, gl.SliceLayout(1, ACC_T))[:, None]).to(gl.bfloat16)


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

"""Host side of the Hopper forward: descriptors, outputs, launch."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .forward import kda_forward_kernel

_ROWS = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
_HALF = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _tiles(x: torch.Tensor, block: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """[B, T, H, 128] as a matrix [B T, H 128] of 64-token tiles."""
    b, t, h, d = x.shape
    return TensorDescriptor(x, [b * t, h * d], [h * d, 1], block, layout)


def forward(q, k, v, g, beta, a_log, dt_bias, *, scale, lower_bound, initial_state=None, final_state=False,
            cu_seqlens=None):
    """Runs the kernel on contiguous bf16 inputs; returns the output and the float32 final state or None."""
    b, t, h, _ = q.shape
    hv = v.shape[2]
    n = b if cu_seqlens is None else cu_seqlens.numel() - 1
    o = torch.empty_like(v)
    st = torch.empty(n, hv, 128, 128, dtype=torch.float32, device=q.device) if final_state else None
    kda_forward_kernel[(n * hv,)](
        _tiles(q, [64, 128], _ROWS), _tiles(k, [64, 128], _ROWS), _tiles(g, [64, 128], _ROWS),
        _tiles(v, [64, 64], _HALF), _tiles(o, [64, 64], _HALF), o, beta, a_log, dt_bias,
        o if initial_state is None else initial_state, o if st is None else st,
        o if cu_seqlens is None else cu_seqlens,
        t, hv, hv // h, scale, lower_bound,
        HAS_S0=initial_state is not None, HAS_ST=final_state, VARLEN=cu_seqlens is not None, num_warps=4,
    )
    return o, st

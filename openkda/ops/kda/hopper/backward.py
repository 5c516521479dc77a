"""Host side of the backward's last kernel on Hopper: when it can run, and its launch."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.kda.hopper import installed
from openkda.ops.kda.triton.launch import Args, Limited
from openkda.ops.triton.api import launch, padded, steps_of

REGISTERS = 168  # a thread: three programs of four warps an SM


def fits(a: Args) -> bool:
    """Whether the kernel can run this call's last stage: Hopper, 16 bits, unit keys, rows that 16-byte copies can walk."""
    tensors = (a.q, a.k, a.g)
    return (
        a.l2norm
        and not a.exact
        and a.q.device.type == "cuda"
        and torch.cuda.get_device_capability(a.q.device) == (9, 0)
        and installed()
        and all(
            t.element_size() == 2 and t.data_ptr() % 16 == 0 and not any(n % 16 for n in steps_of(t)) for t in tensors
        )
    )


_kernel: Limited | None = None


def launch_gradients(
    a: Args, slots: int, tiles: int, d: Tensor, wide: Tensor, both: Tensor, unit: Tensor, token: Tensor, rows: Tensor,
    dq: Tensor, dk: Tensor, dz: Tensor, d_bias: Tensor | None, d_A: Tensor | None,
) -> None:  # fmt: skip
    """slots and tiles: how many chunks of 64 and of 16 tokens a head has room for."""
    global _kernel
    if _kernel is None:  # Gluon is imported by those who use it
        from openkda.ops.kda.hopper.gradients import gradients_kernel

        _kernel = Limited(gradients_kernel, REGISTERS)
    B, T, H, HV, K, _ = a.sizes
    BK = max(64, padded(K))
    launch(
        _kernel, BK // 64 * slots * HV,
        (a.q, a.k, a.g, a.A_log, a.dt_bias, a.cu, d, wide, both, unit, token, rows, dq, dk, dz, d_bias, d_A),
        (*steps_of(a.q), *steps_of(a.k), *steps_of(a.g)), (B, T, a.num_sequences, slots, tiles, a.bound),
        (HV, HV // H, K, BK, a.gate, a.A_log is not None, a.dt_bias is not None, a.cu is not None), 4, d.device,
    )  # fmt: skip

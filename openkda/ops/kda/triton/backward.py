"""Host side of the backward: five kernels, workspace freed as soon as the next stage has read it.

    prepare -> replay -> reverse_scan -> products -> gradients

The walks go in the forward's chunks of 16 tokens; states and their gradients are kept every 64, the chunk of the last two
kernels (at 64 the first kernel took 20 s to compile and spilled; states every 16 tokens would be 8 n).
Nothing is kept from the forward but its inputs: the walk over chunks is run again (`replay.py`). With n = the bytes of a
16-bit [T, HV, K] tensor, the workspace peaks at 13 n, the gradients included.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from openkda.ops.kda.triton.gradients import gradients_kernel
from openkda.ops.kda.triton.launch import CHUNK, EPS, Args, state_strides
from openkda.ops.kda.triton.prepare import prepare_kernel
from openkda.ops.kda.triton.products import products_kernel
from openkda.ops.kda.triton.replay import replay_kernel
from openkda.ops.kda.triton.reverse_scan import reverse_scan_kernel
from openkda.ops.triton.api import ceil_div, launch, padded, steps_of

C = 64
SAVE = C // CHUNK
_TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def backward(a: Args, o: Tensor, do: Tensor | None, ds1: Tensor | None, want_ds0: bool) -> Gradients:
    """Gradients of q, k, v, g, beta, A_log, dt_bias and the initial state, from those of the output and the final state."""
    B, T, H, HV, K, V = a.sizes
    N, BK = a.num_sequences, padded(K)
    slots, saves = (B * ceil_div(T, c) if a.cu is None else T // c + N for c in (CHUNK, C))
    # Unit keys keep every factor within float16's range; others need bfloat16's. Gradients in 16 bits are bfloat16.
    op = torch.float32 if a.exact else torch.float16 if a.l2norm else torch.bfloat16
    store = torch.float32 if a.exact else torch.bfloat16
    prec = "tf32x3" if a.exact else "tf32"
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=o.device)  # noqa: E731
    packed, has_A, has_dt = a.cu is not None, a.A_log is not None, a.dt_bias is not None

    factors, tm, decay = new(3, HV, slots, CHUNK, BK, dtype=op), new(HV, slots, 2, CHUNK, CHUNK), new(HV, slots, BK)
    kd, qd, ke = factors.unbind()
    token = new(HV, slots, 3, CHUNK) if a.l2norm else decay
    qkg = (*steps_of(a.q), *steps_of(a.k), *steps_of(a.g))
    launch(
        prepare_kernel, slots * HV,
        (a.q, a.k, a.g, a.beta, a.A_log, a.dt_bias, a.cu, kd, qd, ke, tm, decay, token),
        (*qkg, *a.beta.stride()), (T, N, slots, a.bound, EPS),
        (HV, HV // H, K, BK, min(32, BK), CHUNK, a.gate, has_A, has_dt, packed, a.l2norm, a.sigmoid, False,
         _TL[op], prec, prec, prec, True, a.l2norm), 1, o.device,
    )  # fmt: skip

    s, u = new(HV, saves, V, BK, dtype=store), new(B, T, HV, V, dtype=store)
    BV, warps, stages = _scan_settings(BK, padded(V), a.exact)
    walks = ceil_div(V, BV) * HV * N
    sizes = (HV, K, BK, V, BV, CHUNK, SAVE, packed)
    launch(
        replay_kernel, walks, (a.v, u, a.cu, a.state, s, kd, ke, tm, decay),
        (*steps_of(a.v), *state_strides(a.state, a.v_first)), (T, N, slots, saves),
        (*sizes, a.state is not None, _TL[op], prec, stages), warps, o.device,
    )  # fmt: skip

    ds, dd = new(HV, saves, V, BK, dtype=store), new(B, T, HV, V, dtype=store)
    ds0 = new(N, HV, K, V) if want_ds0 else None
    do_steps = (0, 0, 0) if do is None else steps_of(do)
    launch(
        reverse_scan_kernel, walks, (do, dd, a.cu, ds1, ds0, ds, kd, qd, ke, tm, decay),
        (*do_steps, *steps_of(dd), *state_strides(ds1, a.v_first)), (T, N, slots, saves, a.scale),
        (*sizes, ds1 is not None, want_ds0, do is not None, _TL[op], prec, stages), warps, o.device,
    )  # fmt: skip
    del factors, kd, qd, ke, tm, decay

    d, wide, both = new(HV, saves, 2, C, C, dtype=store), new(HV, saves, 3, C, BK, dtype=store), new(HV, saves, BK)
    dbeta, rows = new(B, T, HV), new(2, B, T, HV)
    launch(
        products_kernel, saves * HV, (a.v, a.beta, a.cu, o, do, u, dd, s, ds, d, wide, both, dbeta, rows),
        (*steps_of(a.v), *a.beta.stride(), *do_steps), (B, T, N, saves, a.scale),
        (HV, BK, V, _products_block(BK, padded(V), a.exact, o.device), C, packed, a.l2norm, a.sigmoid, do is not None,
         _TL[store], prec), 8, o.device,
    )  # fmt: skip
    del s, ds, u

    dq, dk = (new(B, T, HV, K, dtype=a.q.dtype if HV == H else torch.float32) for _ in "qk")
    dz = new(B, T, HV, K, dtype=a.g.dtype)
    d_bias, d_A = (new(saves, HV, K) if has else None for has in (has_dt, has_A))
    BS = 16  # channels a program of one warp
    scratch = new(HV, saves, 3, C, BK, dtype=store), new(HV, saves, C // 16, BK)
    launch(
        gradients_kernel, BK // BS * saves * HV,
        (a.q, a.k, a.g, a.A_log, a.dt_bias, a.cu, d, wide, both, *scratch, token, rows, dq, dk, dz, d_bias, d_A),
        qkg, (B, T, N, saves, slots, a.bound),
        (HV, HV // H, K, BK, BS, a.gate, has_A, has_dt, packed, a.l2norm, _TL[store], prec), 1, o.device,
    )  # fmt: skip
    if HV != H:
        dq, dk = (x.view(B, T, H, HV // H, K).sum(3).to(a.q.dtype) for x in (dq, dk))
    if ds0 is not None and a.v_first:
        ds0 = ds0.transpose(-1, -2)
    return (
        dq, dk, dd.to(a.v.dtype), dz, dbeta.to(a.beta.dtype), None if d_A is None else d_A.sum((0, 2)),
        None if d_bias is None else d_bias.sum(0).reshape(-1), ds0,
    )  # fmt: skip


def _scan_settings(BK: int, BV: int, exact: bool) -> tuple[int, int, int]:
    """(BV, warps, pipeline stages) of the two walks. At BK = 256 blocks of 64 spilled 134 times, blocks of 32 nowhere."""
    if exact:
        return 16, 8 if BK > 64 else 4, 2
    return (min(32, BV), 8, 2) if BK > 128 else (min(64, BV), 4, 3)


def _products_block(BK: int, BV: int, exact: bool, device: torch.device) -> int:
    """Value channels that `products_kernel` takes at a time. Blocks of 64 need 124 KB of shared memory, which only the data
    centre's cards have; at BK = 256 the smallest block spills least (85 times against 213)."""
    if exact or BK > 128:
        return 16
    return min(64 if BK < 128 or _shared_memory(device) >= 128 * 1024 else 32, BV)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program can have; what the interpreter has is no matter."""
    if device.type != "cuda":
        return 1 << 20
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)

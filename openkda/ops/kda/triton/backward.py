"""Host side of the backward: six kernels, workspace freed as soon as the next stage has read it.

    prepare -> join -> replay -> reverse_scan -> products -> gradients

`prepare` works on the forward's tiles of 16 tokens, everything behind `join` on chunks of 64. Nothing is kept from the forward
but its inputs and output: the walk over chunks is run again (`replay.py`). With n = the bytes of a 16-bit [T, HV, K] tensor,
the workspace peaks at 13 n, the gradients included.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from openkda.ops.kda.triton.gradients import gradients_kernel, sums
from openkda.ops.kda.triton.join import join_kernel
from openkda.ops.kda.triton.launch import CHUNK, EPS, Args, state_strides
from openkda.ops.kda.triton.prepare import prepare_kernel
from openkda.ops.kda.triton.products import products_kernel
from openkda.ops.kda.triton.replay import replay_kernel
from openkda.ops.kda.triton.reverse_scan import reverse_scan_kernel
from openkda.ops.triton.api import QUICK, ceil_div, launch, padded, steps_of

C = 64
MAX_EXACT = 128
_TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def backward(
    a: Args, o: Tensor, do: Tensor | None, ds1: Tensor | None, want_ds0: bool, chain: Tensor | None = None
) -> Gradients:
    """Gradients of q, k, v, g, beta, A_log, dt_bias and the initial state, from those of the output and the final state.

    chain: the sequences' members, where a call was cut into them (`positions.py`).
    """
    B, T, H, HV, K, V = a.sizes
    N, BK = a.num_sequences, padded(K)
    sequences = N if chain is None else chain.numel() - 1
    tiles, slots = (B * ceil_div(T, c) if a.cu is None else T // c + N for c in (CHUNK, C))
    exact = a.exact or _needs_exact(a)
    op = torch.float32 if exact else torch.float16 if a.l2norm else torch.bfloat16
    keep = torch.float32 if exact else torch.float16
    small = op if a.l2norm else torch.float32
    prec = "tf32x3" if exact else "tf32"
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=o.device)  # noqa: E731
    packed, has_A, has_dt = a.cu is not None, a.A_log is not None, a.dt_bias is not None

    factors, tm, decay = new(3, HV, tiles, CHUNK, BK, dtype=op), new(HV, tiles, 2, CHUNK, CHUNK), new(HV, tiles, BK)
    log, norm = new(HV, tiles, CHUNK, BK, dtype=keep), new(HV, tiles, 3, CHUNK) if a.l2norm else decay
    qkg = (*steps_of(a.q), *steps_of(a.k), *steps_of(a.g))
    launch(
        prepare_kernel, tiles * HV,
        (a.q, a.k, a.g, a.beta, a.A_log, a.dt_bias, a.cu, *factors.unbind(), tm, decay, norm, log),
        (*qkg, *a.beta.stride()), (T, N, tiles, a.bound, EPS),
        (HV, HV // H, K, BK, min(32, BK), CHUNK, a.gate, has_A, has_dt, packed, a.l2norm, a.sigmoid, False,
         _TL[op], prec, prec, prec, True, True), 1, o.device,
    )  # fmt: skip

    joined, tm64, decay64 = new(3, HV, slots, C, BK, dtype=op), new(HV, slots, 2, C, C, dtype=small), new(HV, slots, BK)
    BC, warps = _join_settings(BK, exact)
    launch(
        join_kernel, slots * HV, (a.cu, *factors.unbind(), tm, decay, *joined.unbind(), tm64, decay64),
        (), (T, N, slots, tiles), (HV, BK, BC, packed, _TL[op], prec), warps, o.device,
    )  # fmt: skip
    (kd, qd, ke), tm, decay = joined.unbind(), tm64, decay64
    del factors, tm64

    s, u = new(HV, slots, V, BK, dtype=keep), new(B, T, HV, V, dtype=keep)
    BU, warps, stages = _scan_settings(BK, padded(V), exact, o.device)
    NV = ceil_div(V, BU)
    u_unit, s_unit, to_unit, dd_unit, ds_unit = new(5, HV, slots, NV).unbind()
    sizes = (HV, K, BK, V, BU, C, packed)
    kinds = (_TL[keep], _TL[op], prec, stages)
    launch(
        replay_kernel, NV * HV * N, (a.v, u, a.cu, a.state, s, u_unit, s_unit, kd, ke, tm, decay),
        (*steps_of(a.v), *state_strides(a.state, a.v_first)), (T, N, slots),
        (*sizes, a.state is not None, *kinds), warps, o.device,
    )  # fmt: skip

    ds, dd = new(HV, slots, V, BK, dtype=keep), new(B, T, HV, V, dtype=keep)
    dv = dd if exact else new(B, T, HV, V, dtype=a.v.dtype)
    to = u if do is None else new(B, T, HV, V, dtype=keep)
    ds0 = new(sequences, HV, K, V) if want_ds0 else None
    do_steps = (0, 0, 0) if do is None else steps_of(do)
    launch(
        reverse_scan_kernel, NV * HV * sequences,
        (do, dv, dd, to, a.cu, chain, ds1, ds0, ds, dd_unit, to_unit, ds_unit, kd, qd, ke, tm, decay),
        (*do_steps, *steps_of(dd), *state_strides(ds1, a.v_first)), (T, N, slots, a.scale),
        (*sizes, chain is not None, ds1 is not None, want_ds0, do is not None, *kinds), warps, o.device,
    )  # fmt: skip
    del joined, kd, qd, ke, tm

    d, d_unit = new(HV, slots, 2, C, C, dtype=keep), new(HV, slots)
    dbeta, rows = new(B, T, HV), new(2, B, T, HV)
    BV, warps, stages = _products_settings(BU, exact)
    launch(
        products_kernel, slots * HV,
        (a.v, a.beta, a.cu, o, to, u, dd, to_unit, u_unit, dd_unit, d, d_unit, dbeta, rows),
        (*steps_of(a.v), *a.beta.stride()), (B, T, N, slots, a.scale),
        (HV, V, BV, BU, C, packed, a.l2norm, a.sigmoid, do is not None, prec, not exact, stages), warps, o.device,
    )  # fmt: skip

    dq, dk = (new(B, T, HV, K, dtype=a.q.dtype if HV == H else torch.float32) for _ in "qk")
    dz = new(B, T, HV, K, dtype=a.g.dtype)
    d_bias, d_A = (new(slots, HV, K) if has else None for has in (has_dt, has_A))
    BS, BV, warps, stages, registers = _gradients_settings(BK, BU, exact)
    launch(
        gradients_kernel, BK // BS * slots * HV,
        (a.q, a.k, a.g, a.A_log, a.dt_bias, a.cu, to, u, dd, s, ds, to_unit, u_unit, dd_unit, s_unit, ds_unit,
         log, decay, d, d_unit, _sums(keep, o.device), norm, rows, dq, dk, dz, d_bias, d_A),
        qkg, (B, T, N, slots, tiles, a.bound),
        (HV, HV // H, K, BK, BS, V, BV, BU, a.gate, has_A, has_dt, packed, a.l2norm, do is not None, _TL[op],
         tl.float32 if op == torch.float16 else _TL[op], prec, _term(exact), not exact, stages),
        warps, o.device, registers=registers,
    )  # fmt: skip
    if HV != H:
        dq, dk = (x.view(B, T, H, HV // H, K).sum(3).to(a.q.dtype) for x in (dq, dk))
    if ds0 is not None and a.v_first:
        ds0 = ds0.transpose(-1, -2)
    return (
        dq, dk, dv.to(a.v.dtype), dz, dbeta.to(a.beta.dtype), None if d_A is None else d_A.sum((0, 2)),
        None if d_bias is None else d_bias.sum(0).reshape(-1), ds0,
    )  # fmt: skip


def _scan_settings(BK: int, BV: int, exact: bool, device: torch.device) -> tuple[int, int, int]:
    """(BV, warps, pipeline stages) of the two walks. Blocks of 64 need 172 KB of shared memory, which only the data centre's
    cards have; at BK = 256 blocks of 32 spill nowhere."""
    if exact:
        return 16, 8, 1
    return (
        (min(64, BV), 8, 2)
        if BK <= 128 and _shared_memory(device) >= 176 * 1024
        else (min(32, BV), 8, 1 if BK > 128 else 2)
    )


def _needs_exact(a: Args) -> bool:
    """Keys of any length would leave float16's range; bfloat16 operands, whose range is float32's, miss the promised 6e-3
    (dq 6.6e-3 at worst for random keys, 2.3e-2 for keys of one direction). Above 128 channels they are what is left."""
    return not a.l2norm and a.q.shape[-1] <= MAX_EXACT


def _term(exact: bool) -> tl.constexpr:
    """What three terms make a float32 of, in sums over later tokens. Triton's interpreter computes bfloat16 wrongly."""
    return tl.bfloat16 if QUICK and not exact else tl.float32


def _join_settings(BK: int, exact: bool) -> tuple[int, int]:
    """(channels at a time, warps) of `join_kernel`."""
    return min(32, BK), 4


def _products_settings(BV: int, exact: bool) -> tuple[int, int, int]:
    """(value channels at a time, warps, pipeline stages) of `products_kernel`."""
    return (min(32, BV), 4, 1) if exact else (min(64, BV), 4, 1)


def _gradients_settings(BK: int, BV: int, exact: bool) -> tuple[int, int, int, int, int | None]:
    """(channels a program, value channels at a time, warps, pipeline stages, most registers) of `gradients_kernel`."""
    return (16, min(16, BV), 4, 1, None) if exact else (min(32, BK), min(64, BV), 4, 1, None)


@cache
def _sums(dtype: torch.dtype, device: torch.device) -> Tensor:
    return sums(dtype, device)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program can have; what the interpreter has is no matter."""
    if device.type != "cuda":
        return 1 << 20
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)

"""Host side of the backward: five kernels, workspace freed as soon as the next stage has read it.

    prepare -> replay -> reverse_scan -> products -> gradients

The walks go in the forward's chunks of 16 tokens; states and their gradients are kept every 64, the chunk of the last two
kernels (at 64 the first kernel took 20 s to compile and spilled; states every 16 tokens would be 8 n).
Nothing is kept from the forward but its inputs: the walk over chunks is run again (`replay.py`). With n = the bytes of a
16-bit [T, HV, K] tensor, the workspace peaks at 13 n, the gradients included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openkda.ops.kda.triton.gradients import gradients_kernel
from openkda.ops.kda.triton.launch import CHUNK, EPS, Args, padded, state_strides
from openkda.ops.kda.triton.prepare import prepare_kernel
from openkda.ops.kda.triton.products import products_kernel
from openkda.ops.kda.triton.replay import replay_kernel
from openkda.ops.kda.triton.reverse_scan import reverse_scan_kernel

C = 64
SAVE = C // CHUNK
_TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def backward(a: Args, do: Tensor | None, ds1: Tensor | None, want_ds0: bool) -> Gradients:
    """Gradients of q, k, v, g, beta, A_log, dt_bias and the initial state, from those of the output and the final state."""
    B, T, H, HV, K, V = a.sizes
    N, BK = a.num_sequences, padded(K)
    slots, saves = (B * triton.cdiv(T, c) if a.cu is None else T // c + N for c in (CHUNK, C))
    # Unit keys keep every factor within float16's range; others need bfloat16's. Gradients in 16 bits are bfloat16.
    op = torch.float32 if a.exact else torch.float16 if a.l2norm else torch.bfloat16
    store = torch.float32 if a.exact else torch.bfloat16
    prec = "tf32x3" if a.exact else "tf32"
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=a.q.device)  # noqa: E731
    common = {"HV": HV, "PACKED": a.cu is not None}

    factors, tm, decay = new(3, HV, slots, CHUNK, BK, dtype=op), new(HV, slots, 2, CHUNK, CHUNK), new(HV, slots, BK)
    kd, qd, ke = factors.unbind()
    prepare_kernel[(slots * HV,)](
        a.q, a.k, a.g, a.beta, a.A_log, a.dt_bias, a.cu, kd, qd, ke, tm, decay, decay,
        *a.q.stride()[:3], *a.k.stride()[:3], *a.g.stride()[:3], *a.beta.stride(), T, N, slots, a.bound, EPS,
        GROUP=HV // H, K=K, BK=BK, BC=min(32, BK), C=CHUNK, GATE=a.gate, HAS_A=a.A_log is not None,
        HAS_DT=a.dt_bias is not None, L2NORM=a.l2norm, SIGMOID=a.sigmoid, SCALED=False, FLOOR=True,
        OP=_TL[op], PREC=prec, INNER_PREC=prec, SMALL=prec, num_warps=1, **common,
    )  # fmt: skip

    s, u = new(HV, saves, V, BK, dtype=store), new(B, T, HV, V, dtype=store)
    BV, warps, stages = _scan_settings(BK, padded(V), a.exact)
    grid = (triton.cdiv(V, BV) * HV * N,)
    sizes = {**common, "K": K, "BK": BK, "V": V, "BV": BV, "C": CHUNK, "SAVE": SAVE, "OP": _TL[op], "PREC": prec, "STAGES": stages}
    replay_kernel[grid](
        a.v, u, a.cu, a.state, s, kd, ke, tm, decay, *a.v.stride()[:3], *state_strides(a.state, a.v_first),
        T, N, slots, saves, HAS_S0=a.state is not None, num_warps=warps, **sizes,
    )  # fmt: skip

    ds, dd = new(HV, saves, V, BK, dtype=store), new(B, T, HV, V, dtype=store)
    ds0 = new(N, HV, K, V) if want_ds0 else None
    do_strides = (0, 0, 0) if do is None else do.stride()[:3]
    reverse_scan_kernel[grid](
        do, dd, a.cu, ds1, ds0, ds, kd, qd, ke, tm, decay,
        *do_strides, *dd.stride()[:3], *state_strides(ds1, a.v_first), T, N, slots, saves, a.scale,
        HAS_DS1=ds1 is not None, HAS_DS0=want_ds0, HAS_DO=do is not None, num_warps=warps, **sizes,
    )  # fmt: skip
    del factors, kd, qd, ke, tm, decay

    d, wide, both = new(HV, saves, 2, C, C, dtype=store), new(HV, saves, 3, C, BK, dtype=store), new(HV, saves, BK)
    dbeta = new(B, T, HV)
    products_kernel[(saves * HV,)](
        a.beta, a.cu, do, u, dd, s, ds, d, wide, both, dbeta,
        *a.beta.stride(), *do_strides, T, N, saves, a.scale,
        BK=BK, V=V, BV=min(16 if a.exact else 64, padded(V)), C=C, SIGMOID=a.sigmoid, HAS_DO=do is not None,
        OP=_TL[store], PREC=prec, num_warps=8, **common,
    )  # fmt: skip
    del s, ds, u

    dq, dk = (new(B, T, HV, K, dtype=a.q.dtype if HV == H else torch.float32) for _ in "qk")
    dz = new(B, T, HV, K, dtype=a.g.dtype)
    sums = [None if t is None else new(saves, HV, K) for t in (a.dt_bias, a.A_log)]
    gradients_kernel[(saves * HV,)](
        a.q, a.k, a.g, a.A_log, a.dt_bias, a.cu, d, wide, both, new(HV, saves, 3, C, BK, dtype=store), new(HV, saves, 4, BK),
        dq, dk, dz, *sums,
        *a.q.stride()[:3], *a.k.stride()[:3], *a.g.stride()[:3], T, N, saves, a.bound, EPS,
        GROUP=HV // H, K=K, BK=BK, GATE=a.gate, HAS_A=a.A_log is not None, HAS_DT=a.dt_bias is not None,
        L2NORM=a.l2norm, OP=_TL[store], PREC=prec, num_warps=8, **common,
    )  # fmt: skip
    if HV != H:
        dq, dk = (x.view(B, T, H, HV // H, K).sum(3).to(a.q.dtype) for x in (dq, dk))
    d_bias, d_A = (None if x is None else x.sum(0) for x in sums)
    if ds0 is not None and a.v_first:
        ds0 = ds0.transpose(-1, -2)
    return (
        dq, dk, dd.to(a.v.dtype), dz, dbeta.to(a.beta.dtype),
        None if d_A is None else d_A.sum(-1), None if d_bias is None else d_bias.reshape(-1), ds0,
    )  # fmt: skip


def _scan_settings(BK: int, BV: int, exact: bool) -> tuple[int, int, int]:
    """(BV, warps, pipeline stages) of the two walks."""
    return (16, 8 if BK > 64 else 4, 2) if exact else (min(64, BV), 8 if BK > 128 else 4, 2)

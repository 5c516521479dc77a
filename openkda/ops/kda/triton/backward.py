"""Host side of the backward: five kernels, workspace freed as soon as the next stage has read it.

    prepare -> walks -> products -> gradients -> sums

The walks go in the forward's chunks of 16 tokens; states and their gradients are kept every 64, the chunk of the last two
kernels (at 64 the first kernel took 20 s to compile and spilled; states every 16 tokens would be 8 n). On Hopper each of the
first four has another form, of chunks of 64 throughout, where the call fits it (`hopper/backward.py` says when).
Nothing is kept from the forward but its inputs, unless it is asked to (`keep.py`): the walk over chunks is run again. With n =
the bytes of a 16-bit [T, HV, K] tensor, the workspace peaks at 14 n, on Hopper at 11 n, the gradients included.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from openkda.ops.kda.triton.gradients import gradients_kernel
from openkda.ops.kda.triton.launch import CHUNK, EPS, PREPARE, Args, kind, pieces, state_strides
from openkda.ops.kda.triton.prepare import prepare_kernel
from openkda.ops.kda.triton.products import products_kernel
from openkda.ops.kda.triton.sums import sums_kernel
from openkda.ops.kda.triton.walks import walks_kernel
from openkda.ops.triton.api import (
    ceil_div,
    compile_ahead,
    dense,
    empty,
    first_of_kind,
    launch,
    padded,
    rows_of,
    steps_of,
)  # fmt: skip

C = 64
SAVE = C // CHUNK
# off, the portable kernel runs on Hopper too, to be timed beside the other
HOPPER_PRODUCTS = HOPPER_GRADIENTS = HOPPER_WALKS = True
TL = {torch.float16: tl.float16, torch.float32: tl.float32}
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def backward(
    a: Args, o: Tensor, do: Tensor | None, ds1: Tensor | None, want_ds0: bool, chain: Tensor | None = None
) -> Gradients:
    """Gradients of q, k, v, g, beta, A_log, dt_bias and the initial state, from those of the output and the final state.

    chain: the sequences' members, where a call was cut into them (`positions.py`).
    """
    return finished(a.q, a.v, a.v_first, *launches(a, o, do, ds1, want_ds0, chain))


def finished(
    q: Tensor, v: Tensor, v_first: bool, dq: Tensor, dk: Tensor, dv: Tensor, dz: Tensor, dbeta: Tensor, rate: Tensor | None,
    bias: Tensor | None, ds0: Tensor | None,
) -> Gradients:  # fmt: skip
    """What `launches` made, in the shapes and dtypes of the inputs: all that torch has to do."""
    H, HV = q.shape[2], v.shape[2]
    if HV != H:
        dq, dk = (x.unflatten(2, (H, HV // H)).sum(3).to(q.dtype) for x in (dq, dk))
    if dv.dtype != v.dtype:
        dv = dv.to(v.dtype)
    if ds0 is not None and v_first:
        ds0 = ds0.transpose(-1, -2)
    return dq, dk, dv, dz, dbeta, rate, bias, ds0


def launches(
    a: Args, o: Tensor, do: Tensor | None, ds1: Tensor | None, want_ds0: bool, chain: Tensor | None = None,
    kept: Kept | KeptChunks | None = None,
) -> Gradients:  # fmt: skip
    """As `backward`, with dq and dk of every value head, and ds0 [.., K, V]. All memory is made by `empty`, all work done by
    `launch`: nothing of torch in between, so that a tape can repeat it. kept: by the forward (the `keep.py` of each folder)."""
    optional = tuple([x is None for x in (a.cu, do, ds1, chain, kept)])
    own = ("backward", kind(a), want_ds0, optional, HOPPER_WALKS, HOPPER_PRODUCTS, HOPPER_GRADIENTS)
    if first_of_kind(
        own, o.device
    ):  # its kernels side by side: one after the other they were most of a first step's 16 s
        compile_ahead(o.device, lambda: launches(a, o, do, ds1, want_ds0, chain, kept))
    o = dense(o)
    B, T, H, HV, K, V = a.sizes
    N = a.num_sequences
    sequences = N if chain is None else chain.numel() - 1
    walk = walk_of(a)
    tiles, slots, BK, BU, NU, exact, scaled, prec, walk_warps, walk_stages = walk
    op, f32 = torch.float32 if exact else torch.float16, torch.float32
    new = lambda *shape, dtype=torch.float32: empty(shape, dtype, o.device)  # noqa: E731
    packed, has_A, has_dt = a.cu is not None, a.A_log is not None, a.dt_bias is not None

    BS, BV, warps, stages = _products_settings(BK, exact, _generation(o.device))
    on_hopper = not isinstance(kept, Kept) and HOPPER_WALKS and do is not None and _walked_on_hopper(a, do, chain)
    if not on_hopper and isinstance(kept, KeptChunks):
        kept = None
    blocks, chunks, factor, anew = HV * tiles, HV * slots, HV * tiles * CHUNK * BK, not isinstance(kept, Kept)
    token, u_unit, dd_unit, s_unit, ds_unit, both, product_unit, rows = pieces(
        f32, (kept is None) * blocks * 3 * CHUNK, anew * blocks * NU * CHUNK, blocks * NU * CHUNK, anew * chunks * NU,
        chunks * NU, chunks * BK, chunks * (BK // BS) * 4, 2 * B * T * HV, device=o.device,
    )  # fmt: skip
    dd = new(B, T, HV, V, dtype=op)
    s, ds, u = pieces(op, anew * chunks * V * BK, chunks * V * BK, anew * dd.numel(), device=o.device)
    ds0 = new(sequences, HV, K, V) if want_ds0 else None
    do_steps = (0, 0, 0) if do is None else steps_of(do)
    qkg = (*steps_of(a.q), *steps_of(a.k), *steps_of(a.g))
    if on_hopper and do is not None:  # twice, for the type checker
        from openkda.ops.kda.hopper.walks import operands_of
        from openkda.ops.kda.hopper.walks import walk as walk_on_hopper

        found = None
        if isinstance(kept, KeptChunks):
            token, found = dense(kept.norms), operands_of(a, slots, dense(kept.workspace))
        walk_on_hopper(a, do, ds1, slots, tiles, token, u, dd, s, ds, u_unit, dd_unit, s_unit, ds_unit, ds0, found)
        kd = qd = ke = decay = None  # hopper/gradients.py, which follows, computes its own
    else:
        if not isinstance(kept, Kept):
            kd, qd, ke = pieces(op, factor, factor, factor, device=o.device)
            w, y = pieces(op, factor, factor, device=o.device)
            tm, decay, unit = pieces(f32, blocks * 2 * CHUNK * CHUNK, blocks * BK, blocks * 2 * CHUNK, device=o.device)
            prepare(a, walk, kd, qd, ke, tm, decay, token, w, y, unit)
        else:
            kd, qd, ke, y, s, u, tm, decay, token, unit, u_unit, s_unit = kept
            w = y  # read by nobody
        reverses = NU * HV * sequences
        launch(
            walks_kernel, reverses + NU * HV * N * anew,
            (a.v, do, u, dd, a.cu, chain, a.state, s, ds1, ds0, ds, u_unit, dd_unit, s_unit, ds_unit,
             kd, qd, ke, w, y, tm, decay, unit, token),
            (*steps_of(a.v), *do_steps, *state_strides(a.state, a.v_first), *state_strides(ds1, a.v_first)),
            (T, N, tiles, slots, reverses, a.scale),
            (HV, K, BK, V, BU, CHUNK, SAVE, packed, chain is not None, a.state is not None, ds1 is not None, want_ds0,
             do is not None, scaled, TL[op], prec, walk_stages), walk_warps, o.device,
        )  # fmt: skip
        del w, y, tm, unit

    d, wide = pieces(op, chunks * 2 * C * C, chunks * 3 * C * BK, device=o.device)
    dbeta = new(B, T, HV, dtype=a.beta.dtype)
    dv = dd if exact else new(B, T, HV, V, dtype=a.v.dtype)
    if HOPPER_PRODUCTS and do is not None and _multiplied_on_hopper(a, do):
        from openkda.ops.kda.hopper.backward import launch_products

        launch_products(
            a, slots, tiles, o, do, u, dd, s, ds, u_unit, dd_unit, s_unit, ds_unit,
            dv, d, wide, both, product_unit, dbeta, rows,
        )  # fmt: skip
    else:
        launch(
            products_kernel, (BK // BS + 1) * slots * HV,
            (a.v, a.beta, a.cu, token, o, do, u, dd, s, ds, u_unit, dd_unit, s_unit, ds_unit,
             dv, d, wide, both, product_unit, dbeta, rows),
            (*steps_of(a.v), *a.beta.stride(), *do_steps), (B, T, N, slots, tiles, a.scale),
            (HV, BK, BS, V, BV, BU, packed, a.l2norm, scaled, a.sigmoid, do is not None, TL[op], prec, stages), warps,
            o.device,
        )  # fmt: skip
    del s, ds, u
    if not exact:
        del dd

    dq, dk = (new(B, T, HV, K, dtype=a.q.dtype if HV == H else torch.float32) for _ in "qk")
    dz = new(B, T, HV, K, dtype=a.g.dtype)
    d_bias, d_A = (new(slots, HV, K) if has else None for has in (has_dt, has_A))
    if HOPPER_GRADIENTS and _on_hopper(a):
        from openkda.ops.kda.hopper.backward import launch_gradients

        launch_gradients(a, slots, tiles, d, wide, both, product_unit, token, rows, dq, dk, dz, d_bias, d_A)
    else:
        BG = 16  # channels a program of one warp
        launch(
            gradients_kernel, BK // BG * slots * HV,
            (a.q, a.k, a.g, a.A_log, a.dt_bias, a.cu, d, wide, both, product_unit, kd, qd, ke, decay, token, rows,
             dq, dk, dz, d_bias, d_A),
            qkg, (B, T, N, slots, tiles, a.bound),
            (HV, HV // H, K, BK, BG, BS, a.gate, has_A, has_dt, packed, a.l2norm, scaled, TL[op], prec), 1, o.device,
        )  # fmt: skip
    bias, rate = (None if t is None else new(*t.shape) for t in (a.dt_bias, a.A_log))
    if has_A or has_dt:
        launch(
            sums_kernel, HV, (d_bias, d_A, bias, rate), (), (slots,), (HV, K, padded(K), 32, has_A, has_dt), 4, o.device
        )
    return dq, dk, dv, dz, dbeta, rate, bias, ds0


class Kept(NamedTuple):
    """What `keep.forward` keeps: parts of two tensors."""

    kd: Tensor
    qd: Tensor
    ke: Tensor
    y: Tensor
    s: Tensor
    u: Tensor
    tm: Tensor
    decay: Tensor
    token: Tensor
    unit: Tensor
    u_unit: Tensor
    s_unit: Tensor


class KeptChunks(NamedTuple):
    """What hopper's `keep.forward` keeps."""

    workspace: Tensor
    norms: Tensor


class Walk(NamedTuple):
    """Chunks of 16 and of 64 tokens a head has room for, and how the walks go over them."""

    tiles: int
    slots: int
    BK: int
    BU: int
    NU: int
    exact: bool
    scaled: bool
    prec: str
    warps: int
    stages: int


def walk_of(a: Args) -> Walk:
    B, T, _, _, K, V = a.sizes
    tiles, slots = (B * ceil_div(T, c) if a.cu is None else T // c + a.num_sequences for c in (CHUNK, C))
    BK = _channels(K, a.exact)
    BU, warps, stages = _walk_settings(BK, a.exact)
    scaled, prec = not (a.exact or a.l2norm), "tf32x3" if a.exact else "tf32"
    return Walk(tiles, slots, BK, BU, ceil_div(V, BU), a.exact, scaled, prec, warps, stages)


def prepare(
    a: Args, w: Walk, kd: Tensor, qd: Tensor, ke: Tensor, tm: Tensor, decay: Tensor, token: Tensor, through: Tensor, y: Tensor,
    unit: Tensor,
) -> None:  # fmt: skip
    """Launches `prepare_kernel` for the walks."""
    _, T, H, HV, K, _ = a.sizes
    launch(
        prepare_kernel if w.exact else PREPARE, w.tiles * HV,
        (a.q, a.k, a.g, a.beta, a.A_log, a.dt_bias, a.cu, kd, qd, ke, tm, decay, token, through, y, unit),
        (*rows_of(a.q), *rows_of(a.k), *rows_of(a.g), *a.beta.stride()), (T, a.num_sequences, w.tiles, a.bound, EPS),
        (HV, HV // H, K, w.BK, min(32, w.BK), CHUNK, a.gate, a.A_log is not None, a.dt_bias is not None, a.cu is not None,
         a.l2norm, a.sigmoid, w.scaled, TL[kd.dtype], w.prec, w.prec, w.prec, True), 1, a.q.device,
    )  # fmt: skip


def _walked_on_hopper(a: Args, do: Tensor, chain: Tensor | None) -> bool:
    from openkda.ops.kda.hopper.backward import fits_walks

    return fits_walks(a, do, chain)


def _multiplied_on_hopper(a: Args, do: Tensor) -> bool:
    from openkda.ops.kda.hopper.backward import fits_products

    return fits_products(a, do)


def _on_hopper(a: Args) -> bool:
    from openkda.ops.kda.hopper.backward import fits

    return fits(a)


def _channels(size: int, exact: bool) -> int:
    """Channels as the kernels see them: at least 128 bytes of an operand. Triton 3.6 gives products of 64 rows to Hopper's
    warp-group instructions, which read operands of 16 and 32 columns of 16 bits wrongly where several products share a
    kernel (triton-lang/triton 11366, pytorch/helion 1905; wrong gradients or an illegal address, both seen here)."""
    return max(32 if exact else 64, padded(size))


def _walk_settings(BK: int, exact: bool) -> tuple[int, int, int]:
    """(value channels a program, warps, pipeline stages) of the two walks. H200, H = 96, T = 8192, K = 128, ms: three stages
    1.86, two 2.13; blocks of 32 with two warps 2.57, of 128 with eight 2.52; three programs a processor instead of two (168
    registers) 2.06, because what spills is in the chain from state to state."""
    if exact:
        return 16, 8 if BK > 64 else 4, 2
    return (64, 8, 1) if BK > 128 else (64, 4, 3)


def _products_settings(BK: int, exact: bool, generation: int) -> tuple[int, int, int, int]:
    """(key channels, value channels at a time, warps, pipeline stages) of `products_kernel`. Two stages were measured on Hopper
    (generation 9). For compute capability 10 Triton 3.6 does not compile them, and for 8 and 12 they spill 380 and 262
    instructions where one stage spills 168 and 109."""
    return (min(64, BK), 32, 4, 1) if exact else (64, 64, 4, 2 if generation == 9 else 1)


@cache
def _generation(device: torch.device) -> int:
    """Of the card, by the first number of its compute capability; without one, that of the card that was measured."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9

"""Host side of the backward's last two stages on Hopper: when they can run, and their launches.

What runs there, and what falls back to the portable kernels (`openkda/ops/kda/triton`), stage by stage. Every stage asks for a
Hopper card, Gluon of the release that it is written for, l2norm inside, q, k and g of 16 bits in rows that 16-byte copies can
walk, and operands of 16 bits (`triton_exact` has others).

    walks      also: bfloat16 throughout, K = V = 128, beta's sigmoid inside, states [.., K, V], a gradient of the output, a
               scale of 1/64 to 16, at most 1024 members of a pack, no states at positions (their members form chains)
    products   also: a gradient of the output, V = 128, v and that gradient in such rows
    gradients  nothing more: any gate, any K and V, grouped heads, packs
"""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.kda.hopper import HEAD, MAX_SEQUENCES, installed
from openkda.ops.kda.triton.launch import Args, Limited
from openkda.ops.kda.triton.prepare import BETA_FLOOR
from openkda.ops.triton.api import launch, padded, steps_of

REGISTERS = 168  # a thread: three programs of four warps an SM


def fits(a: Args) -> bool:
    """Whether `launch_gradients` can run for this call: Hopper, 16 bits, unit keys, rows that 16-byte copies can walk."""
    return (
        a.l2norm
        and not a.exact
        and a.q.device.type == "cuda"
        and torch.cuda.get_device_capability(a.q.device) == (9, 0)
        and installed()
        and all(_walkable(t) for t in (a.q, a.k, a.g))
    )


def fits_products(a: Args, do: Tensor | None) -> bool:
    """Whether `launch_products` can too: with the output's gradient, for 128 value channels."""
    return do is not None and a.v.shape[-1] == 128 and fits(a) and _walkable(a.v) and _walkable(do)


def fits_walks(a: Args, do: Tensor | None, chain: Tensor | None) -> bool:
    """Whether `walk` can run for this call: what the Hopper forward takes, with any gate, and no positions.

    Scores are float16 with the scale inside: far below the usual 1 / sqrt(128) their small ones would lose bits.
    """
    B, T, _, HV, K, V = a.sizes
    return (
        K == V == HEAD
        and chain is None
        and do is not None
        and do.dtype == torch.bfloat16
        and all(x.dtype == torch.bfloat16 for x in (a.q, a.k, a.v, a.g))
        and a.sigmoid
        and not a.v_first
        and 2.0**-6 <= a.scale <= 16.0
        and (a.cu is None or a.num_sequences <= MAX_SEQUENCES)
        and 3 * HV * (B * T + 64 * a.num_sequences) < 2**31  # rows of the workspace
        and fits(a)
    )


def _walkable(t: Tensor) -> bool:
    return t.element_size() == 2 and t.data_ptr() % 16 == 0 and not any(n % 16 for n in steps_of(t))


_kernel: Limited | None = None
_products: tuple[Limited, Limited] | None = None


def launch_products(
    a: Args, slots: int, tiles: int, o: Tensor, do: Tensor, u: Tensor, dd: Tensor, s: Tensor, ds: Tensor, u_unit: Tensor,
    dd_unit: Tensor, s_unit: Tensor, ds_unit: Tensor, dv: Tensor, d: Tensor, wide: Tensor, both: Tensor, unit: Tensor,
    dbeta: Tensor, rows: Tensor,
) -> None:  # fmt: skip
    global _products
    if _products is None:
        from openkda.ops.kda.hopper.products import pairs_kernel, states_kernel

        _products = Limited(states_kernel, REGISTERS), Limited(pairs_kernel, REGISTERS)
    B, T, _, HV, K, _ = a.sizes
    BK, N, packed = max(64, padded(K)), a.num_sequences, a.cu is not None
    launch(
        _products[0], BK // 64 * slots * HV,
        (a.cu, do, u, dd, s, ds, u_unit, dd_unit, s_unit, ds_unit, wide, both, unit),
        steps_of(do), (T, N, slots, tiles, a.scale), (HV, BK, packed), 4, d.device,
    )  # fmt: skip
    launch(
        _products[1], slots * HV,
        (a.v, a.beta, a.cu, o, do, u, dd, u_unit, dd_unit, dv, d, unit, dbeta, rows),
        (*steps_of(a.v), *a.beta.stride(), *steps_of(do)), (B, T, N, slots, tiles, a.scale),
        (HV, BK, packed, a.sigmoid, BETA_FLOOR), 4, d.device,
    )  # fmt: skip


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

"""Launch of the one-token kernel."""

from __future__ import annotations

from torch import Tensor

from openkda.ops.kda_block import hopper
from openkda.ops.kda_block.hopper.one import WARPS, one_kernel
from openkda.ops.triton.api import compile_ahead, first_of_kind, launch


def launch_one(
    tensors: tuple[Tensor | None, ...], old: tuple[Tensor, ...], new: tuple[Tensor, ...], numbers: tuple[float, ...],
    gate: int, H: int,
) -> None:  # fmt: skip
    """tensors: those of `one_kernel` before the states. numbers: bound, eps, norm_eps, scale."""
    q, k, v, g, beta, og, _, wq, *_, A_log, dt_bias, slots = tensors
    assert q is not None and k is not None and v is not None and g is not None  # for the type checker
    assert beta is not None and og is not None and wq is not None
    steps = (
        q.stride(0), k.stride(0), v.stride(0), g.stride(0), g.stride(2), beta.stride(0), beta.stride(2), og.stride(0),
        og.stride(2), *old[0].stride()[:3], *old[1].stride(), *old[2].stride(), *old[3].stride(),
        *new[0].stride()[:3], *new[1].stride(), *new[2].stride(), *new[3].stride(),
    )  # fmt: skip
    dense = all(_is_dense(x) for x in (*old, *new))
    programs = g.shape[0] * H
    constants = (
        H, g.shape[2] // H, wq.shape[1], gate, A_log is not None, dt_bias is not None, slots is not None, dense,
    )  # fmt: skip

    def start(many: bool) -> None:
        launch(one_kernel, programs, (*tensors, *old, *new), steps, numbers, (*constants, many), WARPS.value, q.device)

    dtypes = tuple([None if t is None else t.dtype for t in (*tensors, *old)])
    if first_of_kind(("one", q.device.index, dtypes, constants), q.device):
        compile_ahead(q.device, lambda: start(False), lambda: start(True))
    start(programs > hopper.FEW)


def _is_dense(x: Tensor) -> bool:
    """Whether each row of x is contiguous."""
    return x.shape[0] == 0 or x[0].is_contiguous()

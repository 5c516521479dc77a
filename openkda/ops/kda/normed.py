"""KDA and the gated RMSNorm behind it, as one op: `gated_rms_norm(kda(..).output, out_gate, ..)`.

In prefill with many heads the output is read and written once more for its norm, 0.15 of 0.82 ms with 96 heads and 8,192 tokens.
There the Hopper scan norms what it has in shared memory anyway (`hopper/scan_norm.py`); everywhere else the two ops run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openkda.ops.device.api import Repeated, goes_direct
from openkda.ops.kda.api import kda
from openkda.ops.kda.call import KDACall, KDAOutput
from openkda.ops.kda.gate import Gate
from openkda.ops.kda.validate import validate
from openkda.ops.norm.api import gated_rms_norm

__all__ = ["CALLS", "NormedCall", "kda_normed"]

log = logging.getLogger("openkda.ops.kda")

CALLS = Repeated()
"""Of calls that one op may do; the two ops of the others look for themselves."""
FEWEST_CHAINS = 67
"""Sequences times value heads: of fewer each half of the value channels has a processor of its own, and nobody a whole token."""


@dataclass(frozen=True, slots=True)
class NormedCall:
    """A call of `kda_normed`: of KDA, and what the norm needs besides."""

    kda: KDACall
    out_gate: Tensor
    weight: Tensor
    eps: float

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        c, gate = self.kda, self.kda.gate
        A_log, dt_bias = (None, None) if gate is None else (gate.A_log, gate.dt_bias)
        return (
            c.q, c.k, c.v, c.g, c.beta, self.out_gate, self.weight, A_log, dt_bias, c.initial_state, c.cu_seqlens,
        )  # fmt: skip


def kda_normed(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    out_gate: Float[Tensor, "B T HV V"],
    *,
    weight: Float[Tensor, " V"],
    eps: float,
    gate: Gate | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "_n HV _k _v"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " _n1"] | None = None,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    impl: str | None = None,
    together: bool | None = None,
) -> KDAOutput:
    """`kda`, whose output is normed by `gated_rms_norm` with out_gate, weight and eps. Same roundings, same gradients.

    Args: out_gate, weight, eps: of the norm (`openkda/ops/norm/api.py`); all others, impl too, as in `kda`.
        together: True forces the one op, which runs on Hopper, without gradients, not under torch.compile; it raises
            NotImplementedError with every reason. False forces the two. None chooses by sizes.
    Returns: `KDAOutput(normed output [B, T, HV, V], final_state, None)`. Raises: ValueError or TypeError, as both ops.
    """
    if _may_go_together(v, cu_seqlens, impl, together):
        call = NormedCall(
            KDACall(
                q, k, v, g, beta, gate, q.shape[-1] ** -0.5 if scale is None else scale, initial_state, output_final_state,
                cu_seqlens, use_qk_l2norm, use_beta_sigmoid, None, None, False, torch.float32,
            ),
            out_gate, weight, eps,
        )  # fmt: skip
        done = _together(call, bool(together))
        if done is not None:
            return done
    o, final, _ = kda(
        q, k, v, g, beta, gate=gate, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, use_qk_l2norm=use_qk_l2norm, use_beta_sigmoid=use_beta_sigmoid, impl=impl,
    )  # fmt: skip
    return KDAOutput(gated_rms_norm(o, out_gate, weight, eps), final)


def _may_go_together(v: Tensor, cu_seqlens: Tensor | None, impl: str | None, together: bool | None) -> bool:
    """What can be seen at a glance, so that no other call is any slower."""
    if together is not None or impl not in (None, "hopper"):
        return bool(together)
    if not isinstance(v, Tensor) or not v.is_cuda or torch.is_grad_enabled() or v.dim() != 4:
        return False
    sequences = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    return sequences * v.shape[2] >= FEWEST_CHAINS


def _together(call: NormedCall, forced: bool) -> KDAOutput | None:
    c = call.kda
    gate = c.gate
    options = (
        "normed", type(gate), getattr(gate, "lower_bound", None), c.scale, call.eps, c.output_final_state, c.use_qk_l2norm,
        c.use_beta_sigmoid, forced,
    )  # fmt: skip
    tensors = call.tensors
    key, again = CALLS.look(tensors, options)
    done: KDAOutput | None = None if again is None else again(tensors)
    if done is not None:
        return done
    ...

"""The contract of KDA with the gated RMSNorm behind it: `gated_rms_norm(kda(..).output, out_gate, weight, eps)`.

In prefill with many heads the output is read and written once more for its norm, 0.15 of 0.82 ms with 96 heads and 8,192
tokens. There the Hopper scan norms what it has in shared memory anyway (`hopper/scan_norm.py`); everywhere else the two ops
run, one behind the other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openkda.ops.device.api import Repeated, is_watched
from openkda.ops.kda.call import KDACall, KDAOutput
from openkda.ops.kda.gate import Gate
from openkda.ops.kda.validate import validate
from openkda.ops.norm.api import check_norm

__all__ = ["CALLS", "IMPLEMENTATIONS", "NormedCall", "kda_normed"]

log = logging.getLogger("openkda.ops.kda")

IMPLEMENTATIONS = ("hopper", "separate")
"""In order of preference. Each is a module with `refusals(call)` and `run(call, key)`."""

FEWEST_CHAINS = 40
"""Sequences times value heads. With fewer each half of the value channels has a processor of its own, and one op saves a launch
at most."""

CALLS = Repeated()


@dataclass(frozen=True, slots=True)
class NormedCall:
    """A call of `kda_normed`: that of KDA, and what the norm needs besides."""

    kda: KDACall
    out_gate: Tensor
    weight: Tensor
    eps: float

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        c = self.kda
        return (
            c.q, c.k, c.v, c.g, c.beta, self.out_gate, self.weight, getattr(c.gate, "A_log", None),
            getattr(c.gate, "dt_bias", None), c.initial_state, c.cu_seqlens,
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
) -> KDAOutput:
    """`kda`, its output normed by `gated_rms_norm`: the same roundings (the output is cast before its norm) and gradients.

    Args: out_gate, weight, eps: those of the norm; all others as in `kda`.
        impl: "hopper" is one op, without gradients, and not under torch.compile; it raises NotImplementedError with every
            reason. "separate" is the two ops. None chooses by sizes.
    Returns: `KDAOutput(normed output [B, T, HV, V] in v's dtype, final_state, None)`. Raises: ValueError or TypeError, as both.
    """
    dtype = torch.promote_types(q.dtype, torch.float32) if isinstance(q, Tensor) else torch.float32
    default = q.shape[-1] ** -0.5 if isinstance(q, Tensor) and q.dim() and q.shape[-1] else 1.0
    call = NormedCall(
        KDACall(
            q, k, v, g, beta, gate, default if scale is None else scale, initial_state, output_final_state, cu_seqlens,
            use_qk_l2norm, use_beta_sigmoid, None, None, False, dtype,
        ),
        out_gate, weight, eps,
    )  # fmt: skip
    if impl is None and not _may_be_one(call.kda):
        return _module("separate").run(call, None)
    tensors = call.tensors
    key, again = CALLS.look(
        tensors,
        (type(gate), getattr(gate, "lower_bound", None), scale, eps, output_final_state, use_qk_l2norm, use_beta_sigmoid, impl),
    )  # fmt: skip
    done = None if again is None else again(tensors)
    if done is not None:
        return done
    seen = CALLS.seen(key)
    return CALLS.module(key, lambda: _choose(call, impl)).run(call, seen)


def _may_be_one(c: KDACall) -> bool:
    """What can be seen at a glance, so that no other call is any slower."""
    if not isinstance(c.v, Tensor) or not c.v.is_cuda or c.v.dim() != 4 or torch.is_grad_enabled() or is_watched():
        return False
    sequences = c.cu_seqlens.numel() - 1 if isinstance(c.cu_seqlens, Tensor) else c.v.shape[0]
    return sequences * c.v.shape[2] >= FEWEST_CHAINS


def _choose(call: NormedCall, impl: str | None) -> ModuleType:
    if impl is not None and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLEMENTATIONS)} or None, received {impl!r}")
    validate(call.kda, False)
    check_norm(call.kda.v, (call.out_gate,), call.weight, call.eps)
    if impl is not None:
        reasons = _module(impl).refusals(call)
        if reasons:
            raise NotImplementedError(f"impl={impl!r} cannot run this call: " + "; ".join(reasons))
        return _module(impl)
    hopper = _module("hopper")
    reasons = hopper.refusals(call) or hopper.declines(call)
    _log_once(tuple(reasons))
    return _module("separate") if reasons else hopper


def _module(name: str) -> ModuleType:
    if name == "hopper":
        from openkda.ops.kda.hopper import normed

        return normed
    from openkda.ops.kda import separate

    return separate


@cache
def _log_once(reasons: tuple[str, ...]) -> None:
    log.info("kda and its norm run %s", f"as two ops ({'; '.join(reasons)})" if reasons else "as one op, hopper")

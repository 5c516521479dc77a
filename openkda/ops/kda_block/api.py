"""The contract of the KDA block for decoding: everything between a layer's projections, in one pass over the state.

    q, k = l2norm(silu(conv(q))), l2norm(silu(conv(k)))       v = silu(conv(v))
    o    = KDA(q, k, v, gate(g), sigmoid(beta))               y = RMSNorm(o) * norm * sigmoid(out_gate)

It is the composition of `short_conv`, `kda` and `gated_rms_norm`, with their roundings: convolutions and o are cast to the
activations' dtype, so that prefill by those ops and decoding by this one agree. Source: Kimi K3 report, section 2.1.
"""

from __future__ import annotations

from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openkda.ops.device.api import log_choice
from openkda.ops.kda.api import BoundedGate, Gate, SoftplusGate
from openkda.ops.kda_block.call import CALLS, BlockCall, BlockOutput, BlockState, BlockWeights
from openkda.ops.kda_block.checks import MAX_TOKENS, bad, check_state, check_tokens, check_types, is_usual
from openkda.ops.kda_block.commit import kda_block_commit

__all__ = [
    "IMPLEMENTATIONS",
    "MAX_TOKENS",
    "BlockOutput",
    "BlockState",
    "BlockWeights",
    "kda_block",
    "kda_block_commit",
]

IMPLEMENTATIONS = ("triton", "reference")
"""In order of preference. Each is a module of this folder with `refusals(call)` and `run(call)`."""


def kda_block(
    q: Float[Tensor, "N T HK"],
    k: Float[Tensor, "N T HK"],
    v: Float[Tensor, "N T HV_V"],
    g: Float[Tensor, "N T HV K"],
    beta: Float[Tensor, "N T HV"],
    out_gate: Float[Tensor, "N T HV V"],
    *,
    weights: BlockWeights,
    state: BlockState,
    gate: Gate,
    slots: Int[Tensor, " _n"] | None = None,
    scale: float | None = None,
    keep: str = "last",
    impl: str | None = None,
) -> BlockOutput:
    """T = 1 .. 64 new tokens for each of N sequences. Not differentiable.

    Args:
        q, k: [N, T, H * K] and v: [N, T, HV * V], the projections before the convolutions, one dtype.
        g: [N, T, HV, K] raw gate input. beta: [N, T, HV] logits. out_gate: [N, T, HV, V] logits of the output gate.
        weights, state: see `BlockWeights` and `BlockState`.
        slots: [N] int32 or int64. `state` is then a pool that is read and written IN PLACE, sequence n in slot slots[n];
            -1: the row is padding, its output is zero and nothing is touched. Without slots, `state` has N rows, is left
            untouched, and new tensors come back.
        scale: factor on q; default K ** -0.5.
        keep: "last" keeps the state after the last token. "all" writes nothing and returns the recurrent state after
            every token, for verifying drafted tokens: `kda_block_commit` then keeps the one after the last accepted.
        impl: a name out of IMPLEMENTATIONS; None chooses.

    Returns: `BlockOutput`. Raises: ValueError or TypeError, showing expected and received, before anything runs.
    """
    tensors = _tensors(q, k, v, g, beta, out_gate, weights, state, slots, gate)
    if tensors is None:
        check_types(weights, state, gate)
    key, again = (None, None) if tensors is None else CALLS.look(
        tensors, (type(gate), gate.lower_bound, weights.norm_eps, scale, keep, impl)
    )  # fmt: skip
    done = None if again is None or tensors is None else again(tensors, state)
    if done is not None:
        return done
    if keep not in ("last", "all"):
        bad("keep", "'last' or 'all'", repr(keep))
    call = BlockCall(
        q, k, v, g, beta, out_gate, weights, state, slots, gate, _default_scale(g) if scale is None else scale,
        keep == "all", CALLS.seen(key),
    )  # fmt: skip
    return CALLS.module(key, lambda: _checked(call, impl)).run(call)


def _default_scale(g: Tensor) -> float:
    if not isinstance(g, Tensor) or not g.dim() or not g.shape[-1]:
        bad("g.shape", "[N, T, HV, K]", list(g.shape) if isinstance(g, Tensor) else type(g).__name__)
    return float(g.shape[-1] ** -0.5)


def _tensors(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, out_gate: Tensor, weights: BlockWeights,
    state: BlockState, slots: Tensor | None, gate: Gate,
) -> tuple[Tensor | None, ...] | None:  # fmt: skip
    """All tensors of a call in one order; None where something is of another type than it should be (checked later)."""
    if (
        type(weights) is not BlockWeights
        or type(state) is not BlockState
        or type(gate) not in (SoftplusGate, BoundedGate)
    ):
        return None
    w, s = weights, state
    return (
        q, k, v, g, beta, out_gate, w.conv_q, w.conv_k, w.conv_v, w.norm, gate.A_log, gate.dt_bias, s.recurrent, s.conv_q,
        s.conv_k, s.conv_v, slots,
    )  # fmt: skip


def _module(name: str) -> ModuleType:
    """Written out, because torch.compile follows an import statement but not importlib."""
    if name == "triton":
        from openkda.ops.kda_block import triton

        return triton
    from openkda.ops.kda_block import reference

    return reference


def _checked(call: BlockCall, impl: str | None) -> ModuleType:
    if not is_usual(call):
        check_tokens(call)
        check_state(call)
    return _choose(call, impl)


def _choose(call: BlockCall, impl: str | None) -> ModuleType:
    if impl is not None and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLEMENTATIONS)} or None, received {impl!r}")
    reasons: list[str] = []
    for name in (IMPLEMENTATIONS if call.q.is_cuda else ("reference",)) if impl is None else (impl,):
        module = _module(name)
        refused = module.refusals(call)
        if not refused:
            if impl is None and not torch.compiler.is_compiling():
                log_choice("kda_block", call.q.device.type, name, tuple(reasons))
            return module
        reasons += [f"{name}: {r}" for r in refused]
    raise NotImplementedError("no kda_block implementation can run this call: " + "; ".join(reasons))

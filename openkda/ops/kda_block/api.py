"""The contract of the KDA block for decoding: everything between a layer's projections, in one pass over the state.

    q, k = l2norm(silu(conv(q))), l2norm(silu(conv(k)))       v = silu(conv(v))
    o    = KDA(q, k, v, gate(g), sigmoid(beta))               y = RMSNorm(o) * norm * sigmoid(out_gate)

It is the composition of `short_conv`, `kda` and `gated_rms_norm`, with their roundings: convolutions and o are cast to the
activations' dtype, so that prefill by those ops and decoding by this one agree. Source: Kimi K3 report, section 2.1.
"""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openkda.ops.device.api import call_key
from openkda.ops.kda.api import BoundedGate, Gate, SoftplusGate
from openkda.ops.kda_block.call import REPLAYS, BlockCall, BlockOutput, BlockState, BlockWeights

__all__ = ["IMPLEMENTATIONS", "MAX_TOKENS", "BlockOutput", "BlockState", "BlockWeights", "kda_block"]

IMPLEMENTATIONS = ("triton", "reference")
"""In order of preference. Each is a module of this folder with `refusals(call)` and `run(call)`."""

MAX_TOKENS = 64
MOST_KEYS = 1024
_chosen: dict[tuple[object, ...], ModuleType] = {}
"""Calls that were validated, by `call_key`, and what runs them."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    slots: Int[Tensor, N] | None = None,
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
            every token (for verifying drafted tokens: continue from the one after the last accepted).
        impl: a name out of IMPLEMENTATIONS; None chooses.

    Returns: `BlockOutput`. Raises: ValueError or TypeError, showing expected and received, before anything runs.
    """
    tensors = _tensors(q, k, v, g, beta, out_gate, weights, state, slots, gate)
    key = None if tensors is None else call_key(
        tensors, (type(gate), gate.lower_bound, weights.norm_eps, scale, keep, impl)
    )  # fmt: skip
    again = None if key is None else REPLAYS.get(key)
    done = None if again is None or tensors is None else again(tensors, state)
    if done is not None:
        return done
    if keep not in ("last", "all"):
        _bad("keep", "'last' or 'all'", repr(keep))
    call = BlockCall(
        q, k, v, g, beta, out_gate, weights, state, slots, gate, g.shape[-1] ** -0.5 if scale is None else scale,
        keep == "all", key if key in _chosen else None,
    )  # fmt: skip
    module = None if key is None else _chosen.get(key)
    if module is None:
        _check_tokens(call)
        _check_state(call)
        module = _choose(call, impl)
        if key is not None:
            if len(_chosen) >= MOST_KEYS:
                _chosen.clear()
                REPLAYS.clear()
            _chosen[key] = module
    return module.run(call)


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


def _bad(name: str, expected: object, received: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: expected {expected}, received {received}")


def _shape(name: str, t: Tensor, shape: tuple[int, ...], letters: str, like: Tensor) -> None:
    if tuple(t.shape) != shape:
        _bad(f"{name}.shape", f"{letters} = {list(shape)}", list(t.shape))
    if t.device != like.device:
        _bad(f"{name}.device", f"{like.device} (that of q)", t.device)


def _check_tokens(call: BlockCall) -> None:
    q, g, out = call.q, call.g, call.out_gate
    for name in ("q", "k", "v", "g", "beta", "out_gate"):
        t = getattr(call, name)
        if not isinstance(t, Tensor) or t.dtype not in _FLOATS:
            _bad(name, "a float tensor", getattr(t, "dtype", type(t).__name__), TypeError)
    if q.dim() != 3 or g.dim() != 4 or out.dim() != 4:
        _bad(
            "q, g, out_gate shapes", "[N, T, H * K], [N, T, HV, K], [N, T, HV, V]", [list(x.shape) for x in (q, g, out)]
        )
    N, T = q.shape[:2]
    HV, K = g.shape[2:]
    V = out.shape[3]
    if not 1 <= T <= MAX_TOKENS:
        _bad("T", f"1 to {MAX_TOKENS} tokens (longer: short_conv and kda)", T)
    if q.shape[2] % K or HV % max(q.shape[2] // K, 1):
        _bad("q.shape[2]", f"H * K with K = {K} and HV = {HV} a multiple of H", q.shape[2])
    _shape("k", call.k, tuple(q.shape), "[N, T, H * K]", q)
    _shape("v", call.v, (N, T, HV * V), "[N, T, HV * V]", q)
    _shape("g", g, (N, T, HV, K), "[N, T, HV, K]", q)
    _shape("beta", call.beta, (N, T, HV), "[N, T, HV]", q)
    _shape("out_gate", out, (N, T, HV, V), "[N, T, HV, V]", q)
    for name in ("k", "v"):
        if getattr(call, name).dtype != q.dtype:
            _bad(f"{name}.dtype", f"{q.dtype} (that of q)", getattr(call, name).dtype, TypeError)
    if not isinstance(call.gate, SoftplusGate | BoundedGate):
        _bad("gate", "SoftplusGate or BoundedGate", type(call.gate).__name__, TypeError)


def _check_state(call: BlockCall) -> None:
    w, s, q = call.weights, call.state, call.q
    (HV, K), V = call.g.shape[2:], call.out_gate.shape[3]
    HK, W = q.shape[2], w.conv_q.shape[-1]
    if W not in (2, 3, 4):
        _bad("weights.conv_q.shape", "[H * K, W] with W = 2, 3 or 4", list(w.conv_q.shape))
    rows = s.recurrent.shape[0]
    if call.slots is None and rows != q.shape[0]:
        _bad("state rows", f"N = {q.shape[0]} (or pass slots)", rows)
    for name, width in (("conv_q", HK), ("conv_k", HK), ("conv_v", HV * V)):
        _shape(f"weights.{name}", getattr(w, name), (width, W), "[channels, W]", q)
        _shape(f"state.{name}", getattr(s, name), (rows, width, W - 1), "[P, channels, W - 1]", q)
        if getattr(s, name).dtype != q.dtype:
            _bad(f"state.{name}.dtype", f"{q.dtype} (that of q)", getattr(s, name).dtype, TypeError)
    _shape("weights.norm", w.norm, (V,), "[V]", q)
    _shape("state.recurrent", s.recurrent, (rows, HV, K, V), "[P, HV, K, V]", q)
    allowed = (torch.promote_types(q.dtype, torch.float32), torch.bfloat16)
    if s.recurrent.dtype not in allowed:
        _bad("state.recurrent.dtype", " or ".join(map(str, allowed)), s.recurrent.dtype, TypeError)
    if call.slots is not None:
        _shape("slots", call.slots, (q.shape[0],), "[N]", q)
        if call.slots.dtype not in (torch.int32, torch.int64):
            _bad("slots.dtype", "int32 or int64", call.slots.dtype, TypeError)


def _module(name: str) -> ModuleType:
    """Written out, because torch.compile follows an import statement but not importlib."""
    if name == "triton":
        from openkda.ops.kda_block import triton

        return triton
    from openkda.ops.kda_block import reference

    return reference


def _choose(call: BlockCall, impl: str | None) -> ModuleType:
    if impl is not None and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLEMENTATIONS)} or None, received {impl!r}")
    reasons: list[str] = []
    for name in (IMPLEMENTATIONS if call.q.is_cuda else ("reference",)) if impl is None else (impl,):
        module = _module(name)
        refused = module.refusals(call)
        if not refused:
            return module
        reasons += [f"{name}: {r}" for r in refused]
    raise NotImplementedError("no kda_block implementation can run this call: " + "; ".join(reasons))

"""Checks at the door of the block's functions: every message shows what was expected and what came."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from openkda.ops.device.api import has_values
from openkda.ops.kda.api import BoundedGate, SoftplusGate, bias_fits, check_slots, is_number, overlaps_itself
from openkda.ops.kda_block.call import BlockCall, BlockState, BlockWeights

MAX_TOKENS = 64
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WIDE = (torch.float32, torch.float64)
_INTS = (torch.int32, torch.int64)


def bad(name: str, expected: object, received: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: expected {expected}, received {received}")


def check_types(weights: object, state: object, gate: object) -> None:
    if not isinstance(weights, BlockWeights):
        bad("weights", "BlockWeights", type(weights).__name__, TypeError)
    if not isinstance(state, BlockState):
        bad("state", "BlockState", type(state).__name__, TypeError)
    if not isinstance(gate, SoftplusGate | BoundedGate):
        bad("gate", "SoftplusGate or BoundedGate", type(gate).__name__, TypeError)


def check_shape(name: str, t: Tensor, shape: tuple[int, ...], letters: str, like: Tensor) -> None:
    if not isinstance(t, Tensor):
        bad(name, "a torch.Tensor", type(t).__name__, TypeError)
    if tuple(t.shape) != shape:
        bad(f"{name}.shape", f"{letters} = {list(shape)}", list(t.shape))
    if t.device != like.device:
        bad(f"{name}.device", f"{like.device} (that of q)", t.device)


def is_usual(call: BlockCall) -> bool:
    """Whether a call without slots passes `check_tokens` and `check_state`, asked at once: these are what says why not, and
    take 34 us of a decoding step on a CPU."""
    w, s, gate, q, g = call.weights, call.state, call.gate, call.q, call.g
    tensors = (q, call.k, call.v, g, call.beta, call.out_gate, w.conv_q, w.conv_k, w.conv_v, w.norm, *s.tensors())
    if call.slots is not None or not all(isinstance(t, Tensor) for t in tensors):
        return False
    if (q.dim(), g.dim(), s.recurrent.dim(), w.conv_q.dim()) != (3, 4, 4, 2):
        return False
    (N, T, HK), (HV, K), V, W = q.shape, g.shape[2:], s.recurrent.shape[-1], w.conv_q.shape[-1]
    shapes = (
        (N, T, HK), (N, T, HK), (N, T, HV * V), (N, T, HV, K), (N, T, HV), (N, T, HV, V), (HK, W), (HK, W), (HV * V, W), (V,),
        (N, HV, K, V), (N, HK, W - 1), (N, HK, W - 1), (N, HV * V, W - 1),
    )  # fmt: skip
    return (
        tuple(t.shape for t in tensors) == shapes
        and isinstance(gate, SoftplusGate | BoundedGate)
        and (gate.A_log is not None or isinstance(gate, BoundedGate))
        and all(t is None or (isinstance(t, Tensor) and t.numel() == n and t.device == q.device and t.dtype in _WIDE)
                for t, n in ((gate.A_log, HV), (gate.dt_bias, HV * K)))
        and (gate.dt_bias is None or bias_fits(gate.dt_bias, HV, K))
        and _is_finite(call.scale)
        and _is_finite(w.norm_eps) and w.norm_eps >= 0
        and 1 <= T <= MAX_TOKENS
        and W in (2, 3, 4)
        and HK > 0 < K
        and HK % K == 0
        and HV % (HK // K) == 0
        and all(t.device == q.device for t in tensors)
        and all(t.dtype == q.dtype for t in (call.k, call.v, s.conv_q, s.conv_k, s.conv_v))
        and all(t.dtype in _FLOATS for t in (q, g, call.beta, call.out_gate, w.conv_q, w.conv_k, w.conv_v, w.norm))
        and s.recurrent.dtype in (torch.promote_types(q.dtype, torch.float32), torch.bfloat16)
    )  # fmt: skip


def _is_finite(x: float) -> bool:
    return is_number(x) and -math.inf < x < math.inf


def check_tokens(call: BlockCall) -> None:
    q, g, out = call.q, call.g, call.out_gate
    check_types(call.weights, call.state, call.gate)
    for name in ("q", "k", "v", "g", "beta", "out_gate"):
        t = getattr(call, name)
        if not isinstance(t, Tensor) or t.dtype not in _FLOATS:
            bad(name, "a float tensor", getattr(t, "dtype", type(t).__name__), TypeError)
    if q.dim() != 3 or g.dim() != 4 or out.dim() != 4:
        bad(
            "q, g, out_gate shapes", "[N, T, H * K], [N, T, HV, K], [N, T, HV, V]", [list(x.shape) for x in (q, g, out)]
        )
    N, T = q.shape[:2]
    HV, K = g.shape[2:]
    V = out.shape[3]
    if not 1 <= T <= MAX_TOKENS:
        bad("T", f"1 to {MAX_TOKENS} tokens (longer: short_conv and kda)", T)
    if K < 1 or q.shape[2] % K or HV % max(q.shape[2] // K, 1):
        bad("q.shape[2]", f"H * K with K = {K} and HV = {HV} a multiple of H", q.shape[2])
    check_shape("k", call.k, tuple(q.shape), "[N, T, H * K]", q)
    check_shape("v", call.v, (N, T, HV * V), "[N, T, HV * V]", q)
    check_shape("g", g, (N, T, HV, K), "[N, T, HV, K]", q)
    check_shape("beta", call.beta, (N, T, HV), "[N, T, HV]", q)
    check_shape("out_gate", out, (N, T, HV, V), "[N, T, HV, V]", q)
    for name in ("k", "v"):
        if getattr(call, name).dtype != q.dtype:
            bad(f"{name}.dtype", f"{q.dtype} (that of q)", getattr(call, name).dtype, TypeError)
    if not is_number(call.scale):
        bad("scale", "a number", type(call.scale).__name__, TypeError)
    if not _is_finite(call.scale):
        bad("scale", "a finite number", call.scale)
    if call.gate.A_log is None and isinstance(call.gate, SoftplusGate):
        bad("gate.A_log", f"a float32 tensor of {HV} values", None)
    for name, count in (("A_log", HV), ("dt_bias", HV * K)):
        t = getattr(call.gate, name)
        if t is not None and (not isinstance(t, Tensor) or t.numel() != count or t.device != q.device):
            got = f"{list(t.shape)} on {t.device}" if isinstance(t, Tensor) else type(t).__name__
            bad(f"gate.{name}", f"{count} values on {q.device}", got)
        if t is not None and t.dtype not in _WIDE:
            bad(f"gate.{name}.dtype", "float32 (16-bit gate parameters stop learning)", t.dtype, TypeError)
    if call.gate.dt_bias is not None and not bias_fits(call.gate.dt_bias, HV, K):
        bad("gate.dt_bias", f"[HV, K] = {[HV, K]} or [HV * K] (no other order)", list(call.gate.dt_bias.shape))


def check_state(call: BlockCall) -> None:
    w, s, q = call.weights, call.state, call.q
    (HV, K), V = call.g.shape[2:], call.out_gate.shape[3]
    for name in ("conv_q", "conv_k", "conv_v", "norm"):
        t = getattr(w, name)
        if not isinstance(t, Tensor) or t.dtype not in _FLOATS:
            bad(f"weights.{name}", "a float tensor", getattr(t, "dtype", type(t).__name__), TypeError)
    if not _is_finite(w.norm_eps) or w.norm_eps < 0:
        bad("weights.norm_eps", "a finite number >= 0", w.norm_eps)
    for name, t in zip(("recurrent", "conv_q", "conv_k", "conv_v"), s.tensors(), strict=True):
        if not isinstance(t, Tensor):
            bad(f"state.{name}", "a torch.Tensor", type(t).__name__, TypeError)
    HK, W = q.shape[2], w.conv_q.shape[-1] if w.conv_q.dim() else 0
    if W not in (2, 3, 4):
        bad("weights.conv_q.shape", "[H * K, W] with W = 2, 3 or 4", list(w.conv_q.shape))
    if s.recurrent.dim() != 4 or w.conv_q.dim() != 2:
        bad(
            "state.recurrent, weights.conv_q shapes",
            "[P, HV, K, V], [channels, W]",
            f"{list(s.recurrent.shape)}, {list(w.conv_q.shape)}",
        )
    rows = s.recurrent.shape[0]
    if call.slots is None and rows != q.shape[0]:
        bad("state rows", f"N = {q.shape[0]} (or pass slots)", rows)
    for name, width in (("conv_q", HK), ("conv_k", HK), ("conv_v", HV * V)):
        check_shape(f"weights.{name}", getattr(w, name), (width, W), "[channels, W]", q)
        check_shape(f"state.{name}", getattr(s, name), (rows, width, W - 1), "[P, channels, W - 1]", q)
        if getattr(s, name).dtype != q.dtype:
            bad(f"state.{name}.dtype", f"{q.dtype} (that of q)", getattr(s, name).dtype, TypeError)
    check_shape("weights.norm", w.norm, (V,), "[V]", q)
    check_shape("state.recurrent", s.recurrent, (rows, HV, K, V), "[P, HV, K, V]", q)
    allowed = (torch.promote_types(q.dtype, torch.float32), torch.bfloat16)
    if s.recurrent.dtype not in allowed:
        bad("state.recurrent.dtype", " or ".join(map(str, allowed)), s.recurrent.dtype, TypeError)
    if call.slots is not None:
        _check_pool(call.slots, s, q)


def _check_pool(slots: Tensor, state: BlockState, q: Tensor) -> None:
    check_shape("slots", slots, (q.shape[0],), "[N]", q)
    if slots.dtype not in _INTS:
        bad("slots.dtype", "int32 or int64", slots.dtype, TypeError)
    if not state.recurrent.shape[0]:
        bad("state", "a pool of at least one slot", list(state.recurrent.shape))
    for name, t in zip(("recurrent", "conv_q", "conv_k", "conv_v"), state.tensors(), strict=True):
        if overlaps_itself(t):
            bad(f"state.{name}", "a pool whose slots are memory of their own", f"strides {t.stride()}")
    if slots.device.type == "cpu" and has_values(slots):
        check_slots("slots", slots, state.recurrent.shape[0])


def check_accepted(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, accepted: Tensor, state: BlockState, slots: Tensor | None
) -> None:
    """The arguments of `kda_block_commit`."""
    for name, t in (("states", states), ("q", q), ("k", k), ("v", v), ("accepted", accepted)):
        if not isinstance(t, Tensor):
            bad(name, "a torch.Tensor", type(t).__name__, TypeError)
    if not isinstance(state, BlockState):
        bad("state", "BlockState", type(state).__name__, TypeError)
    if states.dtype not in _FLOATS:
        bad("states.dtype", "float32, as kda_block returned them", states.dtype, TypeError)
    if states.dim() != 5 or q.dim() != 3:
        bad("states, q shapes", "[N, T, HV, K, V], [N, T, H * K]", [list(states.shape), list(q.shape)])
    N, T, HV, K, V = states.shape
    rows, HK, tail = state.recurrent.shape[0], q.shape[2], state.conv_q.shape[-1]
    if slots is None and rows != N:
        bad("state rows", f"N = {N} (or pass slots)", rows)
    check_shape("q", q, (N, T, HK), "[N, T, H * K]", states)
    check_shape("k", k, (N, T, HK), "[N, T, H * K]", q)
    check_shape("v", v, (N, T, HV * V), "[N, T, HV * V]", q)
    check_shape("state.recurrent", state.recurrent, (rows, HV, K, V), "[P, HV, K, V]", q)
    for name, x in (("conv_q", q), ("conv_k", k), ("conv_v", v)):
        window = getattr(state, name)
        check_shape(f"state.{name}", window, (rows, x.shape[2], tail), "[P, channels, W - 1]", q)
        if window.dtype != x.dtype:
            bad(f"state.{name}.dtype", f"{x.dtype} (that of the tokens)", window.dtype, TypeError)
    check_shape("accepted", accepted, (N,), "[N]", q)
    if accepted.dtype not in _INTS:
        bad("accepted.dtype", "int32 or int64", accepted.dtype, TypeError)
    if slots is not None:
        _check_pool(slots, state, q)

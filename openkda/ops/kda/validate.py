"""Checks at the door of `kda` and `kda_step`: every message shows what was expected and what came."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from openkda.ops.device.api import has_values
from openkda.ops.kda.call import KDACall
from openkda.ops.kda.gate import BoundedGate, SoftplusGate, bias_fits, is_number

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTS = (torch.int32, torch.int64)
_STEP_AXES = {"q": "[N, H, K]", "k": "[N, H, K]", "v": "[N, HV, V]", "g": "[N, HV, K]", "beta": "[N, HV]"}


def validate(call: KDACall, check_inputs: bool) -> KDACall:
    """Raise ValueError/TypeError for a malformed call; else return it. Reads no tensor values on a GPU unless asked."""
    _check_tokens(call)
    _check_gate(call)
    if not is_number(call.scale):
        _bad("scale", "a number", type(call.scale).__name__, TypeError)
    if not -math.inf < call.scale < math.inf:  # in a graph it may be a symbol, which math.isfinite cannot take
        _bad("scale", "a finite number", call.scale)
    for name in ("output_final_state", "use_qk_l2norm", "use_beta_sigmoid", "state_v_first"):
        if not isinstance(getattr(call, name), bool):
            _bad(name, "True or False", repr(getattr(call, name)), TypeError)
    if call.recompute is not None and not isinstance(call.recompute, bool):
        _bad("recompute", "None, True or False", repr(call.recompute), TypeError)
    look = check_inputs or (call.q.device.type == "cpu" and has_values(call.q))
    _check_packing(call, look)
    _check_states(call)
    if call.state_positions is not None and look:
        _check_range("state_positions", call.state_positions, 0, call.q.shape[0] * call.q.shape[1])
    if call.state_indices is not None and call.initial_state is not None and look:
        check_slots("state_indices", call.state_indices, call.initial_state.shape[0])
    if check_inputs:
        _check_values(call)
    return call


def validate_step(call: KDACall, check_inputs: bool) -> KDACall:
    """As `validate`, for one token a row; rows are sequences and never packed. The T axis of 1 is ours, not the user's."""
    for name, axes in _STEP_AXES.items():
        shape = list(getattr(call, name).shape)
        if len(shape) != axes.count(",") + 2:
            _bad(f"{name}.shape", f"{axes}, one token a sequence without a T axis", shape[:1] + shape[2:])
    if call.state_dtype not in (torch.float32, torch.float64, torch.bfloat16):
        _bad("state dtype", "float32, bfloat16 (or float64 with float64 inputs)", call.state_dtype)
    return validate(call, check_inputs)


def _bad(name: str, expected: object, received: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: expected {expected}, received {received}")


def _check_tensor(name: str, t: object, like: Tensor) -> None:
    if not isinstance(t, Tensor):
        _bad(name, "a torch.Tensor", type(t).__name__, TypeError)
    if t.device != like.device:
        _bad(f"{name}.device", f"{like.device} (that of q)", t.device)
    if t.layout != torch.strided:
        _bad(f"{name}.layout", "torch.strided", t.layout, TypeError)


def _check_shape(name: str, t: Tensor, shape: tuple[int, ...], letters: str) -> None:
    if tuple(t.shape) != shape:
        _bad(f"{name}.shape", f"{letters} = {list(shape)}", list(t.shape))


def _check_tokens(call: KDACall) -> None:
    q, k, v, g, beta = call.q, call.k, call.v, call.g, call.beta
    for name, t in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        _check_tensor(name, t, q)
        if t.dtype not in _FLOATS:
            _bad(f"{name}.dtype", "float16, bfloat16, float32 or float64", t.dtype, TypeError)
    if q.dim() != 4:
        _bad("q.shape", "[B, T, H, K]", list(q.shape))
    B, T, H, K = q.shape
    _check_shape("k", k, (B, T, H, K), "[B, T, H, K]")
    if v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        _bad("v.shape", f"[B, T, HV, V] = [{B}, {T}, HV, V]", list(v.shape))
    HV, V = v.shape[2:]
    if min(H, K, HV, V) < 1:
        _bad("q, v sizes", "at least one head and one channel", f"H={H} K={K} HV={HV} V={V}")
    if HV % H:
        _bad("v heads HV", f"a multiple of the {H} query/key heads", HV)
    _check_shape("g", g, (B, T, HV, K), "[B, T, HV, K]")
    _check_shape("beta", beta, (B, T, HV), "[B, T, HV]")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            _bad(f"{name}.dtype", f"{q.dtype} (that of q)", t.dtype, TypeError)


def _check_gate(call: KDACall) -> None:
    gate = call.gate
    if gate is None:
        return
    if not isinstance(gate, SoftplusGate | BoundedGate):
        _bad("gate", "None, SoftplusGate or BoundedGate", type(gate).__name__, TypeError)
    HV, K = call.g.shape[2:]
    if isinstance(gate, SoftplusGate) and gate.A_log is None:
        _bad("SoftplusGate.A_log", f"a float tensor of HV = {HV} values", None)
    for name, t, count in (("A_log", gate.A_log, HV), ("dt_bias", gate.dt_bias, HV * K)):
        if t is None:
            continue
        _check_tensor(f"gate.{name}", t, call.q)
        if t.dtype not in (torch.float32, torch.float64):
            _bad(f"gate.{name}.dtype", "float32 (16-bit gate parameters stop learning)", t.dtype, TypeError)
        if t.numel() != count:
            _bad(f"gate.{name}", f"{count} values ({'HV' if name == 'A_log' else 'HV * K'})", list(t.shape))
    if gate.dt_bias is not None and not bias_fits(gate.dt_bias, HV, K):
        _bad("gate.dt_bias", f"[HV, K] = {[HV, K]} or [HV * K] (no other order)", list(gate.dt_bias.shape))


def _check_packing(call: KDACall, look: bool) -> None:
    cu = call.cu_seqlens
    if cu is None:
        return
    B, T = call.q.shape[:2]
    _check_tensor("cu_seqlens", cu, call.q)
    if cu.dtype not in _INTS:
        _bad("cu_seqlens.dtype", "int32 or int64", cu.dtype, TypeError)
    if cu.dim() != 1 or cu.numel() < 2:
        _bad("cu_seqlens.shape", "[N + 1] with N >= 1", list(cu.shape))
    if B != 1:
        _bad("batch with cu_seqlens", "B = 1 (the pack lies along T)", f"B = {B}")
    if look:
        if int(cu[0]) != 0 or int(cu[-1]) != T:
            _bad("cu_seqlens", f"first value 0 and last value T = {T}", f"{int(cu[0])} and {int(cu[-1])}")
        drops = cu.diff() < 0
        if bool(drops.any()):
            i = int(drops.int().argmax())
            _bad("cu_seqlens", "values that never decrease", f"{int(cu[i])} then {int(cu[i + 1])} at index {i}")


def _check_states(call: KDACall) -> None:
    allowed = (torch.promote_types(call.q.dtype, torch.float32), torch.bfloat16)
    if call.state_dtype not in allowed:
        _bad("state_dtype", " or ".join(map(str, allowed)), call.state_dtype, TypeError)
    (HV, K), V, N = call.g.shape[2:], call.v.shape[3], call.num_sequences
    state, slots = call.initial_state, call.state_indices
    if state is not None:
        _check_tensor("initial_state", state, call.q)
        if state.dtype != call.state_dtype:
            _bad("initial_state.dtype", f"{call.state_dtype} (state_dtype)", state.dtype, TypeError)
        tail = (HV, V, K) if call.state_v_first else (HV, K, V)
        first = N if slots is None else (state.shape[0] if state.dim() else 0)
        letters = f"[{'N' if slots is None else 'P'}, HV, {'V, K' if call.state_v_first else 'K, V'}]"
        _check_shape("initial_state", state, (first, *tail), letters)
    if slots is not None:
        _check_pool(call, slots, N)
    if call.state_positions is not None:
        _check_tensor("state_positions", call.state_positions, call.q)
        if call.state_positions.dtype not in _INTS or call.state_positions.dim() != 1:
            got = f"{call.state_positions.dtype} {list(call.state_positions.shape)}"
            _bad("state_positions", "int32 or int64 of shape [P]", got)


def _check_pool(call: KDACall, slots: Tensor, N: int) -> None:
    if call.initial_state is None:
        _bad("state_indices", "initial_state to be the pool it points into", "initial_state=None")
    if overlaps_itself(call.initial_state):
        _bad(
            "initial_state",
            "a pool whose slots are memory of their own",
            f"an expanded or overlapping one, strides {call.initial_state.stride()}",
        )
    if call.initial_state.shape[0] < 1:
        _bad("initial_state", "a pool of at least one slot", list(call.initial_state.shape))
    _check_tensor("state_indices", slots, call.q)
    if slots.dtype not in _INTS:
        _bad("state_indices.dtype", "int32 or int64", slots.dtype, TypeError)
    _check_shape("state_indices", slots, (N,), "[N]")
    if call.needs_grad:
        _bad(
            "state_indices",
            "no gradients (the pool is written in place): use torch.no_grad()",
            "inputs that require grad",
        )


def overlaps_itself(t: Tensor) -> bool:
    """Whether two elements may share memory: an expanded tensor, or a view whose rows run into one another."""
    if torch.compiler.is_compiling():  # sizes may be symbols, which are not sorted
        return any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape, strict=True))
    end = 1
    for step, size in sorted((a, b) for a, b in zip(t.stride(), t.shape, strict=True) if b > 1):
        if step < end:
            return True
        end += (size - 1) * step
    return False


def check_slots(name: str, slots: Tensor, pool: int) -> None:
    """The values of slot indices into a pool: -1 for none, each other one in the pool and used once."""
    _check_range(name, slots, -1, pool)
    used = slots[slots >= 0]
    if used.unique().numel() != used.numel():
        _bad(name, "each slot at most once (two sequences would write one state)", used.tolist())


def _check_range(name: str, values: Tensor, low: int, high: int) -> None:
    outside = values[(values < low) | (values >= high)]
    if outside.numel():
        _bad(name, f"values in [{low}, {high})", int(outside[0]))


def _check_values(call: KDACall) -> None:
    tensors = {name: getattr(call, name) for name in ("q", "k", "v", "g", "beta", "initial_state")}
    slots = call.state_indices
    if slots is not None and call.initial_state is not None:  # what lies in the others is nobody's
        tensors["initial_state"] = call.initial_state[slots[slots >= 0].long()]
    for name in ("A_log", "dt_bias"):
        tensors[f"gate.{name}"] = getattr(call.gate, name, None)
    for name, t in tensors.items():
        if t is not None and not bool(torch.isfinite(t).all()):
            where = (~torch.isfinite(t)).nonzero()[0].tolist()
            _bad(name, "finite values", f"{t[tuple(where)].item()} at {where}")
    if call.gate is None and bool((call.g > 0).any()):
        _bad("g", "log decay <= 0 (or pass its gate object)", f"maximum {call.g.max().item():.6g}")
    if not call.use_beta_sigmoid and bool(((call.beta < 0) | (call.beta > 1)).any()):
        got = f"range [{call.beta.min().item():.6g}, {call.beta.max().item():.6g}]"
        _bad("beta", "values in [0, 1] (or logits with use_beta_sigmoid=True)", got)
    if call.use_qk_l2norm and call.q.is_cuda:
        for name, t in (("q", call.q), ("k", call.k)):
            if bool(t.float().square().sum(-1).isinf().any()):
                got = f"one with an entry of {t.abs().max().item():.3g}"
                _bad(name, "rows shorter than 1.8e19 (the kernels take longer ones for 0)", got)
    if not call.use_qk_l2norm:
        longest = call.k.float().norm(dim=-1).max().item() if call.k.numel() else 0.0
        if longest > 1.01:
            _bad("k", "keys of length <= 1 (or use_qk_l2norm=True): longer ones may grow the state", longest)

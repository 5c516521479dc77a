"""The contract of Kimi Delta Attention: signature, meaning, and which implementation runs.

Per token and value head, with S in R^{K x V}, a = exp(log decay) in (0, 1]^K and b in [0, 1]:

    S <- Diag(a) S                     forget, each key channel at its own rate
    S <- S + b k (v - S^T k)^T         write the error of the state's own prediction for k
    o  = scale * S^T q                 read

Source: Kimi Linear report (arXiv 2510.26692) eq. 1; Kimi K3 report, section 2.1.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openkda.ops.kda.call import CALLS, KDACall, KDAOutput
from openkda.ops.kda.gate import BoundedGate, Gate, SoftplusGate, bias_fits, is_number
from openkda.ops.kda.validate import check_slots, overlaps_itself, validate, validate_step

__all__ = [
    "IMPLEMENTATIONS",
    "L2NORM_EPS",
    "BoundedGate",
    "Gate",
    "KDACall",
    "KDAOutput",
    "SoftplusGate",
    "bias_fits",
    "check_slots",
    "is_number",
    "kda",
    "kda_step",
    "overlaps_itself",
]

log = logging.getLogger("openkda.ops.kda")

L2NORM_EPS = 1e-6
"""Added to the SUM of squares by every path: x / sqrt(sum x^2 + eps) (Kimi K3 modelling code)."""

IMPLEMENTATIONS = ("hopper", "triton", "triton_exact", "chunkwise", "reference")
"""In order of preference. Each is a module of this folder with `refusals(call) -> list[str]` and `run(call)`."""

Num = Float[Tensor, "..."]


def kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    *,
    gate: Gate | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "_n HV _k _v"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " _n1"] | None = None,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    state_indices: Int[Tensor, " _n"] | None = None,
    state_positions: Int[Tensor, " _p"] | None = None,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    recompute: bool | None = None,
    check_inputs: bool = False,
    impl: str | None = None,
) -> KDAOutput:
    """Kimi Delta Attention over whole sequences, for training and prefill. Per token, with S [K, V] of a value head,
    a = exp(log decay) and b = beta:

        S <- Diag(a) S;   S <- S + b k (v - S^T k)^T;   o = scale * S^T q            (arXiv 2510.26692, eq. 1)

    Args:
        q, k: [B, T, H, K], one dtype out of float16, bfloat16, float32, float64. Keys are expected to have unit
            length, or `use_qk_l2norm=True` makes them so: with |k| > 1 the recurrence itself may grow.
        v: [B, T, HV, V], same dtype. HV is a multiple of H; value head h reads query/key head h // (HV / H).
        g: [B, T, HV, K], any of these dtypes. Without `gate`: natural log of the decay per token, <= 0. With `gate`: its raw
            input.
        beta: [B, T, HV], any of these dtypes: write strength in [0, 1], or its logit with `use_beta_sigmoid=True`.
        gate: `SoftplusGate` (Kimi Linear) or `BoundedGate` (Kimi K3), applied to g inside, in float32.
        scale: factor on q; default K ** -0.5.
        initial_state: [N, HV, K, V], N sequences (N = B, or the members of the pack). Default zeros.
        output_final_state: also return the state after the last token of every sequence.
        cu_seqlens: [N + 1] int32 or int64, 0 = first <= ... <= last = T: sequences packed along T (then B = 1). Empty and
            one-token members are fine. On the CPU its values are checked here; on a GPU only under `check_inputs`
            (the check would stall the stream).
        use_qk_l2norm: x / sqrt(sum x^2 + 1e-6) on q and k, per head.
        state_indices: [N] int32 or int64. `initial_state` is then a pool [P, HV, K, V] that is read and written IN PLACE,
            sequence n in slot state_indices[n]; -1 = start from zeros and keep nothing. Not differentiable.
        state_positions: [P] int, flat token rows b * T + t: also return the state right after each of these tokens.
        state_v_first: states are [.., V, K] in and out.
        state_dtype: dtype of states in and out: float32 (default; float64 for float64 inputs) or bfloat16.
            The arithmetic on the state is float32 (float64) in any case.
        recompute: of a call that autograd records on a GPU, whether the backward computes chunks and states again (True) or
            finds them kept by the forward (False), 7.7 times the bytes of q in 16 bits (Hopper 3.9). None computes again. A
            matter of time and memory, not of results beyond rounding; but on Hopper the output and states of what is kept
            lack the treatment of keys of nearly one direction (docs/capabilities.md), gradients are the same bits. Nothing
            is kept of calls with state_positions or under torch.compile; on a CPU it means nothing.
        check_inputs: also check values: finite, g <= 0 without a gate, beta in [0, 1], keys of length <= 1, cu_seqlens, slots
            and positions in range. On a GPU this waits for the device. Without it such inputs give wrong or infinite
            numbers, not an error, and offsets, slots and positions out of range reach memory of others: switch it on while
            you build.
        impl: None chooses and logs why under "openkda.ops.kda"; "hopper", "triton", "triton_exact", "chunkwise" or "reference"
            never falls back: it raises NotImplementedError with every reason. "triton_exact" is never chosen: it is for keys
            of nearly one direction. What each can do: docs/capabilities.md.

    Returns: `KDAOutput(output [B, T, HV, V], final_state, states_at)`.
    Raises: ValueError or TypeError, showing expected and received, before anything runs.
    Differentiable in q, k, v, g, beta, the gate's tensors and initial_state, through output and states; once:
    a second derivative is refused.
    """
    tensors = (
        q, k, v, g, beta, getattr(gate, "A_log", None), getattr(gate, "dt_bias", None), initial_state, cu_seqlens,
        state_indices, state_positions,
    )  # fmt: skip
    key, again = (None, None) if check_inputs else CALLS.look(
        tensors,
        ("kda", type(gate), getattr(gate, "lower_bound", None), scale, output_final_state, use_qk_l2norm, use_beta_sigmoid,
         state_v_first, state_dtype, recompute, impl),
    )  # fmt: skip
    done = None if again is None else again(tensors)
    if done is not None:
        return done
    call = KDACall(
        q, k, v, g, beta, gate,
        _default_scale(q) if scale is None else scale,
        initial_state, output_final_state, cu_seqlens, use_qk_l2norm, use_beta_sigmoid,
        state_indices, state_positions, state_v_first,
        _default_state_dtype(q) if state_dtype is None else state_dtype,
        CALLS.seen(key), recompute,
    )  # fmt: skip
    return CALLS.module(key, lambda: _choose(validate(call, check_inputs), impl)).run(call)


def kda_step(
    q: Float[Tensor, "N H K"],
    k: Float[Tensor, "N H K"],
    v: Float[Tensor, "N HV V"],
    g: Float[Tensor, "N HV K"],
    beta: Float[Tensor, "N HV"],
    state: Float[Tensor, "_n HV _k _v"],
    *,
    gate: Gate | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    state_indices: Int[Tensor, " N"] | None = None,
    state_v_first: bool = False,
    check_inputs: bool = False,
    impl: str | None = None,
) -> tuple[Float[Tensor, "N HV V"], Float[Tensor, "_n HV _k _v"]]:
    """One token for each of N states: the decoding step. Arguments as in `kda`, without the T axis.

    state: float32 (float64 beside float64 inputs) or bfloat16. Without `state_indices`, [N, HV, K, V], which is left untouched
        while the new state is returned. With it a pool [P, HV, K, V]: row n updates slot state_indices[n] in place (-1:
        nothing is touched and the output row is zero), and the pool itself is returned.
    Returns: (output [N, HV, V] in v's dtype, state). Raises: as `kda`. Not differentiable in a pool.
    """
    tensors = (
        q, k, v, g, beta, getattr(gate, "A_log", None), getattr(gate, "dt_bias", None), state, None, state_indices, None,
    )  # fmt: skip
    key, again = (None, None) if check_inputs else CALLS.look(
        tensors,
        ("step", type(gate), getattr(gate, "lower_bound", None), scale, use_qk_l2norm, use_beta_sigmoid, state_v_first, impl),
    )  # fmt: skip
    done = None if again is None else again(tensors)
    if done is not None:
        return done
    for name, t in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta), ("state", state)):
        if not isinstance(t, Tensor) or not t.dim():
            got = type(t).__name__ if not isinstance(t, Tensor) else "a number"
            raise TypeError(f"{name}: expected a torch.Tensor with a row for each sequence, received {got}")
    call = KDACall(
        q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), g.unsqueeze(1), beta.unsqueeze(1), gate,
        _default_scale(q) if scale is None else scale,
        state, True, None, use_qk_l2norm, use_beta_sigmoid, state_indices, None, state_v_first, state.dtype,
        CALLS.seen(key),
    )  # fmt: skip
    return CALLS.module(key, lambda: _choose(validate_step(call, check_inputs), impl)).step(call)


def _default_scale(q: Tensor) -> float:
    if not isinstance(q, Tensor):
        raise TypeError(f"q: expected a torch.Tensor, received {type(q).__name__}")
    return q.shape[-1] ** -0.5 if q.shape and q.shape[-1] else 1.0  # no channels: validation says so, not the division


def _default_state_dtype(q: Tensor) -> torch.dtype:
    known = isinstance(q, Tensor) and q.is_floating_point() and q.dtype.itemsize > 1
    return torch.promote_types(q.dtype, torch.float32) if known else torch.float32  # else: refused by validation


def _module(name: str) -> ModuleType:
    """Written out, because torch.compile follows an import statement but not importlib."""
    if name == "hopper":
        from openkda.ops.kda import hopper

        return hopper
    if name == "triton":
        from openkda.ops.kda import triton

        return triton
    if name == "triton_exact":
        from openkda.ops.kda import triton_exact

        return triton_exact
    if name == "chunkwise":
        from openkda.ops.kda import chunkwise

        return chunkwise
    from openkda.ops.kda import reference

    return reference


def _choose(call: KDACall, impl: str | None) -> ModuleType:
    """The implementation's module; kernel languages are imported only when a CUDA tensor asks for them."""
    if impl is not None:
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl: expected one of {', '.join(IMPLEMENTATIONS)} or None, received {impl!r}")
        reasons = _module(impl).refusals(call)
        if reasons:
            raise NotImplementedError(f"impl={impl!r} cannot run this call: " + "; ".join(reasons))
        return _module(impl)
    skipped: list[str] = []
    for name in IMPLEMENTATIONS if call.q.is_cuda else ("chunkwise",):
        reasons = _module(name).refusals(call)
        if not reasons:
            if not torch.compiler.is_compiling():
                _log_once(name, call.q.device.type, tuple(skipped))
            return _module(name)
        skipped.append(f"{name}: {', '.join(reasons)}")
    raise NotImplementedError("no implementation can run this call: " + "; ".join(skipped))


@cache
def _log_once(name: str, device: str, skipped: tuple[str, ...]) -> None:
    """A call on a GPU that no kernel takes is a warning: nobody should find that out by a stopwatch."""
    level = logging.WARNING if skipped and name == "chunkwise" else logging.INFO
    log.log(level, "kda on %s runs %s%s", device, name, f" (not {'; not '.join(skipped)})" if skipped else "")

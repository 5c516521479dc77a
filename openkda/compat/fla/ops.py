"""The op functions of fla-core 0.6.0 on top of `openkda.kda`."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from torch import Tensor

from openkda.compat.fla.gates import check_bound, fused_kda_gate
from openkda.ops.device.api import has_values
from openkda.ops.kda.api import KDAOutput, kda, overlaps_itself
from openkda.ops.kda.gate import LOWER_BOUND_RANGE, BoundedGate, Gate, SoftplusGate


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> tuple[Any, ...]:
    """(o, final_state) or, with return_intermediate_states, (o, final_state, h [B, NT, HV, K, V] in k's dtype).

    Layouts: q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K], natural log decay or, with use_gate_in_kernel, raw;
    beta [B, T, HV]; states [N, HV, K, V] float32, [N, HV, V, K] with state_v_first. A_log [HV] or [1, 1, HV, 1].
    chunk_size (32 or 64) decides where h is taken: before every chunk.

    disable_recompute: `recompute=False` of `openkda.kda`; without it, that function's rule.

    Accepted, with nothing to do here: safe_gate, and lower_bound beside an activated g (no path trusts a bound that it did
    not apply: every activated g takes the exact one), use_graph and max_num_seqs (every call can be
    captured; as with fla, rows behind the last sequence are then undefined, and a CPU refuses them), cu_seqlens_cpu (only h
    reads lengths on the host).
    Raises: NotImplementedError for cp_context; ValueError as fla does, showing expected and received.
    """
    _check_flags(use_beta_sigmoid_in_kernel, allow_neg_eigval, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    if cp_context is not None:
        raise NotImplementedError("cp_context: context parallelism is not part of this function")
    if chunk_size not in (32, 64):
        raise ValueError(
            f"`chunk_size` must be either 32 or 64, received {chunk_size}"
        )  # the words fla's callers match
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ValueError(f"lower_bound: expected a value in [-5, 0) with safe_gate=True, received {lower_bound}")
    if use_graph and max_num_seqs is not None and cu_seqlens is not None and len(cu_seqlens) != max_num_seqs + 1:
        raise ValueError(
            f"cu_seqlens: expected max_num_seqs + 1 = {max_num_seqs + 1} entries, received {len(cu_seqlens)}"
        )
    _check_cpu_lengths(cu_seqlens, cu_seqlens_cpu)
    state_v_first = _layout(state_v_first, transpose_state_layout)
    positions = None
    if return_intermediate_states:
        if torch.is_grad_enabled():
            raise ValueError(
                "return_intermediate_states: expected torch.inference_mode() or no_grad(), gradients are enabled"
            )
        chunks = _chunks(q, cu_seqlens, cu_seqlens_cpu, chunk_size)
        positions = torch.tensor([p for _, p in chunks if p >= 0], dtype=torch.int64, device=q.device)
    out = _kda(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens, positions,
        recompute=False if disable_recompute else None,
    )  # fmt: skip
    if not return_intermediate_states:
        return out.output, out.final_state
    return out.output, out.final_state, _intermediate(out, chunks, q, k, initial_state)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state); arguments as in `chunk_kda`, and initial_state in any float dtype. Short calls run token by token on
    a GPU by themselves."""
    _check_flags(use_beta_sigmoid_in_kernel, allow_neg_eigval, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    state_v_first, initial_state = _layout(state_v_first, transpose_state_layout), _wide(q, initial_state)
    out = _kda(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens, None,
    )  # fmt: skip
    return out.output, out.final_state


def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(o, states): the form that serving code calls, over a pool of states. Not differentiable in the pool.

    With inplace_final_state (fla's default) `initial_state` is a pool, read and written in place and returned: sequence n in
    slot ssm_state_indices[n], or in slot n without indices; a slot of -1 starts from zeros and keeps nothing. Otherwise as
    `fused_recurrent_kda`. `out` [B, T, HV, V], if given, receives o.
    Raises: NotImplementedError for num_accepted_tokens and slots per token (speculative decoding), and for indices without
    inplace_final_state; ValueError for inplace_final_state without a pool.
    """
    _check_flags(use_beta_sigmoid_in_kernel, allow_neg_eigval, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    _check_out(out, v)
    if num_accepted_tokens is not None or (isinstance(ssm_state_indices, Tensor) and ssm_state_indices.dim() != 1):
        raise NotImplementedError(
            "num_accepted_tokens, ssm_state_indices: one slot a sequence, no speculative decoding"
        )
    if ssm_state_indices is not None and not inplace_final_state:
        raise NotImplementedError("ssm_state_indices: expected with inplace_final_state=True, received False")
    slots = ssm_state_indices
    if not inplace_final_state:
        initial_state = _wide(q, initial_state)
    else:
        if initial_state is None:
            raise ValueError("initial_state: expected the pool that inplace_final_state=True writes, received None")
        if slots is None:
            _check_tensor("q", q)
            n = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
            slots = torch.arange(n, dtype=torch.int32, device=q.device)
    found = _kda(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state or inplace_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound,
        state_v_first, cu_seqlens, None, slots,
    )  # fmt: skip
    return found.output if out is None else out.copy_(found.output), found.final_state


def naive_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(o in v's dtype, final_state) by the token loop, for normalised q and k, log decay g and beta in [0, 1]; any device, any
    mixture of float dtypes (float32 inside, float64 where one is float64).

    initial_state: [N, HV, K, V], or one [HV, K, V] or [1, HV, K, V] for every sequence."""
    return _naive("reference", q, k, v, g, beta, scale, initial_state, output_final_state)


def naive_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """As `naive_recurrent_kda`, by torch matmuls over chunks. T need not be a multiple of chunk_size: it is checked to be
    positive and otherwise has no effect on the result."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected a positive number, received {chunk_size}")
    return _naive("chunkwise", q, k, v, g, beta, scale, initial_state, output_final_state)


def _naive(
    impl: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, state: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if state is not None:
        given["initial_state"] = state
    for name, t in given.items():
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise TypeError(f"{name}: expected a float tensor, received {getattr(t, 'dtype', type(t).__name__)}")
    wide = torch.float64 if any(t.dtype == torch.float64 for t in given.values()) else torch.float32
    if state is not None:
        one = state.dim() == 3 or (state.dim() == 4 and state.shape[0] == 1)
        state = (state.expand(q.shape[0], *state.shape[-3:]) if one else state).to(wide)
    out = kda(
        *(t.to(wide) for t in (q, k, v, g, beta)), scale=scale, initial_state=state,
        output_final_state=bool(output_final_state), impl=impl,
    )  # fmt: skip
    return out.output.to(v.dtype), out.final_state


def _check_tensor(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, received {type(t).__name__}")


def _check_out(out: Tensor | None, v: Tensor) -> None:
    if out is None:
        return
    for name, t in (("out", out), ("v", v)):
        _check_tensor(name, t)
    if (out.shape, out.dtype, out.device) != (v.shape, v.dtype, v.device) or overlaps_itself(out):
        wanted = f"{v.dtype} {list(v.shape)} on {v.device} (those of v), in memory of its own"
        received = f"{out.dtype} {list(out.shape)} on {out.device}, strides {out.stride()}"
        raise ValueError(f"out: expected {wanted}, received {received}")


def _wide(q: Tensor, state: Tensor | None) -> Tensor | None:
    """A state that is only read, in the dtype that states are kept in: fla's recurrent form takes it in any."""
    if not isinstance(q, Tensor) or not isinstance(state, Tensor) or not state.is_floating_point():
        return state  # refused later, by name
    return state.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _check_cpu_lengths(cu: Tensor | None, cpu: Tensor | None) -> None:
    """On a GPU only the number of sequences: to compare the values would wait for the device."""
    if cpu is None:
        return
    _check_tensor("cu_seqlens_cpu", cpu)
    if cu is None or cpu.device.type != "cpu" or cpu.shape != cu.shape:
        received = f"{list(cpu.shape)} on {cpu.device} beside {None if cu is None else list(cu.shape)}"
        raise ValueError(f"cu_seqlens_cpu: expected the values of cu_seqlens on the CPU, received {received}")
    if cu.device.type == "cpu" and has_values(cu) and not torch.equal(cpu.long(), cu.long()):
        raise ValueError(f"cu_seqlens_cpu: expected the values of cu_seqlens {cu.tolist()}, received {cpu.tolist()}")


def _check_flags(
    sigmoid: bool, negative: bool, gate: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> None:
    if negative and not sigmoid:
        raise ValueError("allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True with it, received False")
    if gate and A_log is None and lower_bound is None:
        raise ValueError(
            "A_log: expected a tensor of HV values with use_gate_in_kernel=True and no lower_bound, received None"
        )
    if lower_bound is not None:
        check_bound(lower_bound)
    if not gate and (A_log is not None or dt_bias is not None):
        raise ValueError("A_log, dt_bias: expected use_gate_in_kernel=True with them, received False")
    for name, t in (("A_log", A_log), ("dt_bias", dt_bias)):
        if t is not None and not (isinstance(t, Tensor) and t.is_floating_point()):
            raise TypeError(f"{name}: expected a float tensor, received {getattr(t, 'dtype', type(t).__name__)}")


def _layout(v_first: bool, old: bool | None) -> bool:
    if old is None:
        return v_first
    if v_first:
        raise ValueError("state_v_first, transpose_state_layout: expected one of them, received both")
    if not torch.compiler.is_compiling():  # a full graph has no warnings
        warnings.warn("transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=3)
    return old


def _kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    scale: float | None, initial_state: Tensor | None, output_final_state: bool, l2norm: bool, use_gate: bool,
    sigmoid: bool, negative: bool, lower_bound: float | None, v_first: bool, cu_seqlens: Tensor | None,
    positions: Tensor | None, slots: Tensor | None = None, recompute: bool | None = None,
) -> KDAOutput:  # fmt: skip
    gate: Gate | None = None
    _check_tensor("q", q)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if use_gate:
        A, dt = (None if t is None else t.to(wide) for t in (A_log, dt_bias))
        low, high = LOWER_BOUND_RANGE
        if lower_bound is None:
            assert A is not None  # for the type checker: `_check_flags` made sure of it
            gate = SoftplusGate(A, dt)
        elif low <= lower_bound < high:
            gate = BoundedGate(lower_bound, A, dt)
        else:  # outside the range of the fast path: an activated gate takes the exact one
            g = fused_kda_gate(g, A_log, dt_bias, lower_bound, wide)
    if negative and isinstance(beta, Tensor) and beta.is_floating_point():  # else `kda` refuses it
        beta, sigmoid = 2 * torch.sigmoid(beta.to(torch.promote_types(beta.dtype, torch.float32))), False
    pool = None if slots is None or initial_state is None else initial_state
    return kda(
        q, k, v, g, beta, gate=gate, scale=scale, initial_state=initial_state, output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens, use_qk_l2norm=bool(l2norm), use_beta_sigmoid=bool(sigmoid), state_indices=slots,
        state_positions=positions, state_v_first=bool(v_first), recompute=recompute,
        state_dtype=torch.bfloat16 if isinstance(pool, Tensor) and pool.dtype == torch.bfloat16 else None,
    )  # fmt: skip


def _chunks(q: Tensor, cu: Tensor | None, cu_cpu: Tensor | None, size: int) -> list[tuple[int, int]]:
    """(sequence, flat position of the token before the chunk; -1: none) of every chunk, in order."""
    B, T = q.shape[:2]
    bounds = [b * T for b in range(B + 1)] if cu is None else (cu if cu_cpu is None else cu_cpu).tolist()
    return [
        (n, t - 1 if t > start else -1)
        for n, (start, end) in enumerate(itertools.pairwise(bounds))
        for t in range(start, end, size)
    ]


def _intermediate(
    out: KDAOutput, chunks: list[tuple[int, int]], q: Tensor, k: Tensor, initial_state: Tensor | None
) -> Tensor:
    kept = out.states_at
    assert kept is not None  # for the type checker: positions were asked for
    sequence = torch.tensor([n for n, _ in chunks], dtype=torch.int64, device=q.device)
    first = torch.tensor([p < 0 for _, p in chunks], dtype=torch.bool, device=q.device)
    h = kept.new_zeros(len(chunks), *kept.shape[1:])
    if initial_state is not None:
        h = initial_state.to(h.dtype).index_select(0, sequence)
    h[~first] = kept
    return h.to(k.dtype).unflatten(0, (q.shape[0], -1)) if chunks else h.to(k.dtype).unsqueeze(0)

"""Launch and registration of the fused step: a pool in place, new states, or every state of several tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from openkda.ops.device.api import define
from openkda.ops.kda_block import hopper
from openkda.ops.kda_block.call import CALLS, BlockCall, BlockOutput, BlockState
from openkda.ops.kda_block.triton.step import block_kernel
from openkda.ops.triton.api import launch, padded, record, rows_of, unit_stride, walkable

EPS = 1e-6
MOST_FOR_4_WARPS = 128 * 128  # entries of a state: 128 registers a thread
_TOKENS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor out_gate, "
    "Tensor wq, Tensor wk, Tensor wv, Tensor norm, Tensor? A_log, Tensor? dt_bias"
)
_NUMBERS = "int gate, float bound, float norm_eps, float scale"
_STATES = "Tensor s, Tensor cq, Tensor ck, Tensor cv"
_POOLS = "Tensor(a!) s, Tensor(b!) cq, Tensor(c!) ck, Tensor(d!) cv"


def _launch(
    q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, old, new, slots, states, gate, bound, norm_eps, scale
):
    slots = None if slots is None else slots.contiguous()
    N, T, HV, K = g.shape
    V, H = og.shape[3], q.shape[2] // K
    y = v.new_empty(N, T, HV, V)
    BK, BV = padded(K), padded(V)
    q, k, v, g, og = (walkable(x) for x in (q, k, v, g, og))
    old, new = ((unit_stride(x[0]), *x[1:]) for x in (old, new))
    tensors = (q, k, v, g, beta, og, y, wq, wk, wv, norm, A_log, dt_bias, slots)
    if N and T == 1 and states is None and hopper.fits(y.device, K, V):
        from openkda.ops.kda_block.hopper.launch import launch_one

        launch_one(tensors, old, new, (bound, EPS, norm_eps, scale), gate, H)
    elif N:
        steps = (
            *rows_of(q), *rows_of(k), *rows_of(v), *rows_of(g), *beta.stride(), *rows_of(og),
            *old[0].stride()[:3], *old[1].stride(), *old[2].stride(), *old[3].stride(),
            *new[0].stride()[:3], *new[1].stride(), *new[2].stride(), *new[3].stride(),
        )  # fmt: skip
        numbers = (T, bound, EPS, norm_eps, scale)
        constants = (
            H, HV // H, K, BK, V, BV, wq.shape[1], gate, A_log is not None, dt_bias is not None, slots is not None,
            states is not None, T == 1,
        )  # fmt: skip
        warps = 4 if BK * BV <= MOST_FOR_4_WARPS else 8
        launch(block_kernel, N * H, (*tensors, *old, *new, states), steps, numbers, constants, warps, y.device)
    return y


def pool_direct(
    q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, s, cq, ck, cv, slots, gate, bound, norm_eps, scale
):
    if s.stride(-1) != 1:
        raise ValueError(
            f"state.recurrent: expected a pool whose last axis has stride 1, received strides {s.stride()}"
        )
    old = (s, cq, ck, cv)
    return _launch(
        q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, old, old, slots, None, gate, bound, norm_eps, scale
    )


def step_direct(q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, s, cq, ck, cv, gate, bound, norm_eps, scale):
    old = (s, cq, ck, cv)
    new = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in old)
    y = _launch(
        q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, old, new, None, None, gate, bound, norm_eps, scale
    )
    return y, *new


def all_direct(
    q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, s, cq, ck, cv, slots, gate, bound, norm_eps, scale
):
    old = (s, cq, ck, cv)
    states = _new_states(g, og)
    if slots is not None:
        states.zero_()  # rows without a slot
    y = _launch(
        q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, old, old, slots, states, gate, bound, norm_eps, scale
    )
    return y, states


def run_recorded(call: BlockCall, tokens: Any, numbers: Any) -> BlockOutput:
    """The step on a pool or to new states; from now on calls of this key repeat its launch."""
    old, slots = call.state.tensors(), call.slots
    step, pool = cast(Any, step_direct), cast(Any, pool_direct)

    def run() -> tuple[Tensor, ...]:
        if slots is None:
            return step(*tokens, *old, *numbers)
        return (pool(*tokens, *old, slots, *numbers),)

    w, gate = call.weights, call.gate
    own = (
        call.q, call.k, call.v, call.g, call.beta, call.out_gate, w.conv_q, w.conv_k, w.conv_v, w.norm, gate.A_log,
        gate.dt_bias, *old, slots,
    )  # fmt: skip
    made, tape = record(run, own, call.q.device)
    if tape is not None and call.key is not None:
        pooled = slots is not None

        def again(tensors: tuple[Tensor | None, ...], state: BlockState) -> BlockOutput | None:
            made = tape.run(tensors)
            if made is None:
                return None
            return BlockOutput(made[0], state if pooled else BlockState(*made[1:]), None)

        CALLS.replays[call.key] = again
    return BlockOutput(made[0], call.state if slots is not None else BlockState(*made[1:]), None)


def _new_states(g: Tensor, og: Tensor) -> Tensor:
    return torch.empty((*g.shape, og.shape[3]), dtype=torch.float32, device=g.device)


def _fake_pool(q, k, v, g, beta, og, *rest):
    return v.new_empty(og.shape)


def _fake_step(q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, s, cq, ck, cv, *rest):
    return v.new_empty(og.shape), *(x.new_empty(x.shape) for x in (s, cq, ck, cv))


def _fake_all(q, k, v, g, beta, og, *rest):
    return v.new_empty(og.shape), _new_states(g, og)


pool_op = define(f"kda_block_pool({_TOKENS}, {_POOLS}, Tensor slots, {_NUMBERS}) -> Tensor", pool_direct, _fake_pool)
step_op = define(
    f"kda_block_step({_TOKENS}, {_STATES}, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    step_direct,
    _fake_step,
)
all_op = define(
    f"kda_block_all({_TOKENS}, {_STATES}, Tensor? slots, {_NUMBERS}) -> (Tensor, Tensor)", all_direct, _fake_all
)

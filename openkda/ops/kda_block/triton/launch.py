"""Launch and registration of the fused step: a pool in place, new states, or every state of several tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.kda_block.triton.step import block_kernel
from openkda.ops.triton.api import launch, padded

EPS = 1e-6
_LIBRARY = torch.library.Library("openkda", "FRAGMENT")
_TOKENS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor out_gate, "
    "Tensor wq, Tensor wk, Tensor wv, Tensor norm, Tensor? A_log, Tensor? dt_bias"
)
_NUMBERS = "int gate, float bound, float norm_eps, float scale"
_STATES = "Tensor s, Tensor cq, Tensor ck, Tensor cv"
_POOLS = "Tensor(a!) s, Tensor(b!) cq, Tensor(c!) ck, Tensor(d!) cv"
_LIBRARY.define(f"kda_block_pool({_TOKENS}, {_POOLS}, Tensor slots, {_NUMBERS}) -> Tensor")
_LIBRARY.define(f"kda_block_step({_TOKENS}, {_STATES}, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define(f"kda_block_all({_TOKENS}, {_STATES}, Tensor? slots, {_NUMBERS}) -> (Tensor, Tensor)")


def _launch(
    q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, old, new, slots, states, gate, bound, norm_eps, scale
):
    slots = None if slots is None else slots.contiguous()
    N, T, HV, K = g.shape
    V, H = og.shape[3], q.shape[2] // K
    y = v.new_empty(N, T, HV, V)
    BK, BV = padded(K), padded(V)
    q, k, v, g, og = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, g, og))
    old, new = ((x if x[0].stride(-1) == 1 else (x[0].contiguous(), *x[1:])) for x in (old, new))
    if N:
        tensors = (q, k, v, g, beta, og, y, wq, wk, wv, norm, A_log, dt_bias, slots, *old, *new, states)
        steps = (
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g.stride()[:3], *beta.stride(), *og.stride()[:3],
            *old[0].stride()[:3], *old[1].stride(), *old[2].stride(), *old[3].stride(),
            *new[0].stride()[:3], *new[1].stride(), *new[2].stride(), *new[3].stride(),
        )  # fmt: skip
        numbers = (T, bound, EPS, norm_eps, scale)
        constants = (
            H, HV // H, K, BK, V, BV, wq.shape[1], gate, A_log is not None, dt_bias is not None, slots is not None,
            states is not None, T == 1,
        )  # fmt: skip
        launch(block_kernel, N * H, tensors, steps, numbers, constants, 4, y.device)
    return y


def _pool(q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, s, cq, ck, cv, slots, gate, bound, norm_eps, scale):
    if s.stride(-1) != 1:
        raise ValueError(
            f"state.recurrent: expected a pool whose last axis has stride 1, received strides {s.stride()}"
        )
    old = (s, cq, ck, cv)
    return _launch(
        q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, old, old, slots, None, gate, bound, norm_eps, scale
    )


def _step(q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, s, cq, ck, cv, gate, bound, norm_eps, scale):
    old = (s, cq, ck, cv)
    new = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in old)
    y = _launch(
        q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, old, new, None, None, gate, bound, norm_eps, scale
    )
    return y, *new


def _all(q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, s, cq, ck, cv, slots, gate, bound, norm_eps, scale):
    old = (s, cq, ck, cv)
    states = _new_states(g, og)
    if slots is not None:
        states.zero_()  # rows without a slot
    y = _launch(
        q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, old, old, slots, states, gate, bound, norm_eps, scale
    )
    return y, states


def _new_states(g: Tensor, og: Tensor) -> Tensor:
    return torch.empty((*g.shape, og.shape[3]), dtype=torch.float32, device=g.device)


def _fake_pool(q, k, v, g, beta, og, *rest):
    return v.new_empty(og.shape)


def _fake_step(q, k, v, g, beta, og, wq, wk, wv, norm, A_log, dt_bias, s, cq, ck, cv, *rest):
    return v.new_empty(og.shape), *(x.new_empty(x.shape) for x in (s, cq, ck, cv))


def _fake_all(q, k, v, g, beta, og, *rest):
    return v.new_empty(og.shape), _new_states(g, og)


for _name, _run, _fake in (
    ("kda_block_pool", _pool, _fake_pool),
    ("kda_block_step", _step, _fake_step),
    ("kda_block_all", _all, _fake_all),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"openkda::{_name}", _fake, lib=_LIBRARY)

pool_op = torch.ops.openkda.kda_block_pool.default
step_op = torch.ops.openkda.kda_block_step.default
all_op = torch.ops.openkda.kda_block_all.default

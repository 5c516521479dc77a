"""Writing one of several states of each sequence into its pool slot, with the convolution windows that belong to it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from openkda.ops.device.api import define, goes_direct
from openkda.ops.kda_block.call import BlockState
from openkda.ops.triton.api import launch, padded, rows_of, walkable


@triton.jit
def _entry(x_p, sxt, pool_p, step, at, m, W: tl.constexpr):
    """Entry `at` of the old window followed by the tokens."""
    old = tl.load(pool_p + at * step, m & (at < W - 1), other=0.0)
    new = tl.load(x_p + (at - (W - 1)).to(tl.int64) * sxt, m & (at >= W - 1), other=0.0)
    return tl.where(at < W - 1, old, new)


@triton.jit
def _move(x_p, sxt, pool_p, step, count, m, W: tl.constexpr):
    """The window `count` tokens later; all of it is read before any of it is written."""
    a = _entry(x_p, sxt, pool_p, step, count, m, W)
    b = a
    c = a
    if W >= 3:
        b = _entry(x_p, sxt, pool_p, step, count + 1, m, W)
    if W == 4:
        c = _entry(x_p, sxt, pool_p, step, count + 2, m, W)
    tl.store(pool_p, a, m)
    if W >= 3:
        tl.store(pool_p + step, b, m)
    if W == 4:
        tl.store(pool_p + 2 * step, c, m)


@triton.jit(do_not_specialize=["sar", "sqr", "skr", "svr", "T"])
def keep_kernel(
    all_p, q_p, k_p, v_p, accepted_p, slots_p, s_p, cq_p, ck_p, cv_p,
    sar, sat, sah, sak, sqr, sqt, skr, skt, svr, svt, ssn, ssh, ssk, cqn, cqd, cqw, ckn, ckd, ckw, cvn, cvd, cvw, T,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head)."""
    pid = tl.program_id(0)
    h = (pid % HV).to(tl.int64)
    n = (pid // HV).to(tl.int64)
    place = tl.load(slots_p + n).to(tl.int64)
    count = tl.minimum(tl.load(accepted_p + n), T).to(tl.int32)
    if (place < 0) | (count <= 0):
        return
    c = tl.arange(0, BK)
    x = tl.arange(0, BV)
    m_k = c < K
    m_v = x < V
    m = m_k[:, None] & m_v[None, :]
    S = tl.load(all_p + (n * sar + count - 1) * sat + h * sah + c[:, None] * sak + x[None, :], m, other=0.0)
    tl.store(s_p + place * ssn + h * ssh + c[:, None] * ssk + x[None, :], S.to(s_p.dtype.element_ty), m)
    own = h * V + x
    _move(v_p + n * svr * svt + own, svt, cv_p + place * cvn + own * cvd, cvw, count, m_v, W)
    if h % GROUP == 0:
        d = h // GROUP * K + c
        _move(q_p + n * sqr * sqt + d, sqt, cq_p + place * cqn + d * cqd, cqw, count, m_k, W)
        _move(k_p + n * skr * skt + d, skt, ck_p + place * ckn + d * ckd, ckw, count, m_k, W)


def keep_in_pool(
    states: Tensor, tokens: tuple[Tensor, Tensor, Tensor], accepted: Tensor, state: BlockState, slots: Tensor
) -> None:
    """See `kda_block_commit`."""
    direct = goes_direct(states, *tokens, *state.tensors())
    (_keep if direct else keep_op)(states, *tokens, accepted, *state.tensors(), slots)


def _keep(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, accepted: Tensor, s: Tensor, cq: Tensor, ck: Tensor, cv: Tensor,
    slots: Tensor,
) -> None:  # fmt: skip
    N, T, HV, K, V = states.shape
    state = BlockState(s, cq, ck, cv)
    if state.recurrent.stride(-1) != 1:
        raise ValueError(
            f"state.recurrent: expected a pool whose last axis has stride 1, received strides {state.recurrent.stride()}"
        )
    q, k, v, states = (walkable(x) for x in (q, k, v, states))
    if N and T:
        steps = (
            *rows_of(states), *rows_of(q), *rows_of(k), *rows_of(v), *state.recurrent.stride()[:3],
            *state.conv_q.stride(), *state.conv_k.stride(), *state.conv_v.stride(),
        )  # fmt: skip
        constants = (HV, HV * K // q.shape[2], K, padded(K), V, padded(V), state.conv_q.shape[-1] + 1)
        tensors = (states, q, k, v, accepted.contiguous(), slots.contiguous(), *state.tensors())
        launch(keep_kernel, N * HV, tensors, steps, (T,), constants, 4, q.device)


keep_op = define(
    "kda_block_commit(Tensor states, Tensor q, Tensor k, Tensor v, Tensor accepted, Tensor(a!) s, Tensor(b!) cq, Tensor(c!) ck,"
    " Tensor(d!) cv, Tensor slots) -> ()",
    _keep,
    lambda *arguments: None,
)

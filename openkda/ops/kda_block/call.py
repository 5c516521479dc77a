"""One validated call of the block: what `api.kda_block` checks at the door and every implementation receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openkda.ops.device.api import Repeated
from openkda.ops.kda.api import Gate


@dataclass(frozen=True)
class BlockWeights:
    """conv_q, conv_k: [H * K, W] and conv_v: [HV * V, W], float32, tap W - 1 for the current token (W = 2, 3 or 4).
    norm: [V], shared by the heads; norm_eps is added to the mean square."""

    conv_q: Tensor
    conv_k: Tensor
    conv_v: Tensor
    norm: Tensor
    norm_eps: float


@dataclass(frozen=True)
class BlockState:
    """recurrent: [P, HV, K, V] float32 or bfloat16. conv_q, conv_k: [P, H * K, W - 1] and conv_v: [P, HV * V, W - 1], the last
    inputs of the convolutions, newest last, in the activations' dtype. P = N sequences, or slots of a pool."""

    recurrent: Tensor
    conv_q: Tensor
    conv_k: Tensor
    conv_v: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.recurrent, self.conv_q, self.conv_k, self.conv_v


class BlockOutput(NamedTuple):
    """output: [N, T, HV, V]. state: after the last token, or None with keep="all". states: [N, T, HV, K, V] after every
    token, float32, with keep="all"."""

    output: Tensor
    state: BlockState | None
    states: Tensor | None


Replay = Callable[[tuple[Tensor | None, ...], BlockState], BlockOutput | None]
"""From the tensors of `BlockCall.tensors` and the state of a call to its result; None: the long way, please."""

CALLS = Repeated()


@dataclass(slots=True)
class BlockCall:
    """Arguments of `kda_block` after validation; shapes as documented there. key: as in `openkda/ops/kda/call.py`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    out_gate: Tensor
    weights: BlockWeights
    state: BlockState
    slots: Tensor | None
    gate: Gate
    scale: float
    keep_all: bool
    key: tuple[object, ...] | None = None

    @property
    def needs_grad(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        w = self.weights
        tokens = (self.q, self.k, self.v, self.g, self.beta, self.out_gate)
        weights = (w.conv_q, w.conv_k, w.conv_v, w.norm, self.gate.A_log, self.gate.dt_bias)
        return any(t is not None and t.requires_grad for t in (*tokens, *self.state.tensors(), *weights))

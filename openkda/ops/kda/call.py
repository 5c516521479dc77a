"""One validated call of the KDA op: what `api.kda` checks at the door and every implementation receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openkda.ops.device.api import Repeated
from openkda.ops.kda.gate import Gate

Replay = Callable[[tuple[Tensor | None, ...]], Any]
"""From the tensors of `api.kda`, in the order of `TENSORS`, to what `kda` or `kda_step` returns; None: the long way, please."""

TENSORS = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "A_log",
    "dt_bias",
    "initial_state",
    "cu_seqlens",
    "state_indices",
    "state_positions",
)

CALLS = Repeated(training=True)


class KDAOutput(NamedTuple):
    """Result of `kda`.

    output: [B, T, HV, V] in v's dtype.
    final_state: [N, HV, K, V] ([N, HV, V, K] with state_v_first), or None unless asked for.
    states_at: [P, HV, K, V] states after the tokens named by state_positions, or None.
    """

    output: Tensor
    final_state: Tensor | None = None
    states_at: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KDACall:
    """Arguments of `kda` after validation; shapes as documented there. Implementations never re-check.

    key: set from the second call on that looks like this one (`call_key` of `openkda/ops/device/api.py`). An implementation
    that can repeat such a call faster than by looking at it again leaves a `Replay` in CALLS.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    gate: Gate | None
    scale: float
    initial_state: Tensor | None
    output_final_state: bool
    cu_seqlens: Tensor | None
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    state_indices: Tensor | None
    state_positions: Tensor | None
    state_v_first: bool
    state_dtype: torch.dtype
    key: tuple[object, ...] | None = None
    recompute: bool | None = None

    @property
    def num_sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def is_pack(self) -> bool:
        """Whether sequences begin where only the device knows; one alone is the whole row."""
        return self.cu_seqlens is not None and self.num_sequences > 1

    @property
    def keeps(self) -> bool:
        """Whether the forward shall keep what the backward needs of chunks and states (`recompute` of `kda`). Never with states
        at chosen positions, whose backward cuts chunks elsewhere."""
        return self.recompute is False and self.state_positions is None and self.needs_grad and self.q.numel() > 0

    @property
    def needs_grad(self) -> bool:
        """True when autograd would record this call: some tensor that it reads requires a gradient."""
        if not torch.is_grad_enabled():
            return False
        gate = () if self.gate is None else (self.gate.A_log, self.gate.dt_bias)
        tensors = (self.q, self.k, self.v, self.g, self.beta, self.initial_state, *gate)
        return any(t is not None and t.requires_grad for t in tensors)

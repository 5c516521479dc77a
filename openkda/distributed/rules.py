"""DTensor sharding rules of the KDA operators: batch rows and heads never meet, so both can be sharded without a message.

The only exception are the gradients of A_log and dt_bias under a sharded batch, which are partial sums. A pack (`cu_seqlens`)
and states at chosen positions number tokens across the whole batch: there heads alone can be sharded. Sharding along T
needs the states of other processes and is no rule of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

_BATCH: dict[str, Placement] = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "o", "do", "state", "ds"), Shard(0)),
    **dict.fromkeys(("A_log", "dt_bias"), Replicate()),
    **dict.fromkeys(("dA_log", "ddt_bias"), Partial()),
}
_HEADS: dict[str, Placement] = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "o", "do"), Shard(2)),
    **dict.fromkeys(("state", "ds", "kept", "dkept"), Shard(1)),
    **dict.fromkeys(("A_log", "dt_bias", "dA_log", "ddt_bias"), Shard(0)),
    **dict.fromkeys(("cu", "positions"), Replicate()),
}
_INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
_GRADIENTS = ("q", "k", "v", "g", "beta", "dA_log", "ddt_bias", "state")


@cache
def register_kda_rules() -> None:
    """Tell DTensor how `openkda.kda` shards, forward and backward, for the Triton and the chunkwise operators.

    Afterwards `openkda.kda` takes q, k, v, g, beta, the gate's tensors and states as DTensors of one mesh: Shard(0), Shard(2)
    or Replicate() for tokens [B, T, H, ...], Shard(0), Shard(1) or Replicate() for states [N, HV, K, V], Shard(0) or
    Replicate() for the gate. Anything else is redistributed to the cheapest of these. Batch and heads are sharded where
    the mesh divides them evenly (heads: the query heads). Calling it again does nothing.
    """
    # Both define their operators.
    import openkda.ops.kda.chunkwise.compiled
    import openkda.ops.kda.triton.autograd

    ops = torch.ops.openkda
    chunk = (*_INPUTS, "state", "cu")
    _register(ops.kda_chunkwise.default, chunk, lambda x: ("o", "state"))
    _register(ops.kda_chunkwise_backward.default, ("do", "ds", *chunk), _gradients)
    tokens = (*_INPUTS, "cu", "state")
    _register(ops.kda.default, (*tokens, "positions"), _triton_results, want_state=15)
    results = ("o", "kept", "do", "ds", "dkept")
    _register(ops.kda_backward.default, (*tokens, "positions", *results), _gradients)
    from openkda.ops.kda import hopper

    if hopper.installed():
        import openkda.ops.kda.hopper.register  # noqa: F401

        _register(ops.kda_hopper.default, tokens, lambda x: ("o", "state" if x["final"] else ""), want_state=12)


def _register(op: Any, names: Sequence[str], results: Any, want_state: int | None = None) -> None:
    """names: of the tensor arguments, which come first; results(present): names of the results, "" for an empty one."""

    def rule(*arguments: Any) -> list[Any]:
        given = arguments[: len(names)]
        present = {n: spec for n, spec in zip(names, given, strict=True) if spec is not None}
        found = results(present | {"final": want_state is not None and arguments[want_state]})
        rest = [None] * (len(arguments) - len(names))
        rules: list[Any] = [
            ([Replicate() for _ in found], [*(Replicate() if n in present else None for n in names), *rest])
        ]
        q, size = present["q"], present["q"].mesh.size()
        for dim, placements in ((0, _BATCH), (2, _HEADS)):
            if q.shape[dim] % size == 0 and all(n in placements for n in present):
                inputs = [placements[n] if n in present else None for n in names]
                rules.append(([placements[n] if n else Replicate() for n in found], [*inputs, *rest]))
        return rules

    register_sharding(op)(rule)


def _gradients(present: dict[str, Any]) -> tuple[str, ...]:
    return tuple(n if n.removeprefix("d") in present else "" for n in _GRADIENTS)


def _triton_results(present: dict[str, Any]) -> tuple[str, ...]:
    return "o", "state" if present["final"] else "", "kept" if "positions" in present else ""

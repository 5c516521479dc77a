"""The exact two-level scan: what a stretch of tokens does to whatever state enters it, and which states enter the stretches.

Tokens multiply a state from the left and add to it, so a stretch of them is an affine map, which needs no token of another one:

    leaving = transition @ entering + own

    level 1   own: the stretch from zeros; transition: from the identity, with values of zero      side by side
    level 2   S_1 = M_1 S_0 + L_1,  S_2 = M_2 S_1 + L_2, ...                                        one product each
    then      every stretch from the state that really enters it                                   side by side

No decay is taken for total: slow gates are exact too. The Hopper forward goes this way inside one call, for few heads and one
long sequence (`hopper/scan.py` is level 1 of all segments in one launch, `hopper/merge.py` level 2). Here are both levels for
stretches that do not lie in one memory, as under context parallelism: a rank sends [HV, K, V + K] float32 a sequence, no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from openkda.ops.kda.api import Gate, kda


class Stretch(NamedTuple):
    """own [N, HV, K, V] and transition [N, HV, K, K] of N stretches, in the dtype of states."""

    own: Tensor
    transition: Tensor


def kda_stretch(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: Gate | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    impl: str | None = None,
) -> Stretch:
    """Level 1, of the N rows of a batch or members of a pack. Arguments, errors and gradients as in `kda`; no queries."""

    def ends(v: Tensor, state: Tensor | None) -> Tensor:
        final = kda(
            k, k, v, g, beta, gate=gate, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens,
            use_qk_l2norm=use_qk_l2norm, use_beta_sigmoid=use_beta_sigmoid, impl=impl,
        ).final_state  # fmt: skip
        assert final is not None  # for the type checker
        return final

    own = ends(v, None)
    K = k.shape[-1]
    identity = torch.eye(K, dtype=own.dtype, device=own.device).expand(*own.shape[:2], K, K).contiguous()
    return Stretch(own, ends(v.new_zeros(*v.shape[:3], K), identity))


def entering_states(stretches: Sequence[Stretch], initial_state: Tensor | None = None) -> list[Tensor]:
    """Level 2: the states that enter the P stretches, in order, and the one that leaves the last (P + 1 of them).

    Products are float64, whatever torch is told about float32 products: P of them, none of it in proportion to the tokens.
    Raises: ValueError or TypeError for stretches and a state that are not of the same sequences.
    """
    if not stretches:
        raise ValueError("stretches: expected at least one, received none")
    first = stretches[0].own
    N, HV, K, V = first.shape
    named = [(f"stretches[{i}].own", s.own, (N, HV, K, V)) for i, s in enumerate(stretches)]
    named += [(f"stretches[{i}].transition", s.transition, (N, HV, K, K)) for i, s in enumerate(stretches)]
    if initial_state is not None:
        named.append(("initial_state", initial_state, (N, HV, K, V)))
    for name, t, shape in named:  # a product would spread what is smaller
        if t.shape != shape:
            raise ValueError(f"{name}.shape: expected {list(shape)}, received {list(t.shape)}")
        if t.dtype != first.dtype:
            raise TypeError(f"{name}.dtype: expected {first.dtype}, received {t.dtype}")
    states = [torch.zeros_like(first) if initial_state is None else initial_state]
    for own, transition in stretches:
        states.append((transition.double() @ states[-1].double() + own.double()).to(own.dtype))
    return states

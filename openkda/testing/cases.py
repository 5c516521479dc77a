"""The shared case list of the KDA op: every implementation is held to it.

A pairwise covering set, not a product: every length once, and every pair of values of any two factors in at least one
case (a test checks that). The token loop in float64 costs 0.4 s a case at T = 257, so the list stays under 400.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from openkda.testing.inputs import DECAYS, KDAInputs, make_inputs

LENGTHS = (*range(1, 258), 511, 512, 513, 514)
PACKS = (
    (0, 1, 2, 63, 64, 65, 129),
    (1,),
    (0, 0, 5),
    (64, 64),
    (1, 1, 1, 1),
    (129, 0, 1),
    (17, 47, 16, 48),
    (65, 63, 0, 130, 2),
)
SIZES = (8, 16, 24, 32, 48, 64, 96, 128)

FACTORS: dict[str, tuple[Any, ...]] = {
    "K": SIZES,
    "V": SIZES,
    "gate": ("bounded", "softplus", None),
    "decay": DECAYS,
    "group": (1, 3),
    "initial_state": (True, False),
    "use_qk_l2norm": (False, True),
    "use_beta_sigmoid": (False, True),
    "keys": ("random", "near_equal"),
}


@dataclass(frozen=True)
class KDACase:
    """One point: a length (or a pack), and a value of every factor. HV = group * H."""

    T: int
    lengths: tuple[int, ...] | None
    K: int
    V: int
    gate: str | None
    decay: str
    group: int
    initial_state: bool
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    keys: str

    @property
    def id(self) -> str:
        where = f"T{self.T}" if self.lengths is None else "pack" + "-".join(map(str, self.lengths))
        flags = "".join(c for c, on in zip("snb", self._flags(), strict=True) if on)
        return f"{where}-K{self.K}V{self.V}-{self.gate}-{self.decay}-x{self.group}-{self.keys}-{flags}"

    def _flags(self) -> tuple[bool, bool, bool]:
        return self.initial_state, self.use_qk_l2norm, self.use_beta_sigmoid

    def inputs(self, seed: int = 0) -> KDAInputs:
        """Float32 CPU inputs of this case; one query head, `group` value heads."""
        return make_inputs(
            seed,
            T=self.T,
            H=1,
            HV=self.group,
            K=self.K,
            V=self.V,
            gate=self.gate,
            decay=self.decay,
            lengths=self.lengths,
            initial_state=self.initial_state,
            near_equal_keys=self.keys == "near_equal",
            unit_keys=not self.use_qk_l2norm,
            use_qk_l2norm=self.use_qk_l2norm,
            use_beta_sigmoid=self.use_beta_sigmoid,
        )


def pairs(values: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
    return {(a, values[a], b, values[b]) for a, b in itertools.combinations(FACTORS, 2)}


def all_pairs() -> set[tuple[str, Any, str, Any]]:
    two = itertools.combinations(FACTORS, 2)
    return {(a, x, b, y) for a, b in two for x in FACTORS[a] for y in FACTORS[b]}


@cache
def kda_cases() -> tuple[KDACase, ...]:
    """The list: for every length and pack, the candidate of 30 random ones that covers most pairs not yet covered."""
    rng = random.Random(20)
    open_pairs = all_pairs()
    cases = []
    for where in (*LENGTHS, *PACKS, *PACKS, *PACKS):
        candidates = [{f: rng.choice(v) for f, v in FACTORS.items()} for _ in range(30)]
        best = max(candidates, key=lambda c: len(pairs(c) & open_pairs))
        open_pairs -= pairs(best)
        lengths = where if isinstance(where, tuple) else None
        cases.append(KDACase(T=sum(lengths) if lengths is not None else where, lengths=lengths, **best))
    return tuple(cases)

"""The state of our models in the shape that transformers' generation loop expects of a cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from openkda.generation.state import select
from openkda.layers.state import ModelState


class KimiCache:
    """A model state and how many input positions it has seen (an image counts as its one placeholder).

    Not a `transformers.Cache`: the recurrent state has a constant size and cannot be cropped, quantised or offloaded.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = (False,)
    is_linear = (False,)

    def __init__(self, state: ModelState | None = None, seen: int = 0) -> None:
        self.state, self.seen = state, seen

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: there is no largest length."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of `beam_idx`: a beam may continue another one's state, or several the same."""
        if self.state is not None:
            self.state = select(self.state, beam_idx.tolist())

    def crop(self, max_length: int) -> None:
        raise NotImplementedError("a recurrent state cannot go back to an earlier token")


def own_cache(cache: Any) -> KimiCache | None:
    """The cache if it is one of ours, or none. Raises: TypeError for one of transformers' own."""
    if cache is None or isinstance(cache, KimiCache):
        return cache
    raise TypeError(
        f"cache: expected none, or what an earlier call of this model returned (a KimiCache), received "
        f"{type(cache).__name__}: keys and values alone are not the state of this model"
    )

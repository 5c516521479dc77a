"""What all attention layers share: one forward for batches, packs, left-padded batches and sequences that go on."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from openkda.layers.packing import pack, padding_of, unpack
from openkda.layers.state import LayerState
from openkda.ops.packing.api import check_cu_seqlens


class SequenceLayer(nn.Module):
    """A layer on [B, T, hidden_size] with a state of class `state_type`; subclasses write `_sequences`."""

    state_type: ClassVar[type[LayerState]]
    layer_idx: int
    hidden_size: int

    def forward(
        self,
        x: Tensor,
        *,
        state: Any = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, Any]:
        """x [B, T, hidden_size] -> (y of the same shape, state after the last token or None).

        The result is the same whether a sequence comes at once, in pieces of any sizes, or token by token.

        Args:
            state: what the sequences' earlier tokens left behind; None begins anew. It stays what it was,
                unless it is a pool (`KDAState.slots`).
            cu_seqlens: [N + 1] int32 or int64, sequences packed along T (then B = 1); empty ones are fine.
            attention_mask: [B, T] bool, True = real token, padding on the left only. Padded tokens are not computed: their
                y is 0 and they reach neither state nor neighbours.
            return_state: also return the new state.
        Raises: ValueError or TypeError for malformed input, before anything runs.
        """
        if x.dim() != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(
                f"x.shape: expected [B, T, hidden_size] = [B, T, {self.hidden_size}], received {list(x.shape)}"
            )
        N = check_cu_seqlens(cu_seqlens, x.shape[0], x.shape[1])
        mask = padding_of(attention_mask, (x.shape[0], x.shape[1]), cu_seqlens)
        if state is not None and (not isinstance(state, self.state_type) or state.num_sequences != N):
            known = isinstance(state, self.state_type)
            raise ValueError(
                f"state of layer {self.layer_idx} ({type(self).__name__}): expected a {self.state_type.__name__} of {N} "
                f"rows, received {f'{state.num_sequences} rows' if known else type(state).__name__}"
            )
        if mask is None:
            return self._sequences(x, state, cu_seqlens, return_state)
        tokens, cu = pack(x, mask)
        y, new = self._sequences(tokens, state, cu, return_state)
        return unpack(y, mask), new

    def _sequences(self, x: Tensor, state: Any, cu_seqlens: Tensor | None, return_state: bool) -> tuple[Tensor, Any]:
        raise NotImplementedError(f"{type(self).__name__} has no _sequences")

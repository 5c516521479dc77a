"""What a layer remembers of the tokens it has seen, one dataclass a layer kind; a model's state is a tuple of them.

Row n belongs to sequence n (batch row, or member of a pack). Padding never enters a state.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class KDAState:
    """Constant size, whatever the length: 64 KiB a head in float32 at K = V = 128, plus the convolution tails.

    recurrent: [N, HV, K, V] float32.
    conv_q, conv_k: [N, H * K, W - 1]; conv_v: [N, HV * V, W - 1]: the last W - 1 inputs of each short
    convolution, newest last, in the activations' dtype.
    slots: None, or [N] int: the four tensors are pools, sequence n lives in row slots[n], and a step of one token writes it
    IN PLACE and returns this state. Such a state takes single tokens only.
    """

    recurrent: Tensor
    conv_q: Tensor
    conv_k: Tensor
    conv_v: Tensor
    slots: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return self.recurrent.shape[0] if self.slots is None else self.slots.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.recurrent, self.conv_q, self.conv_k, self.conv_v


@dataclass
class MLAState:
    """Grows by kv_lora_rank + qk_rope_head_dim values a token (576 in Kimi K3), shared by all heads.

    latent: [N, capacity, R] normalised latent followed by the shared key; row n is valid in [0, length[n]), what lies
    behind is never read. length: [N] int64. capacity >= max(length): appending within it copies nothing old.
    longest: a bound on max(length) that the host knows, so that no step waits for a GPU; None = read `length`.
    tail: one element (none while somebody writes), shared by all states that share `latent`: the `length` of the newest
    of them. Only that one may write behind its end; any other state (an older one that is continued a second time, a
    selection of rows) is copied first, so that no state ever changes under its owner.
    """

    latent: Tensor
    length: Tensor
    longest: int | None = None
    tail: list[Tensor] | None = None

    @property
    def num_sequences(self) -> int:
        return self.length.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the valid entries (capacity not yet used is not counted)."""
        return int(self.length.sum()) * self.latent.shape[-1] * self.latent.element_size()


LayerState = KDAState | MLAState
ModelState = tuple[LayerState, ...]

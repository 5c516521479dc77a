"""One validated call of the latent attention op: what `api.mla` checks and every form of it receives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MLACall:
    """Arguments of `mla` after validation; shapes as documented there."""

    q: Tensor
    latent: Tensor
    kv_b: Tensor
    scale: float
    lengths: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def rank(self) -> int:
        return self.kv_b.shape[1]

    @property
    def shared_dim(self) -> int:
        """Width of the key part that all heads share (64 in the published models; never rotated)."""
        return self.latent.shape[-1] - self.rank

    @property
    def nope_dim(self) -> int:
        return self.q.shape[-1] - self.shared_dim

    @property
    def v_dim(self) -> int:
        return self.kv_b.shape[0] // self.q.shape[2] - self.nope_dim

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """W_UK [H, nope, rank] and W_UV [H, V, rank], views of kv_b."""
        per_head = self.kv_b.unflatten(0, (self.q.shape[2], -1))
        return per_head[:, : self.nope_dim], per_head[:, self.nope_dim :]

    def in_float32(self) -> MLACall:
        """The same call with 16-bit tensors widened: 16-bit matmuls are some 30 times slower than float32 on a CPU
        without such units."""
        q, latent, kv_b = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (self.q, self.latent, self.kv_b))
        return MLACall(q, latent, kv_b, self.scale, self.lengths, self.cu_seqlens)

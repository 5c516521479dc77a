"""The depthwise convolution over the last W tokens that stands between a projection and KDA."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openkda.layers.parameters import Float32Parameters, fill_uniform
from openkda.ops.short_conv.api import short_conv, short_conv_step


class ShortConvolution(Float32Parameters):
    """Causal depthwise convolution and SiLU on [B, T, D]; state [N, D, W - 1]. weight [D, 1, W] as published, float32.

    Starts like torch's own convolutions, U(-1/sqrt(W), 1/sqrt(W)).
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=torch.float32))
        self.init_parameters(None)

    def init_parameters(self, generator: torch.Generator | None) -> None:
        bound = self.weight.shape[-1] ** -0.5
        fill_uniform(self.weight, -bound, bound, generator)

    def forward(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        return short_conv(
            x, self.weight[:, 0], initial_state=state, output_final_state=return_state, cu_seqlens=cu_seqlens
        )

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token a sequence: x [N, D]."""
        return short_conv_step(x, self.weight[:, 0], state)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.weight.shape[-1]}"

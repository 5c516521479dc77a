"""The dense feed-forward sublayer, also used for shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from openkda.ops.moe.activation import GLU, SiTUGLU, SwiGLU


def glu(hidden_act: str, beta: float | None = None, linear_beta: float | None = None) -> GLU:
    """The activation that a config names: "silu", or "situ" with its bounds (the published code takes 1 for no beta)."""
    if hidden_act == "silu":
        return SwiGLU()
    if hidden_act == "situ":
        return SiTUGLU(1.0 if beta is None else beta, linear_beta)
    raise ValueError(f"hidden_act: expected 'silu' or 'situ', received {hidden_act!r}")


class MLP(nn.Module):
    """down(activation(gate(x), up(x))), no biases; names as published."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: GLU) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))

"""Mixture of experts: router, dropless expert MLPs (plain or packed MXFP4), gated activations, Quantile Balancing."""

from openkda.ops.moe.activation import GLU, SiTUGLU, SwiGLU
from openkda.ops.moe.api import PackedExperts, Routing, expert_mlp, packed_expert_mlp, route, select_experts
from openkda.ops.moe.balance import histogram_bias, margin_histogram, quantile_bias

__all__ = [
    "GLU",
    "PackedExperts",
    "Routing",
    "SiTUGLU",
    "SwiGLU",
    "expert_mlp",
    "histogram_bias",
    "margin_histogram",
    "packed_expert_mlp",
    "quantile_bias",
    "route",
    "select_experts",
]

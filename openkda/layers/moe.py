"""Mixture of experts: Kimi Linear's on the full width, and Stable LatentMoE of Kimi K3.

    p, T = route(x)                                        sigmoid scores of the FULL width; openkda/ops/moe/api.py
    z    = W_down x                                        latent width (LatentMoE), else z = x
    u    = sum_{j in T} p_j E_j(z)
    y    = W_up RMSNorm(u)  +  shared(x)                   u + shared(x) without latent

The norm stands after the weighted sum and before the up-projection, so shards of the sum must be added before it.
The shared experts are one MLP of their common width. Parameter names are the published ones, except that the expert
matrices are stacked: `experts.w1` [E, I, D] holds the published `experts.0.w1.weight`, `experts.1.w1.weight`, ...
Source: Kimi K3 report, section 2.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from openkda.layers.config import MoEConfig
from openkda.layers.mlp import MLP, glu
from openkda.layers.norm import RMSNorm
from openkda.layers.parameters import at_least_float32, fill_constant, fill_normal
from openkda.ops.moe.activation import GLU
from openkda.ops.moe.api import PackedExperts, Routing, expert_mlp, packed_expert_mlp, route
from openkda.ops.moe.balance import margin_histogram
from openkda.ops.mx.api import BLOCK, ScaleRule, pack_mxfp4, unpack_mxfp4


class Router(nn.Module):
    """Scores and choice of experts. weight [E, D]; e_score_correction_bias [E] is a buffer that stays float32.

    balance_bins: histogram bins of Quantile Balancing; None = nothing is counted. `openkda.layers.balance` sets it.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        assert config.num_experts is not None  # the caller asked for experts
        self.k, self.renormalize, self.scale = (
            config.num_experts_per_token,
            config.moe_renormalize,
            config.routed_scaling_factor,
        )
        self.std = config.initializer_range
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.balance_bins: int | None = None
        self.counts: Tensor | None = None  # [E, bins + 1] int64: the histogram, then each expert's load
        self.init_parameters(None)

    def init_parameters(self, generator: torch.Generator | None) -> None:
        fill_normal(self.weight, self.std, generator)
        fill_constant(self.e_score_correction_bias, 0.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.e_score_correction_bias
        if self.counts is not None:
            self.counts = self.counts.to(fn(bias).device)
        return super()._apply(lambda t: at_least_float32(fn, t) if t is bias else fn(t), recurse)

    def forward(self, x: Tensor) -> Routing:
        """x [T, D] -> choice of every token. Counts them where balancing is on and the model trains."""
        watching = self.balance_bins is not None and self.training
        routing = route(
            x,
            self.weight,
            self.e_score_correction_bias,
            self.k,
            renormalize=self.renormalize,
            scale=self.scale,
            with_cutoff=watching,
        )
        # In a backward pass this is activation checkpointing at work: these tokens were counted when they came first. They are
        # routed in the same call again: the first k of k + 1 and the first k may choose differently among equal scores.
        if watching and not _in_backward():
            self._count(routing)
        return routing

    @torch.no_grad()
    def _count(self, routing: Routing) -> None:
        assert self.balance_bins is not None and routing.cutoff is not None
        bias = self.e_score_correction_bias
        histogram = margin_histogram(routing.scores, routing.cutoff, bias, bins=self.balance_bins)
        chosen = routing.experts.flatten()
        load = torch.zeros(bias.numel(), dtype=torch.int64, device=chosen.device)
        load.scatter_add_(0, chosen, torch.ones_like(chosen))
        new = torch.cat([histogram, load.unsqueeze(1)], 1)
        self.counts = new if self.counts is None else self.counts + new

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} experts, {self.k} a token"


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Experts(nn.Module):
    """All routed experts: w1 (gate) and w3 (up) [E, I, D], w2 (down) [E, D, I].

    quantize: scale rule of quantisation-aware training (see `openkda.ops.moe.expert_mlp`), None = off.
    """

    def __init__(self, experts: int, width: int, inner: int, activation: GLU, std: float) -> None:
        super().__init__()
        self.activation, self.std = activation, std
        self.quantize: ScaleRule | None = None
        self.w1 = nn.Parameter(torch.empty(experts, inner, width))
        self.w3 = nn.Parameter(torch.empty(experts, inner, width))
        self.w2 = nn.Parameter(torch.empty(experts, width, inner))
        self.init_parameters(None)

    def init_parameters(self, generator: torch.Generator | None) -> None:
        for w in (self.w1, self.w3, self.w2):
            fill_normal(w, self.std, generator)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        return expert_mlp(
            x, routing.experts, routing.weights, self.w1, self.w3, self.w2,
            activation=self.activation, quantize=self.quantize,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{list(self.w1.shape)}" + (f", quantize={self.quantize}" if self.quantize else "")


class PackedMXFP4Experts(nn.Module):
    """The same experts in the published packing: a quarter of bfloat16's memory. For inference.

    Buffers w1_packed, w3_packed [E, I, D / 2], w2_packed [E, D, I / 2] and w*_scale [.., / 32], uint8; they start as
    zero experts. D and I are multiples of 32.
    """

    def __init__(self, experts: int, width: int, inner: int, activation: GLU) -> None:
        super().__init__()
        self.activation = activation
        for name, out, columns in (("w1", inner, width), ("w3", inner, width), ("w2", width, inner)):
            if columns % BLOCK:
                raise ValueError(
                    f"packed experts: expected {name} columns that are a multiple of {BLOCK}, got {columns}"
                )
            self.register_buffer(f"{name}_packed", torch.zeros(experts, out, columns // 2, dtype=torch.uint8))
            self.register_buffer(f"{name}_scale", torch.zeros(experts, out, columns // BLOCK, dtype=torch.uint8))

    def init_parameters(self, generator: torch.Generator | None) -> None:
        for buffer in self.buffers():
            fill_constant(buffer, 0)

    def matrix(self, name: str) -> tuple[Tensor, Tensor]:
        """(packed, scale) of "w1", "w2" or "w3", stacked over experts."""
        return getattr(self, f"{name}_packed"), getattr(self, f"{name}_scale")

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        packed = PackedExperts(self.matrix("w1"), self.matrix("w2"), self.matrix("w3"))
        return packed_expert_mlp(x, routing.experts, routing.weights, packed, activation=self.activation)


class SparseMoE(nn.Module):
    """Routed and shared experts on [B, T, hidden_size]; a config with `routed_expert_hidden_size` makes it a LatentMoE."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        assert config.num_experts is not None and config.moe_intermediate_size is not None  # the config checked both
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        width = config.routed_expert_hidden_size or hidden
        activation = glu(config.hidden_act, config.activation_situ_beta, config.activation_situ_linear_beta)
        self.gate = Router(config)
        self.experts: Experts | PackedMXFP4Experts
        if config.packed_experts:
            self.experts = PackedMXFP4Experts(config.num_experts, width, inner, activation)
        else:
            self.experts = Experts(config.num_experts, width, inner, activation, config.initializer_range)
            self.experts.quantize = config.expert_quantization
        self.latent = config.routed_expert_hidden_size is not None
        if self.latent:
            self.routed_expert_down_proj = nn.Linear(hidden, width, bias=False)
            self.routed_expert_up_proj = nn.Linear(width, hidden, bias=False)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = RMSNorm(width, config.rms_norm_eps)
        self.shared_experts = (
            MLP(hidden, config.num_shared_experts * inner, activation) if config.num_shared_experts else None
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        routing = self.gate(flat)
        y = self.experts(self.routed_expert_down_proj(flat) if self.latent else flat, routing)
        if self.latent:
            norm = getattr(self, "routed_expert_norm", None)
            y = self.routed_expert_up_proj(y if norm is None else norm(y))
        return (y if self.shared_experts is None else y + self.shared_experts(flat)).view(x.shape)


@torch.no_grad()
def pack_experts(root: nn.Module) -> int:
    """Replace every `Experts` below `root` by its MXFP4 packing, in place; returns how many. The rounding is lasting.

    Configs below `root` say so from then on (`packed_experts`), and a checkpoint of it stays packed.
    """
    count = 0
    for module in list(root.modules()):
        experts = getattr(module, "experts", None)
        if isinstance(module, SparseMoE) and isinstance(experts, Experts):
            E, inner, width = experts.w1.shape
            with torch.device("meta"):
                packed = PackedMXFP4Experts(E, width, inner, experts.activation)
            for name in ("w1", "w2", "w3"):
                codes, scale = pack_mxfp4(getattr(experts, name))
                setattr(packed, f"{name}_packed", codes)
                setattr(packed, f"{name}_scale", scale)
            module.experts = packed.train(experts.training)
            count += 1
    if count:
        _say_packed(root, True)
    return count


@torch.no_grad()
def unpack_experts(root: nn.Module) -> int:
    """The reverse of `pack_experts`: float32 matrices with the values that the codes stand for, which can be trained."""
    count = 0
    for module in list(root.modules()):
        packed = getattr(module, "experts", None)
        if isinstance(module, SparseMoE) and isinstance(packed, PackedMXFP4Experts):
            values = {n: unpack_mxfp4(*packed.matrix(n), dtype=torch.float32) for n in ("w1", "w2", "w3")}
            E, inner, width = values["w1"].shape
            with torch.device("meta"):
                experts = Experts(E, width, inner, packed.activation, module.gate.std)
            for name, value in values.items():
                setattr(experts, name, nn.Parameter(value))
            module.experts = experts.train(packed.training)
            count += 1
    if count:
        _say_packed(root, False)
    return count


def _say_packed(root: nn.Module, packed: bool) -> None:
    for module in root.modules():
        config = getattr(module, "config", None)
        if dataclasses.is_dataclass(config) and hasattr(config, "packed_experts"):
            module.config = dataclasses.replace(config, packed_experts=packed)  # type: ignore[type-var, assignment]

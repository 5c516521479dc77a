"""What a model is made of and what it remembers: parameters by kind, and bytes of state, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from openkda.models.checkpoint import load_config, stored_dtype
from openkda.models.config import ModelConfig
from openkda.models.presets import PRESETS


@dataclass(frozen=True)
class LayerRow:
    """One decoder layer. number: 1-based, as in the layer lists. attention: "KDA" or "MLA"; mlp: "dense" or "experts"."""

    number: int
    attention: str
    mlp: str
    parameters: int


@dataclass(frozen=True)
class ModelReport:
    """Sizes of a model. Bytes are those of one sequence, with activations in `dtype`; the KDA matrices are float32.

    parameters: count by kind, norms counted with the part that they precede ("norms": those of the residual stream).
    active_parameters: read for one token; the input embedding is a look-up and not counted.
    constant_bytes: KDA matrices and convolution tails, whatever the length. bytes_per_token: MLA latents.
    full_attention_bytes_per_token: keys and values of every head in every layer (multi-head attention with as many
    heads of v_head_dim). latent_attention_bytes_per_token: were every layer MLA.
    """

    config: ModelConfig
    dtype: torch.dtype
    layers: tuple[LayerRow, ...]
    parameters: dict[str, int]
    active_parameters: int
    constant_bytes: int
    bytes_per_token: int
    full_attention_bytes_per_token: int
    latent_attention_bytes_per_token: int

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    def state_bytes(self, length: int) -> int:
        """State of one sequence of `length` tokens."""
        return self.constant_bytes + length * self.bytes_per_token

    def full_attention_bytes(self, length: int) -> int:
        return length * self.full_attention_bytes_per_token


def describe(model: ModelConfig | str | Path, *, dtype: torch.dtype | None = None) -> ModelReport:
    """Report on a config, a preset's name or a checkpoint directory.

    dtype: of the activations (convolution tails and latents); default that of a checkpoint's weights, else bfloat16.
    Raises: ValueError for an unknown name, FileNotFoundError for an incomplete checkpoint.
    """
    if not isinstance(model, ModelConfig):
        if str(model) in PRESETS:
            model = PRESETS[str(model)]
        elif Path(model).is_dir():
            directory, model = model, load_config(model)
            dtype = stored_dtype(directory) if dtype is None else dtype
        else:
            raise ValueError(f"expected a preset ({', '.join(PRESETS)}) or a checkpoint directory, received {model!s}")
    c, dtype = model, dtype or torch.bfloat16
    kinds = count_parameters(c)
    idle = 0
    if c.num_experts is not None:
        idle = kinds["routed experts"] * (c.num_experts - c.num_experts_per_token) // c.num_experts
    embedding = 0 if c.tie_word_embeddings else kinds["embedding"]
    latent = (c.kv_lora_rank + c.qk_rope_head_dim) * dtype.itemsize
    return ModelReport(
        config=c,
        dtype=dtype,
        layers=tuple(_row(c, i) for i in range(c.num_hidden_layers)),
        parameters=kinds,
        active_parameters=sum(kinds.values()) - embedding - idle,
        constant_bytes=len(c.kda_layers) * _kda_state_bytes(c, dtype),
        bytes_per_token=len(c.full_attn_layers) * latent,
        full_attention_bytes_per_token=c.num_hidden_layers * 2 * c.num_attention_heads * c.v_head_dim * dtype.itemsize,
        latent_attention_bytes_per_token=c.num_hidden_layers * latent,
    )


def count_parameters(c: ModelConfig) -> dict[str, int]:
    """Parameters of the whole model by kind; kinds that it does not have are left out."""
    moe = sum(c.is_moe(i) for i in range(c.num_hidden_layers))
    experts = _expert_parameters(c) if moe else {}
    counts = {
        "embedding": c.vocab_size * c.hidden_size,
        "head": 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size,
        "KDA": len(c.kda_layers) * _kda_parameters(c),
        "MLA": len(c.full_attn_layers) * _mla_parameters(c),
        "dense MLP": (c.num_hidden_layers - moe) * 3 * c.hidden_size * c.intermediate_size,
        **{kind: moe * count for kind, count in experts.items()},
        "attention residuals": 0 if c.attn_res_block_size is None else (4 * c.num_hidden_layers + 2) * c.hidden_size,
        "norms": (2 * c.num_hidden_layers + 1) * c.hidden_size,
    }
    return {kind: count for kind, count in counts.items() if count}


def _kda_parameters(c: ModelConfig) -> int:
    d, K, V = c.hidden_size, c.kda_head_dim, c.kda_v_dim
    keys, values, decays = c.kda_num_heads * K, c.kda_v_heads * V, c.kda_v_heads * K
    channels = 2 * keys + values
    forget = d * K + K * decays + decays + c.kda_v_heads  # bottleneck, dt_bias, A_log
    output_gate = d * values if c.use_full_rank_gate else d * K + K * values
    conv, beta, norm = channels * c.short_conv_kernel_size, d * c.kda_v_heads, V
    return d * channels + conv + forget + beta + output_gate + norm + values * d


def _mla_parameters(c: ModelConfig) -> int:
    d, H, r = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    queries, values = H * (c.qk_nope_head_dim + c.qk_rope_head_dim), H * c.v_head_dim
    q = d * queries if c.q_lora_rank is None else c.q_lora_rank * (d + 1 + queries)
    kv = d * (r + c.qk_rope_head_dim) + r + r * (H * c.qk_nope_head_dim + values)
    return q + kv + values * d * (2 if c.mla_use_output_gate else 1)


def _expert_parameters(c: ModelConfig) -> dict[str, int]:
    """Of one layer with routed experts."""
    assert c.num_experts is not None and c.moe_intermediate_size is not None  # the config checked both
    latent = c.routed_expert_hidden_size
    return {
        "routed experts": c.num_experts * 3 * (latent or c.hidden_size) * c.moe_intermediate_size,
        "shared experts": 3 * c.hidden_size * c.num_shared_experts * c.moe_intermediate_size,
        "latent projections": 0 if latent is None else 2 * c.hidden_size * latent + latent * c.latent_moe_use_norm,
        "routers": c.num_experts * (c.hidden_size + 1),
    }


def _row(c: ModelConfig, i: int) -> LayerRow:
    attention = _kda_parameters(c) if c.is_kda(i) else _mla_parameters(c)
    mlp = sum(_expert_parameters(c).values()) if c.is_moe(i) else 3 * c.hidden_size * c.intermediate_size
    around = c.hidden_size * (2 if c.attn_res_block_size is None else 6)
    kind = "KDA" if c.is_kda(i) else "MLA"
    return LayerRow(i + 1, kind, "experts" if c.is_moe(i) else "dense", attention + mlp + around)


def _kda_state_bytes(c: ModelConfig, dtype: torch.dtype) -> int:
    matrix = c.kda_v_heads * c.kda_head_dim * c.kda_v_dim * 4
    channels = 2 * c.kda_num_heads * c.kda_head_dim + c.kda_v_heads * c.kda_v_dim
    return matrix + channels * (c.short_conv_kernel_size - 1) * dtype.itemsize

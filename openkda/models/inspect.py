"""What a model is made of and what it remembers: parameters by kind, and bytes of state, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from openkda.models.checkpoint import load_config, stored_dtype
from openkda.models.config import ModelConfig
from openkda.models.presets import PRESETS, named_config


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

    parameters: count by kind. "vectors" are norms, convolutions, A_log, dt_bias and router biases of all parts.
    active_parameters: matrix weights that one token is multiplied with (the input embedding is a look-up: not counted).
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

    @property
    def matrix_parameters(self) -> int:
        """Without vectors and attention residuals: what published parameter tables count."""
        return _matrices(self.parameters)

    def state_bytes(self, length: int) -> int:
        """State of one sequence of `length` tokens."""
        return self.constant_bytes + length * self.bytes_per_token

    def full_attention_bytes(self, length: int) -> int:
        return length * self.full_attention_bytes_per_token


def describe(model: ModelConfig | str | Path, *, dtype: torch.dtype | None = None) -> ModelReport:
    """Report on a config, a preset's name, the path of a config.json or a checkpoint directory.

    dtype: of the activations (convolution tails and latents); default that of a checkpoint's weights, else bfloat16.
    Raises: ValueError for an unknown name, FileNotFoundError for an incomplete checkpoint.
    """
    if not isinstance(model, ModelConfig):
        if str(model) in PRESETS or Path(model).is_file():
            model = named_config(str(model))
        elif Path(model).is_dir():
            directory, model = model, load_config(model)
            dtype = stored_dtype(directory) if dtype is None else dtype
        else:
            raise ValueError(
                f"expected a preset ({', '.join(PRESETS)}), a config.json or a checkpoint directory, received {model!s}"
            )
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
        active_parameters=_matrices(kinds) - embedding - idle,
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
        "vectors": (2 * c.num_hidden_layers + 1) * c.hidden_size
        + len(c.kda_layers) * _kda_vectors(c)
        + len(c.full_attn_layers) * _mla_vectors(c)
        + moe * _expert_vectors(c),
    }
    return {kind: count for kind, count in counts.items() if count}


def _matrices(kinds: dict[str, int]) -> int:
    return sum(count for kind, count in kinds.items() if kind not in ("vectors", "attention residuals"))


def _kda_channels(c: ModelConfig) -> int:
    return 2 * c.kda_num_heads * c.kda_head_dim + c.kda_v_heads * c.kda_v_dim


def _kda_parameters(c: ModelConfig) -> int:
    d, K = c.hidden_size, c.kda_head_dim
    values, decays = c.kda_v_heads * c.kda_v_dim, c.kda_v_heads * K
    output_gate = d * values if c.use_full_rank_gate else d * K + K * values
    return d * _kda_channels(c) + d * K + K * decays + d * c.kda_v_heads + output_gate + values * d


def _kda_vectors(c: ModelConfig) -> int:
    """Convolutions, dt_bias, A_log, o_norm, the output gate's bias."""
    decays = c.kda_v_heads * c.kda_head_dim
    bias = c.kda_v_heads * c.kda_v_dim if c.output_gate_bias else 0
    return _kda_channels(c) * c.short_conv_kernel_size + decays + c.kda_v_heads + c.kda_v_dim + bias


def _mla_parameters(c: ModelConfig) -> int:
    d, H, r = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    queries, values = H * (c.qk_nope_head_dim + c.qk_rope_head_dim), H * c.v_head_dim
    q = d * queries if c.q_lora_rank is None else c.q_lora_rank * (d + queries)
    kv = d * (r + c.qk_rope_head_dim) + r * (H * c.qk_nope_head_dim + values)
    return q + kv + values * d * (2 if c.mla_use_output_gate else 1)


def _mla_vectors(c: ModelConfig) -> int:
    return c.kv_lora_rank + (c.q_lora_rank or 0)


def _expert_parameters(c: ModelConfig) -> dict[str, int]:
    """Matrices of one layer with routed experts."""
    assert c.num_experts is not None and c.moe_intermediate_size is not None  # the config checked both
    latent = c.routed_expert_hidden_size
    return {
        "routed experts": c.num_experts * 3 * (latent or c.hidden_size) * c.moe_intermediate_size,
        "shared experts": 3 * c.hidden_size * c.num_shared_experts * c.moe_intermediate_size,
        "latent projections": 2 * c.hidden_size * (latent or 0),
        "routers": c.num_experts * c.hidden_size,
    }


def _expert_vectors(c: ModelConfig) -> int:
    """Router bias, and the norm behind the combine."""
    latent = c.routed_expert_hidden_size
    return (c.num_experts or 0) + (latent if latent is not None and c.latent_moe_use_norm else 0)


def _row(c: ModelConfig, i: int) -> LayerRow:
    kda, moe = c.is_kda(i), c.is_moe(i)
    attention = _kda_parameters(c) + _kda_vectors(c) if kda else _mla_parameters(c) + _mla_vectors(c)
    mlp = 3 * c.hidden_size * c.intermediate_size
    if moe:
        mlp = sum(_expert_parameters(c).values()) + _expert_vectors(c)
    around = c.hidden_size * (2 if c.attn_res_block_size is None else 6)
    return LayerRow(i + 1, "KDA" if kda else "MLA", "experts" if moe else "dense", attention + mlp + around)


def _kda_state_bytes(c: ModelConfig, dtype: torch.dtype) -> int:
    matrix = c.kda_v_heads * c.kda_head_dim * c.kda_v_dim * 4
    return matrix + _kda_channels(c) * (c.short_conv_kernel_size - 1) * dtype.itemsize

"""The model's configuration: one frozen dataclass in which every published feature is its own switch.

Nothing is inferred from a model's name: Kimi Linear 48B and Kimi K3 carry the same `model_type` in their files
and differ only in these fields (docs/derivation.md says what each does).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any, NoReturn

from openkda.models.field_types import check_types
from openkda.models.vision_config import VisionConfig
from openkda.ops.mx.api import ScaleRule


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a hybrid model. Raises ValueError for an impossible combination.

    Layer lists are 1-based, as published: `kda_layers` and `full_attn_layers` together name 1..num_hidden_layers once.
    None switches a feature off: `gate_lower_bound` None = softplus gate, `q_lora_rank` None = one query
    projection, `attn_res_block_size` None = plain residuals, `num_experts` None = dense MLPs everywhere,
    `routed_expert_hidden_size` None = experts on the full width, `vision` None = text only.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]

    # Kimi Delta Attention
    kda_num_heads: int
    kda_head_dim: int
    kda_num_v_heads: int | None = None  # grouped values: a multiple of kda_num_heads; None = the same number
    kda_v_head_dim: int | None = None  # None = kda_head_dim
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None
    use_full_rank_gate: bool = False  # the OUTPUT gate: one matrix, or a bottleneck of kda_head_dim
    output_gate_bias: bool = False  # on the bottleneck's second matrix: fla's layers have one, published models none

    # Gated MLA (no position encoding: the "rope" dims are not rotated, but they stay in the score)
    num_attention_heads: int
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_output_gate: bool = False
    mla_norm_eps: float = 1e-6  # of the low-rank norms; the published code uses 1e-6 there and 1e-5 elsewhere
    mla_fp32_output: bool = False  # keep the attention output in float32 in training (Kimi K3 report 2.1.2)

    # Norms, embeddings
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    # MLP activation: "silu" (SwiGLU) or "situ" (SiTU-GLU with its two bounds)
    hidden_act: str = "silu"
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None

    # Block Attention Residuals: block size in decoder layers
    attn_res_block_size: int | None = None

    # Mixture of experts from layer first_k_dense_replace (0-based) on
    num_experts: int | None = None
    num_experts_per_token: int = 8
    num_shared_experts: int = 0
    moe_intermediate_size: int | None = None
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    packed_experts: bool = False  # routed experts stay packed in MXFP4, for inference
    expert_quantization: ScaleRule | None = None  # quantisation-aware training of routed experts: its scale rule

    vision: VisionConfig | None = None  # images: `openkda.models.multimodal.MultimodalLM`

    def __post_init__(self) -> None:
        for name in ("kda_layers", "full_attn_layers"):
            if isinstance(getattr(self, name), list | range):  # as JSON gives it back
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.vision, dict):
            object.__setattr__(self, "vision", _vision(self.vision))
        _check(self)

    @property
    def kda_v_heads(self) -> int:
        return self.kda_num_v_heads or self.kda_num_heads

    @property
    def kda_v_dim(self) -> int:
        return self.kda_v_head_dim or self.kda_head_dim

    def is_kda(self, layer: int) -> bool:
        """Whether the 0-based `layer` is KDA (else Gated MLA)."""
        return layer + 1 in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether the 0-based `layer` has routed experts (else a dense MLP)."""
        return self.num_experts is not None and layer >= self.first_k_dense_replace

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` inverts it."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_dict`. Unknown and missing keys raise ValueError, all of them named."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - set(known))
        required = {n for n, f in known.items() if f.default is dataclasses.MISSING}
        missing = sorted(required - set(fields))
        if unknown or missing:
            raise ValueError(f"model config: unknown keys {unknown}, missing keys {missing}")
        return cls(**fields)

    def replace(self, **changes: Any) -> ModelConfig:
        return dataclasses.replace(self, **changes)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _bad(name: str, expected: object, received: object) -> NoReturn:
    raise ValueError(f"model config: {name}: expected {expected}, received {received}")


_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "kda_num_heads", "kda_head_dim",
    "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip
_POSITIVE_OR_NONE = (
    "kda_num_v_heads", "kda_v_head_dim", "q_lora_rank", "attn_res_block_size", "num_experts",
    "moe_intermediate_size", "routed_expert_hidden_size",
)  # fmt: skip


def _check(c: ModelConfig) -> None:
    for name in _POSITIVE + _POSITIVE_OR_NONE:
        value = getattr(c, name)
        if value is None and name in _POSITIVE_OR_NONE:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            _bad(name, "a positive integer", repr(value))
    check_types(c, "model config")
    _check_layers(c)
    for name in ("rms_norm_eps", "mla_norm_eps", "initializer_range"):
        if getattr(c, name) < 0:
            _bad(name, "0 or more", getattr(c, name))
    if c.kda_v_heads % c.kda_num_heads:
        _bad("kda_num_v_heads", f"a multiple of kda_num_heads = {c.kda_num_heads}", c.kda_num_v_heads)
    if c.short_conv_kernel_size not in (2, 3, 4):
        _bad("short_conv_kernel_size", "2, 3 or 4", c.short_conv_kernel_size)
    if c.output_gate_bias and c.use_full_rank_gate:
        _bad("output_gate_bias", "false with use_full_rank_gate", True)
    if c.qk_rope_head_dim < 0:
        _bad("qk_rope_head_dim", "0 or more", c.qk_rope_head_dim)
    if c.gate_lower_bound is not None and not -5.0 <= c.gate_lower_bound < 0.0:
        _bad("gate_lower_bound", "a value in [-5, 0), or null for the softplus gate", c.gate_lower_bound)
    if c.hidden_act not in ("silu", "situ"):
        _bad("hidden_act", "'silu' or 'situ'", repr(c.hidden_act))
    for name in ("activation_situ_beta", "activation_situ_linear_beta"):
        bound = getattr(c, name)
        if bound is not None and not bound > 0:
            _bad(name, "a positive number or null", bound)
    if c.num_experts is not None:
        _check_moe(c)
    _check_bytes(c)


def _vision(fields: dict[str, Any]) -> VisionConfig:
    unknown = sorted(set(fields) - {f.name for f in dataclasses.fields(VisionConfig)})
    if unknown:
        _bad("vision", "keys of the vision config", f"unknown keys {unknown}")
    return VisionConfig(**fields)


def _check_bytes(c: ModelConfig) -> None:
    """Sizes whose tensors nothing could address are refused here, not as an overflow somewhere in torch."""
    heads = c.kda_v_heads * max(c.kda_head_dim, c.kda_v_dim)
    mla = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    shared = (c.moe_intermediate_size or 0) * max(c.num_shared_experts, 1)
    widest = max(
        c.vocab_size, c.hidden_size, c.intermediate_size, heads, mla, c.kv_lora_rank, c.q_lora_rank or 0, shared
    )
    if 8 * widest * max(c.hidden_size, c.kda_head_dim, c.kv_lora_rank) * (c.num_experts or 1) >= 1 << 63:
        _bad("sizes", "tensors below 2^63 bytes", f"a width of {widest:,} with hidden_size {c.hidden_size:,}")


def _check_layers(c: ModelConfig) -> None:
    both = sorted(set(c.kda_layers) & set(c.full_attn_layers))
    if both:
        _bad("kda_layers and full_attn_layers", "no layer in both", both)
    got = Counter(c.kda_layers + c.full_attn_layers)
    outside = sorted(i for i in got if not 1 <= i <= c.num_hidden_layers)
    doubled = sorted(i for i, times in got.items() if times > 1)
    # The first ten: a wrong num_hidden_layers may leave billions.
    holes = list(itertools.islice((i for i in range(1, c.num_hidden_layers + 1) if i not in got), 10))
    if holes or outside or doubled:
        _bad(
            "kda_layers + full_attn_layers (1-based)",
            f"1..{c.num_hidden_layers}, each once",
            f"holes {holes}, outside {outside}, doubled {doubled}",
        )


def _check_moe(c: ModelConfig) -> None:
    assert c.num_experts is not None  # for the type checker: the caller tested it
    if c.moe_intermediate_size is None:
        _bad("moe_intermediate_size", "a positive integer with num_experts", None)
    if not 1 <= c.num_experts_per_token <= c.num_experts:
        _bad("num_experts_per_token", f"1..num_experts = {c.num_experts}", c.num_experts_per_token)
    if c.num_shared_experts < 0:
        _bad("num_shared_experts", "0 or more", c.num_shared_experts)
    if c.packed_experts and c.expert_quantization is not None:
        _bad("packed_experts with expert_quantization", "one of the two (packed experts cannot train)", "both")
    widths = (c.moe_intermediate_size, c.routed_expert_hidden_size or c.hidden_size)
    if (c.packed_experts or c.expert_quantization is not None) and any(w % 32 for w in widths):
        _bad("expert widths in MXFP4", "multiples of 32 (its block)", f"{widths[1]} and {widths[0]}")
    if not 0 <= c.first_k_dense_replace <= c.num_hidden_layers:
        _bad("first_k_dense_replace", f"0..{c.num_hidden_layers}", c.first_k_dense_replace)

"""Named configurations: three for a laptop, one for a GPU, two as published.

Sources: `config.json` of moonshotai/Kimi-Linear-48B-A3B-Instruct (revision e1df551a) and of moonshotai/Kimi-K3 (revision
9f62e4e9). Layer lists are 1-based there and here.
"""

from __future__ import annotations

from pathlib import Path

from openkda.models.config import ModelConfig
from openkda.models.field_types import parse_json
from openkda.models.official_config import from_published


def _every_fourth(num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(KDA layers, MLA layers) of 1..num_layers: 3 to 1, and the last layer MLA in any case."""
    full = tuple(i for i in range(1, num_layers + 1) if i % 4 == 0 or i == num_layers)
    return tuple(i for i in range(1, num_layers + 1) if i not in full), full


TINY_KDA, TINY_FULL = _every_fourth(4)
DEMO_KDA, DEMO_FULL = _every_fourth(8)
SMALL_KDA, SMALL_FULL = _every_fourth(12)
LINEAR_KDA, LINEAR_FULL = _every_fourth(27)
K3_KDA, K3_FULL = _every_fourth(93)  # 92 and 93 are both MLA: 24 of 93 layers

_DEMO = ModelConfig(
    vocab_size=260,
    hidden_size=128,
    num_hidden_layers=8,
    intermediate_size=288,
    kda_layers=DEMO_KDA,
    full_attn_layers=DEMO_FULL,
    kda_num_heads=4,
    kda_head_dim=32,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    num_attention_heads=4,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    mla_use_output_gate=True,
)

PRESETS: dict[str, ModelConfig] = {
    # For tests and first experiments: 0.25 M parameters, bytes.
    "tiny": ModelConfig(
        vocab_size=260,
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=160,
        kda_layers=TINY_KDA,
        full_attn_layers=TINY_FULL,
        kda_num_heads=2,
        kda_head_dim=32,
        gate_lower_bound=-5.0,
        use_full_rank_gate=True,
        num_attention_heads=2,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        mla_use_output_gate=True,
    ),
    # Trained by `openkda demo` on two CPU cores in minutes: 1.7 M parameters, bytes.
    "demo": _DEMO,
    # Kimi K3 in miniature: 3.0 M parameters, bytes. As many active matrix weights a token as "demo": of a dense layer's
    # 3 * 128 * 288, latent projections, router, shared expert and four of sixteen experts of width 80.
    "k3-mini": _DEMO.replace(
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        attn_res_block_size=8,
        num_experts=16,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=80,
        routed_expert_hidden_size=64,
        latent_moe_use_norm=True,
        first_k_dense_replace=1,
    ),
    # For one GPU and an evening: 79.0 M parameters in the layers, and 25.2 M in an embedding of 32,768 tokens.
    "100m": ModelConfig(
        vocab_size=32768,
        hidden_size=768,
        num_hidden_layers=12,
        intermediate_size=1536,
        kda_layers=SMALL_KDA,
        full_attn_layers=SMALL_FULL,
        kda_num_heads=6,
        kda_head_dim=128,
        gate_lower_bound=-5.0,
        use_full_rank_gate=True,
        num_attention_heads=6,
        kv_lora_rank=256,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mla_use_output_gate=True,
        tie_word_embeddings=True,
    ),
    # 49.1 B parameters, 3.1 B active.
    "kimi-linear-48b": ModelConfig(
        vocab_size=163840,
        hidden_size=2304,
        num_hidden_layers=27,
        intermediate_size=9216,
        kda_layers=LINEAR_KDA,
        full_attn_layers=LINEAR_FULL,
        kda_num_heads=32,
        kda_head_dim=128,
        num_attention_heads=32,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        moe_intermediate_size=1024,
        routed_scaling_factor=2.446,
        first_k_dense_replace=1,
    ),
    # Text model: 2779.47 B parameters, 104.17 B active.
    "kimi-k3": ModelConfig(
        vocab_size=163840,
        hidden_size=7168,
        num_hidden_layers=93,
        intermediate_size=33792,
        kda_layers=K3_KDA,
        full_attn_layers=K3_FULL,
        kda_num_heads=96,
        kda_head_dim=128,
        gate_lower_bound=-5.0,
        use_full_rank_gate=True,
        num_attention_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mla_use_output_gate=True,
        mla_fp32_output=True,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        attn_res_block_size=12,
        num_experts=896,
        num_experts_per_token=16,
        num_shared_experts=2,
        moe_intermediate_size=3072,
        routed_expert_hidden_size=3584,
        latent_moe_use_norm=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
    ),
}


def named_config(name: str) -> ModelConfig:
    """The preset of that name, or what the config.json of that path says, ours or a published one (of its text model, experts
    not packed). ValueError for anything else."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, or a config.json, received {name!r}")
    try:
        fields = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, a key twice
        raise ValueError(f"preset: expected the JSON of a model config, received {name} ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"preset: expected the JSON of a model config, received {name}")
    if "text_config" in fields or "linear_attn_config" in fields:
        return from_published(fields).model.replace(vision=None, packed_experts=False)
    return ModelConfig.from_dict(fields)

"""A random checkpoint in a published layout, in miniature: for tests, and for those who build tools around the format."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from openkda.layers.moe import PackedMXFP4Experts, Router
from openkda.models.config import ModelConfig
from openkda.models.hybrid import HybridLM
from openkda.models.multimodal import MultimodalLM
from openkda.models.official import save_official
from openkda.models.official_names import official
from openkda.models.presets import _every_fourth
from openkda.models.vision_config import VisionConfig

SPECIAL_IDS = 4
"""The last ids of a miniature's vocabulary: begin, end, padding, image (the published ones lie near its end too)."""


def miniature(
    like: str,
    *,
    layers: int = 8,
    hidden: int = 256,
    heads: int = 4,
    head_dim: int = 32,
    experts: int = 8,
    experts_per_token: int = 2,
    vocab_size: int = 1024,
    vision_layers: int = 2,
) -> ModelConfig:
    """The config of "kimi-k3" or "kimi-linear-48b" with every feature kept and every size shrunk.

    layers: the last is MLA, as every fourth. hidden: a multiple of 64 (packed experts live on half of it, in blocks of 32).
    Raises: ValueError for sizes that the features cannot have.
    """
    whole = official(like).model
    sizes = {
        "layers": layers, "hidden": hidden, "heads": heads, "head_dim": head_dim, "experts": experts,
        "experts_per_token": experts_per_token, "vocab_size": vocab_size, "vision_layers": vision_layers,
    }  # fmt: skip
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: expected a positive integer, received {value!r}")
    if vocab_size < SPECIAL_IDS:
        raise ValueError(
            f"vocab_size: expected at least {SPECIAL_IDS} (the last ids mean something), received {vocab_size}"
        )
    if hidden % 64 or hidden < 64:
        raise ValueError(
            f"hidden: expected a multiple of 64 (experts live on half of it, in blocks of 32), received {hidden}"
        )
    kda, full = _every_fourth(layers)
    vision = None
    if whole.vision is not None:
        vision = VisionConfig(
            hidden_size=64, intermediate_size=128, num_attention_heads=2, num_hidden_layers=vision_layers, qkv_hidden_size=64,
            pos_emb_height=8, pos_emb_width=8, placeholder_id=vocab_size - 1,
        )  # fmt: skip
    return whole.replace(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=4 * hidden,
        kda_layers=kda,
        full_attn_layers=full,
        kda_num_heads=heads,
        kda_head_dim=head_dim,
        num_attention_heads=heads,
        q_lora_rank=None if whole.q_lora_rank is None else hidden // 4,
        kv_lora_rank=hidden // 4,
        qk_nope_head_dim=head_dim,
        qk_rope_head_dim=head_dim // 2,
        v_head_dim=head_dim,
        attn_res_block_size=None if whole.attn_res_block_size is None else max(1, layers // 2),
        num_experts=experts,
        num_experts_per_token=experts_per_token,
        moe_intermediate_size=hidden // 2,
        routed_expert_hidden_size=None if whole.routed_expert_hidden_size is None else hidden // 2,
        mla_fp32_output=False,
        vision=vision,
    )


@torch.no_grad()
def random_model(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> HybridLM | MultimodalLM:
    """A model of `config` with no tensor left trivial: norms near 1, router biases and pseudo-queries away from 0, and packed
    experts of any code."""
    model = HybridLM(config) if config.vision is None else MultimodalLM(config)
    model.init_weights(seed)
    g = torch.Generator().manual_seed(seed + 1)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.copy_(1 + 0.1 * torch.randn(p.shape, generator=g))
        elif "res_proj" in name:
            p.copy_(0.1 * torch.randn(p.shape, generator=g))
    for module in model.modules():
        if isinstance(module, Router):
            bias = module.e_score_correction_bias
            bias.copy_(0.1 * torch.randn(bias.shape, generator=g))
        elif isinstance(module, PackedMXFP4Experts):
            for name in ("w1", "w2", "w3"):
                codes, scale = module.matrix(name)
                codes.random_(0, 256, generator=g)
                scale.random_(118, 121, generator=g)  # elements of about 3 times 2^-8: like N(0, 0.02)
    return model.to(dtype).eval()


def make_checkpoint(
    out: str | Path,
    *,
    like: str = "kimi-k3",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    **sizes: int,
) -> ModelConfig:
    """Write a random checkpoint in the published layout of `like` ("kimi-k3" or "kimi-linear-48b") to directory `out`.

    sizes: those of `miniature` (layers, hidden, heads, head_dim, experts, experts_per_token, vocab_size, vision_layers).
    Returns: the config. Raises: ValueError for an impossible size, FileExistsError, OSError.
    """
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed: expected 0 to 2^63 - 1, received {seed!r}")
    config = miniature(like, **sizes)
    ids = {f"{name}_token_id": config.vocab_size - SPECIAL_IDS + i for i, name in enumerate(("bos", "eos", "pad"))}
    whole = official(like)
    stated = dataclasses.replace(
        whole, model=config, inert_text={**whole.inert_text, **ids}, inert_top={**whole.inert_top, **ids}
    )
    save_official(random_model(config, seed, dtype), out, kind=whole.kind, config=stated, overwrite=overwrite)
    return config

"""Every impossible config is refused with the field, what was expected and what came; the rest survives JSON."""

from __future__ import annotations

import json

import pytest

from openkda.models.config import ModelConfig
from openkda.models.presets import PRESETS

TINY = PRESETS["tiny"]
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kda_layers": (1, 2), "full_attn_layers": (4,)}, r"holes \[3\]"),
        ({"kda_layers": (1, 2, 3, 4)}, r"no layer in both, received \[4\]"),
        ({"kda_layers": (0, 1, 2, 3)}, r"outside \[0\]"),
        ({"kda_layers": (1, 2, 3, 5)}, r"outside \[5\]"),
        ({"kda_layers": (1, 2, 2, 3)}, r"doubled \[2\]"),
        ({"num_hidden_layers": 5}, r"1..5, each once, received holes \[5\]"),
        ({"kda_num_v_heads": 3}, "multiple of kda_num_heads = 2, received 3"),
        ({"hidden_size": 0}, "hidden_size: expected a positive integer, received 0"),
        ({"hidden_size": 64.0}, "hidden_size: expected a positive integer, received 64.0"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"kda_head_dim": -1}, "kda_head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"qk_rope_head_dim": -1}, "0 or more, received -1"),
        ({"short_conv_kernel_size": 5}, "2, 3 or 4, received 5"),
        ({"gate_lower_bound": 0.0}, r"\[-5, 0\)"),
        ({"gate_lower_bound": -5.1}, r"\[-5, 0\)"),
        ({"gate_lower_bound": float("nan")}, r"\[-5, 0\)"),
        ({"hidden_act": "gelu"}, "'silu' or 'situ', received 'gelu'"),
        ({"attn_res_block_size": 0}, "attn_res_block_size"),
        ({"num_experts": 4}, "moe_intermediate_size"),
        ({**EXPERTS, "num_experts_per_token": 5}, r"1..num_experts = 4, received 5"),
        ({**EXPERTS, "num_experts_per_token": 0}, "num_experts_per_token"),
        ({**EXPERTS, "num_shared_experts": -1}, "num_shared_experts"),
        ({**EXPERTS, "first_k_dense_replace": 5}, r"0..4, received 5"),
    ],
)
def test_impossible_configs(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match="model config: .*" + message):
        TINY.replace(**change)


@pytest.mark.parametrize("name", PRESETS)
def test_json_and_back(name: str) -> None:
    config = PRESETS[name]
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_and_missing_keys_are_named() -> None:
    fields = {**TINY.to_dict(), "rope_theta": 1e4}
    del fields["hidden_size"], fields["kda_layers"]
    with pytest.raises(
        ValueError, match=r"unknown keys \['rope_theta'\], missing keys \['hidden_size', 'kda_layers'\]"
    ):
        ModelConfig.from_dict(fields)

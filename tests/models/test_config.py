"""Every impossible config is refused with the field, what was expected and what came; the rest survives JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from openkda.models.config import ModelConfig
from openkda.models.hybrid import HybridLM
from openkda.models.presets import PRESETS, named_config
from openkda.models.vision_config import VisionConfig

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
        ({"gate_lower_bound": float("nan")}, "gate_lower_bound: expected a finite number or null, received nan"),
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


# Values as a hand-edited or hostile config.json may hold them.
WRONG = {
    "bool": ["no", 1, 0.0, None, [], {}],
    "float": ["x", True, None, [], {}, float("nan"), float("inf"), -float("inf"), 10**400],
    "int": ["x", True, None, 1.5, [], {}, 1 << 31, -(1 << 40), 10**30, float("nan")],
    "str": [1, True, None, [], {}],
    "tuple[int, ...]": [3, "1,2", None, {}, ["a"], [1.0], [True], [None], [[1]], [10**30]],
    "VisionConfig": ["x", 1, True, [], {"foo": 1}, {"merge_kernel": 2}, {"norm_eps": "x"}, {"placeholder_id": 0.5}],
    "ScaleRule": ["up", 1, True, [], {}],
}


@pytest.mark.parametrize("field", dataclasses.fields(ModelConfig), ids=lambda f: f.name)
def test_a_value_of_another_type_is_refused_by_name(field: dataclasses.Field) -> None:
    kind, optional = str(field.type).removesuffix(" | None"), str(field.type).endswith(" | None")
    for value in WRONG[kind]:
        if value is None and optional:
            continue
        with pytest.raises(ValueError, match=f"config: {field.name}|vision"):
            ModelConfig.from_dict({**TINY.to_dict(), field.name: value})


@pytest.mark.parametrize(
    "field", [f for f in dataclasses.fields(ModelConfig) if "int" in str(f.type)], ids=lambda f: f.name
)
def test_absurd_sizes_are_refused_or_build_shapes_at_once(field: dataclasses.Field) -> None:
    """The largest value that the type allows: no hang, no memory, no overflow out of torch."""
    value = [2**31 - 1] if "tuple" in str(field.type) else 2**31 - 1
    try:
        config = ModelConfig.from_dict({**TINY.to_dict(), field.name: value})
    except ValueError as error:
        assert "model config: " in str(error)
        return
    with torch.device("meta"):
        HybridLM(config)


@pytest.mark.parametrize("name", ["rms_norm_eps", "mla_norm_eps", "initializer_range"])
def test_negative_where_a_root_or_a_width_follows(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected 0 or more, received -1"):
        TINY.replace(**{name: -1.0})


@pytest.mark.parametrize("name", ["activation_situ_beta", "activation_situ_linear_beta"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_bounds_of_an_activation_are_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"model config: {name}: expected a positive number or null, received {value}"):
        TINY.replace(hidden_act="situ", **{name: value})


@pytest.mark.parametrize("name", ["placeholder_id", "norm_eps", "projector_eps", "initializer_range"])
def test_negative_values_of_the_tower(name: str) -> None:
    with pytest.raises(ValueError, match=f"vision config: {name}: expected .*, received -1"):
        VisionConfig(**{name: -1})


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY.to_dict())[:-1] + ', "hidden_size": 128}')
    with pytest.raises(ValueError, match=r"config\.json \(keys that stand there twice: hidden_size\)"):
        named_config(str(path))

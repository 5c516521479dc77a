"""The published config.json both ways, and the inventory of tensors that follows from it."""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from openkda.models.inspect import count_parameters
from openkda.models.official_config import OfficialConfig, from_published, to_published
from openkda.models.official_names import (
    a_log_form,
    inventory,
    official,
    shard_count,
    shard_file,
    shard_of,
)
from openkda.models.presets import PRESETS

# The released config.json and tensor index of Kimi K3, where somebody has put them.
DATA = Path(os.environ.get("OPENKDA_K3_DATA") or Path(__file__).parents[3] / "shared" / "data" / "k3")
needs_data = pytest.mark.skipif(
    not (DATA / "config.json").is_file(), reason="no released Kimi K3 index here (OPENKDA_K3_DATA)"
)

# Kimi-Linear-48B-A3B-Instruct, revision e1df551a: the keys that say anything.
LINEAR_48B = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
    "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "rope_scaling": None, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "linear_attn_config": {
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    },
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 2.446,
    "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0, "model_max_length": 1048576, "bos_token_id": 163584, "eos_token_id": 163586,
    "pad_token_id": 163839, "tie_word_embeddings": False, "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip

# Three KDA layers and an MLA layer of a small public model of the K3 family: full-rank output gate, softplus forget gate.
MIXED = {
    **LINEAR_48B, "num_hidden_layers": 2, "num_experts": None,
    "linear_attn_config": {
        "head_dim": 32, "num_heads": 8, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": [2],
        "use_full_rank_gate": True,
    },
}  # fmt: skip


def test_kimi_linear_both_ways() -> None:
    got = from_published(LINEAR_48B)
    assert got.kind == "kimi_linear" and got.model == PRESETS["kimi-linear-48b"]
    assert to_published(got) == LINEAR_48B
    fresh = to_published(official("kimi-linear-48b"))
    assert from_published(fresh).model == got.model
    assert {k for k, v in fresh.items() if LINEAR_48B.get(k, v) != v} == set()


@needs_data
def test_kimi_k3_both_ways() -> None:
    config = json.loads((DATA / "config.json").read_text())
    got = from_published(config)
    assert got.kind == "kimi_k3" and got.model == official("kimi-k3").model.replace(mla_fp32_output=False)
    assert to_published(got) == config


def test_features_are_read_from_their_own_keys() -> None:
    """A full-rank output gate without a bounded forget gate exists in the wild: neither is inferred from the other."""
    got = from_published(MIXED).model
    assert got.use_full_rank_gate and got.gate_lower_bound is None and got.num_experts is None
    bounded = {**MIXED, "linear_attn_config": {**MIXED["linear_attn_config"], "gate_lower_bound": -3.0}}
    assert from_published(bounded).model.gate_lower_bound == -3.0
    assert to_published(from_published(MIXED)) == MIXED


def test_every_fault_is_listed_at_once() -> None:
    config = copy.deepcopy(LINEAR_48B)
    del config["kv_lora_rank"], config["linear_attn_config"]["num_heads"]
    config |= {
        "kv_lora_rnak": 512,
        "mla_use_nope": False,
        "num_key_value_heads": 8,
        "moe_router_activation_func": "softmax",
    }
    config["linear_attn_config"]["gate_bound"] = -5
    with pytest.raises(ValueError) as error:
        from_published(config)
    for part in (
        "missing: kv_lora_rank, linear_attn_config.num_heads", "kv_lora_rnak", "linear_attn_config.gate_bound",
        "mla_use_nope: expected True, found False", "num_key_value_heads: expected 32, found 8",
        "moe_router_activation_func: expected 'sigmoid', found 'softmax'",
    ):  # fmt: skip
        assert part in str(error.value)


def test_faults_of_the_multimodal_file() -> None:
    good = to_published(official("kimi-k3"))
    assert from_published(good).model == official("kimi-k3").model.replace(mla_fp32_output=False)
    bad = copy.deepcopy(good)
    bad["tie_word_embeddings"] = True
    bad["vision_config"] |= {"text_hidden_size": 4096, "norm_type": "layernorm", "zoom": 2}
    bad["text_config"]["quantization_config"]["format"] = "nvfp4"
    del bad["vision_config"]["patch_size"]
    with pytest.raises(ValueError) as error:
        from_published(bad)
    for part in (
        "tie_word_embeddings: True at the top, False in text_config", "vision_config.patch_size", "vision_config.zoom",
        "vision_config.text_hidden_size: expected 7168, found 4096", "norm_type: expected 'rmsnorm'",
        "quantization_config.format: expected 'mxfp4-pack-quantized', found 'nvfp4'",
    ):  # fmt: skip
        assert part in str(error.value)
    for value in (None, [], "x"):
        with pytest.raises(ValueError, match="vision_config: expected a JSON object beside text_config, found"):
            from_published({**good, "vision_config": value})
    with pytest.raises(ValueError, match="not a Kimi Linear or Kimi K3 model"):
        from_published({"model_type": "llama"})
    with pytest.raises(ValueError, match="saved by transformers' own kimi_linear"):
        from_published({"model_type": "kimi_linear", "linear_num_heads": 2, "layer_types": ["linear_attention"]})


def test_a_file_written_by_transformers_5() -> None:
    """As the public 0.4 B miniature of Kimi K3 has it: its boilerplate in every part, rotary keys beside mla_use_nope, no lower
    bound of the gate, no attention implementation. Such a file was refused for keys that choose nothing."""
    boilerplate = {
        "_name_or_path": "", "architectures": None, "chunk_size_feed_forward": 0, "dtype": None, "id2label": {"0": "LABEL_0"},
        "is_encoder_decoder": False, "label2id": {"LABEL_0": 0}, "output_attentions": False, "output_hidden_states": False,
        "problem_type": None, "return_dict": True,
    }  # fmt: skip
    config = to_published(official("kimi-k3"))
    del config["tie_word_embeddings"], config["vision_config"]["_attn_implementation"]
    del config["text_config"]["linear_attn_config"]["gate_lower_bound"]
    config |= {"use_cache": False, "transformers_version": "5.15.0.dev0", "auto_map": {"AutoConfig": "x.Y"}}
    config["text_config"] |= {
        **boilerplate,
        "rope_theta": 1e4,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    }
    config["vision_config"] |= {**boilerplate, "model_type": ""}
    got = from_published(config)
    assert got.model.gate_lower_bound is None and got.model.use_full_rank_gate
    assert to_published(got) == config
    for part in (config, config["text_config"], config["vision_config"]):
        part["zoom"] = 1
    with pytest.raises(ValueError, match=r"unknown: zoom, vision_config\.zoom, zoom"):
        from_published(config)


def test_a_model_that_would_rotate_is_refused() -> None:
    config = to_published(official("kimi-linear-48b"))
    del config["mla_use_nope"]
    with pytest.raises(ValueError, match="missing: mla_use_nope"):
        from_published(config)


@pytest.mark.parametrize(
    "path, value",
    [
        (("kv_cache_scheme",), {"num_bits": 8, "type": "float"}),
        (("config_groups", "group_0", "weights", "group_size"), 16),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}),
        (("sparsity_config",), {"format": "dense"}),
    ],
)
def test_no_part_of_the_quantisation_entry_is_dropped(path: tuple[str, ...], value: object) -> None:
    config = to_published(official("kimi-k3"))
    place = config["text_config"]["quantization_config"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=rf"quantization_config\.{'.'.join(path)}: expected"):
        from_published(config)
    other = to_published(official("kimi-k3"))
    other["text_config"]["quantization_config"]["ignore"].append("re:.*gate.*")
    assert to_published(from_published(other)) == other


def test_what_the_format_cannot_say_is_refused() -> None:
    grouped = PRESETS["kimi-linear-48b"].replace(kda_num_v_heads=64, mla_norm_eps=1e-5)
    with pytest.raises(ValueError, match=r"kimi_linear cannot say: \['kda_num_v_heads', 'mla_norm_eps'\]"):
        to_published(OfficialConfig(grouped, "kimi_linear"))
    with pytest.raises(ValueError, match=r"cannot say: \['vision'\]"):
        to_published(OfficialConfig(PRESETS["kimi-k3"], "kimi_k3"))


@pytest.fixture(scope="module")
def k3():
    return inventory(official("kimi-k3"))


def test_inventory_of_kimi_k3(k3) -> None:
    assert len(k3) == len({t.name for t in k3}) == 497_220
    assert sum(t.nbytes for t in k3) == 1_560_860_324_864
    assert len({re.sub(r"\d+", "N", t.name) for t in k3}) >= 50
    text = sum(t.parameters for t in k3 if t.name.startswith("language_model."))
    assert round(sum(count_parameters(PRESETS["kimi-k3"]).values()) / 1e9, 3) == round(text / 1e9, 3)
    towers = [sum(t.parameters for t in k3 if t.name.startswith(p)) for p in ("vision_tower.", "mm_projector.")]
    assert [round(n / 1e6) for n in towers] == [401, 46]
    kinds = Counter(t.dtype for t in k3)
    assert kinds[torch.uint8] == 2 * 92 * 896 * 3 and kinds[torch.float32] == 69 * 6 + 92


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        ("layers.0.self_attn.A_log", (128,), torch.float32),
        ("layers.0.self_attn.q_conv1d.weight", (12288, 1, 4), torch.float32),
        ("layers.0.mlp.gate_proj.weight", (33792, 7168), torch.bfloat16),
        ("layers.1.block_sparse_moe.gate.e_score_correction_bias", (896,), torch.float32),
        ("layers.1.block_sparse_moe.routed_expert_down_proj.weight", (3584, 7168), torch.bfloat16),
        ("layers.92.block_sparse_moe.experts.895.w1.weight_packed", (3072, 1792), torch.uint8),
        ("layers.92.block_sparse_moe.experts.895.w2.weight_scale", (3584, 96), torch.uint8),
        ("layers.5.mlp_res_proj.weight", (1, 7168), torch.bfloat16),
        ("output_attn_res_norm.weight", (7168,), torch.bfloat16),
    ],
)
def test_single_tensors_of_kimi_k3(k3, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = {t.name: t for t in k3}[f"language_model.model.{name}"]
    assert (found.shape, found.dtype) == (shape, dtype)


@needs_data
def test_inventory_equals_the_released_index(k3) -> None:
    """Name by name, shard by shard, byte by byte."""
    index = json.loads(gzip.decompress((DATA / "model.safetensors.index.json.gz").read_bytes()))
    count = shard_count(official("kimi-k3"))
    assert {t.name: shard_file(shard_of(t.name, 93), count) for t in k3} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in k3)


def test_inventory_of_kimi_linear() -> None:
    tensors = {t.name: t for t in inventory(official("kimi-linear-48b"))}
    want = {
        "model.layers.0.self_attn.A_log": (1, 1, 32, 1),
        "model.layers.0.self_attn.g_a_proj.weight": (128, 2304),
        "model.layers.0.self_attn.g_b_proj.weight": (4096, 128),
        "model.layers.3.self_attn.q_proj.weight": (6144, 2304),
        "model.layers.3.self_attn.kv_b_proj.weight": (8192, 512),
        "model.layers.1.block_sparse_moe.experts.255.w2.weight": (2304, 1024),
        "model.layers.1.block_sparse_moe.shared_experts.down_proj.weight": (2304, 1024),
        "model.layers.0.mlp.up_proj.weight": (9216, 2304),
        "lm_head.weight": (163840, 2304),
    }
    assert {name: tensors[name].shape for name in want} == want
    assert round(sum(t.parameters for t in tensors.values()) / 1e9, 1) == 49.1
    per_kda, per_mla, per_moe = 15, 5, 2 + 3 + 256 * 3
    assert len(tensors) == 20 * per_kda + 7 * per_mla + 26 * per_moe + 3 + 2 * 27 + 3


def test_forms_of_a_log() -> None:
    assert [a_log_form(s, 96) for s in ((96,), (128,), (1, 1, 96, 1), (95,), (256,))] == [
        "heads", "padded", "broadcast", None, None,
    ]  # fmt: skip

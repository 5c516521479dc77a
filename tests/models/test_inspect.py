"""The report against the modules it describes, the states they return, and the published figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from openkda.models.checkpoint import save_checkpoint
from openkda.models.hybrid import HybridLM
from openkda.models.inspect import describe
from openkda.models.presets import PRESETS

TINY = PRESETS["tiny"]
CONFIGS = {
    "tiny": TINY,
    "demo": PRESETS["demo"],
    "low-rank": TINY.replace(q_lora_rank=24, use_full_rank_gate=False, mla_use_output_gate=False),
    "grouped": TINY.replace(kda_num_v_heads=6, kda_v_head_dim=24, short_conv_kernel_size=2, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_those_of_the_modules(name: str) -> None:
    with torch.device("meta"):
        model = HybridLM(CONFIGS[name])
    report = describe(CONFIGS[name])
    assert report.total_parameters == model.num_parameters()
    for row, layer in zip(report.layers, model.model.layers, strict=True):
        assert row.parameters == sum(p.numel() for p in layer.parameters())
        assert row.attention == ("KDA" if hasattr(layer.self_attn, "A_log") else "MLA")
    vectors = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 1 or "conv1d" in n)
    assert report.parameters["vectors"] == vectors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_state_bytes_are_those_of_the_states(name: str, dtype: torch.dtype) -> None:
    model, report = HybridLM(CONFIGS[name]).to(dtype), describe(CONFIGS[name], dtype=dtype)
    for length in (1, 50):
        state = model(torch.zeros(2, length, dtype=torch.long), return_state=True).state
        assert sum(layer.nbytes for layer in state) == 2 * report.state_bytes(length)


def test_published_sizes_of_kimi_k3() -> None:
    r = describe("kimi-k3")
    billions = {kind: round(count / 1e9, 3) for kind, count in r.parameters.items()}
    assert billions["KDA"] == 30.607 and billions["MLA"] == 5.573
    assert billions["routed experts"] == 2722.741 and billions["shared experts"] == 12.155
    assert billions["latent projections"] == 4.727 and billions["routers"] == 0.591
    assert (
        billions["dense MLP"] == 0.727 and round((r.parameters["embedding"] + r.parameters["head"]) / 1e9, 3) == 2.349
    )
    assert round(r.matrix_parameters / 1e9, 2) == 2779.47
    assert round(r.active_parameters / 1e9, 2) == 104.17
    assert r.constant_bytes == 69 * (96 * 128 * 128 * 4 + 3 * 36864 * 2)
    assert r.bytes_per_token == 24 * 576 * 2 == 27648
    assert (len(r.layers), sum(row.mlp == "dense" for row in r.layers)) == (93, 1)


def test_published_sizes_of_kimi_linear() -> None:
    r = describe("kimi-linear-48b")
    assert round(r.total_parameters / 1e9, 1) == 49.1
    assert round(r.active_parameters / 1e9, 1) == 3.1
    assert round(20 * 32 * 128 * 128 * 4 / 1e6, 1) == 41.9 and r.bytes_per_token == 8064
    assert r.constant_bytes == 20 * (32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2)


def test_full_attention_of_the_same_size() -> None:
    r = describe("demo", dtype=torch.float32)
    assert r.full_attention_bytes_per_token == 8 * 2 * 4 * 32 * 4  # layers, K and V, heads, head dim, bytes
    assert r.latent_attention_bytes_per_token == 8 * (64 + 16) * 4
    assert r.full_attention_bytes(1000) == 1000 * r.full_attention_bytes_per_token
    assert r.state_bytes(0) == r.constant_bytes and r.bytes_per_token * 4 == r.latent_attention_bytes_per_token


def test_checkpoints_and_names(tmp_path: Path) -> None:
    save_checkpoint(HybridLM(TINY).bfloat16(), tmp_path / "c")
    assert describe(tmp_path / "c") == describe("tiny", dtype=torch.bfloat16)
    save_checkpoint(HybridLM(TINY), tmp_path / "c")
    assert describe(str(tmp_path / "c")).dtype == torch.float32
    with pytest.raises(ValueError, match=r"kimi-k3.*received kimi-k4"):
        describe("kimi-k4")
    assert describe(tmp_path / "c" / "config.json", dtype=torch.float32) == describe(tmp_path / "c")
    (tmp_path / "c" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        describe(tmp_path / "c")

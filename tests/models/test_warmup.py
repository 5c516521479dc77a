"""Compiling ahead: every kind of call is made, on the device asked for."""

from __future__ import annotations

import pytest
import torch

from openkda.layers.kda import KimiDeltaAttention
from openkda.models.hybrid import HybridLM
from openkda.models.presets import PRESETS
from openkda.models.warmup import warmup


def test_makes_every_kind_of_call() -> None:
    steps = [name for name, seconds in warmup(PRESETS["tiny"], device="cpu", dtype=torch.float32) if seconds >= 0]
    wanted = {
        "prefill",
        "continued prefill",
        "packed prefill",
        "decoding",
        "decoding in a pool",
        "drafted tokens in a pool",
    }
    assert wanted <= set(steps)


K3 = PRESETS["kimi-k3"].replace(
    hidden_size=96, kda_num_heads=2, num_attention_heads=2, num_experts=8, num_experts_per_token=2, num_hidden_layers=8,
    moe_intermediate_size=64, routed_expert_hidden_size=64, q_lora_rank=32, intermediate_size=96, vocab_size=64,
    kda_layers=(1, 2, 3, 5, 6, 7), full_attn_layers=(4, 8), attn_res_block_size=3, mla_fp32_output=False, vision=None,
)  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_layers_of_kimi_k3(packed: bool) -> None:
    config = K3.replace(packed_experts=packed)
    steps = [name for name, _ in warmup(config, device="cpu", dtype=torch.float32)]
    assert "decoding of latent attention" in steps and "experts, 1 tokens" in steps and "norm of experts" in steps
    assert [s for s in steps if s.startswith("Attention Residuals")][-1] == "Attention Residuals, 4 sources"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True])
def test_a_model_has_nothing_left_to_compile(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and decoding steps of a whole Kimi K3 in miniature."""
    pytest.importorskip("triton")
    from triton import knobs

    config = K3.replace(packed_experts=packed)
    warmup(config)
    compiled: list[object] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about["repr"]))
    model = HybridLM(config).to("cuda", torch.bfloat16).eval()
    with torch.inference_mode():
        for rows, length in ((1, 70), (5, 30)):
            ids = torch.randint(0, 64, (rows, length), device="cuda")
            out = model(ids, return_state=True)
            for _ in range(2):
                out = model(ids[:, :1], state=out.state, return_state=True)
    assert not compiled


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="CUDA"):
        warmup(PRESETS["tiny"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [4, 96])
def test_nothing_is_left_to_compile(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill of other lengths, batches and packs, from nothing and continued, and decoding, after it (of the KDA layers; of a
    whole Kimi K3 in miniature above)."""
    pytest.importorskip("triton")
    from triton import knobs

    from openkda.ops.triton import ahead

    monkeypatch.setattr(ahead, "ENABLED", True)  # sizes choose between kernels
    config = PRESETS["kimi-k3"].replace(
        kda_num_heads=heads, hidden_size=64, num_hidden_layers=1, kda_layers=(1,), full_attn_layers=(), num_experts=None,
        attn_res_block_size=None,
    )  # fmt: skip
    warmup(config)
    compiled: list[object] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about["repr"]))
    layer = KimiDeltaAttention(config, 0).to("cuda", torch.bfloat16).eval()
    with torch.inference_mode():
        for B, T in ((1, 300), (2, 100), (1, 40)):
            x = torch.randn(B, T, 64, device="cuda", dtype=torch.bfloat16)
            _, state = layer(x, return_state=True)
            _, state = layer(x, state=state, return_state=True)
            layer(x[:, :1], state=state, return_state=True)
        for lengths in ((7, 0, 90), (1,) * 16):
            cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)
            x = torch.randn(1, sum(lengths), 64, device="cuda", dtype=torch.bfloat16)
            _, state = layer(x, cu_seqlens=cu, return_state=True)
            layer(x, cu_seqlens=cu, state=state, return_state=True)
    assert not compiled

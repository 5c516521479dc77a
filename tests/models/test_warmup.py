"""Compiling ahead: every kind of call is made, on the device asked for."""

from __future__ import annotations

import pytest
import torch

from openkda.layers.kda import KimiDeltaAttention
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="CUDA"):
        warmup(PRESETS["tiny"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [4, 96])
def test_nothing_is_left_to_compile(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill of other lengths, batches and packs, from nothing and continued, and decoding, after it."""
    pytest.importorskip("triton")
    from triton import knobs

    config = PRESETS["kimi-k3"].replace(kda_num_heads=heads, hidden_size=64)
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

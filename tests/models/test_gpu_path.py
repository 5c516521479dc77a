"""The way to every kernel of a model on a GPU, walked without one: meta tensors that say they are CUDA, launches counted.

Nothing is computed. What this finds is host code that does not run: a name that is not what it was, a rule without a shape, a
gradient of the wrong dtype.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from openkda.models.config import ModelConfig
from openkda.models.hybrid import HybridLM
from openkda.models.presets import PRESETS
from openkda.ops.mla import packed

SMALL = PRESETS["tiny"].replace(kda_head_dim=128, kda_num_heads=2, hidden_size=256)
CONFIGS = {
    "bounded": SMALL,
    "softplus, situ": SMALL.replace(
        gate_lower_bound=None, hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0
    ),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Names of the kernels that would have been launched, and how often."""
    counts: Counter[str] = Counter()

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        counts[self.__name__] += 1

    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        return (q * k)[..., : v.shape[-1]] * v

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: [64] * self.numel())  # the longest of a pack
    monkeypatch.setattr(packed, "_varlen_attn", lambda: attend)
    return counts


def build(config: ModelConfig) -> tuple[HybridLM, Tensor, Tensor]:
    with torch.device("meta"):
        model = HybridLM(config).to(torch.bfloat16)
        return model, torch.empty(1, 256, dtype=torch.int64), torch.empty(5, dtype=torch.int32)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pack", [False, True])
def test_training(name: str, pack: bool, launched: Counter[str]) -> None:
    """Twice, because a second call may take another way than the first."""
    model, ids, cu = build(CONFIGS[name])
    for _ in range(2):
        loss = model(ids, cu_seqlens=cu if pack else None, targets=ids).loss
        loss.backward()
        for n, p in model.named_parameters():
            assert p.grad is not None and p.grad.dtype == p.dtype and p.grad.shape == p.shape, n
            p.grad = None
    assert launched["gradients_kernel"] == 2 * len(CONFIGS[name].kda_layers)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_evaluation(name: str, launched: Counter[str]) -> None:
    """Without gradients the kernels are launched directly, not through torch's operators."""
    model, ids, cu = build(CONFIGS[name])
    model.eval()
    for _ in range(2):
        model(ids, cu_seqlens=cu, targets=ids)
        model(ids)
    layers = CONFIGS[name].num_hidden_layers
    gates = layers + len(CONFIGS[name].full_attn_layers) * CONFIGS[name].mla_use_output_gate
    assert launched["glu_kernel"] == 4 * gates and launched["norm_kernel"] > 8 * layers and launched["conv_kernel"]


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_decoding_kimi_k3(packed: bool, launched: Counter[str]) -> None:
    """A step of experts and latent attention is a fixed number of launches, whatever the tokens choose."""
    config = SMALL.replace(
        attn_res_block_size=2, q_lora_rank=24, num_experts=4, num_experts_per_token=2, num_shared_experts=1,
        moe_intermediate_size=32, routed_expert_hidden_size=32, latent_moe_use_norm=True, first_k_dense_replace=1,
        hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0, packed_experts=packed,
    )  # fmt: skip
    model, ids, _ = build(config)
    model.eval()
    state = model(ids[:, :64], return_state=True).state
    for _ in range(2):
        launched.clear()
        state = model(ids[:, :1], state=state, return_state=True).state
        for kernel in ("logits", "choose", "order", "gate_up", "down", "combine"):
            assert launched[f"{kernel}_kernel"] == 3, kernel
        assert launched["block_kernel"] == 3 and launched["part_kernel"] == launched["sum_kernel"] == 1

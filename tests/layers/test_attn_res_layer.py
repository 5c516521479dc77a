"""Attention Residuals in the model: which sources each sublayer reads, against a literal loop, and the two-phase path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from openkda.layers import attn_res
from openkda.layers.attn_res import PseudoQuery
from openkda.models.config import ModelConfig
from openkda.models.hybrid import HybridLM, HybridModel
from openkda.ops.attn_res.api import attn_res_mix
from openkda.testing.compare import check_close

EPS = 1e-5


def config(layers: int, block: int | None) -> ModelConfig:
    return ModelConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=layers, intermediate_size=8, kda_layers=(),
        full_attn_layers=tuple(range(1, layers + 1)), kda_num_heads=1, kda_head_dim=8, num_attention_heads=1, kv_lora_rank=8,
        qk_nope_head_dim=8, qk_rope_head_dim=0, v_head_dim=8, attn_res_block_size=block, initializer_range=0.5,
    )  # fmt: skip


class Stub(nn.Module):
    """Stands for a sublayer: a fixed elementwise map, so that 93 layers cost nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.factor = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor, **_: object):
        self.inputs.append(x)
        return torch.tanh(x * self.factor)


class StubAttention(Stub):
    def forward(self, x: Tensor, **_: object):
        return super().forward(x), None


def stubbed(layers: int, block: int) -> HybridModel:
    model = HybridModel(config(layers, block))
    for i, layer in enumerate(model.layers):
        layer.self_attn, layer.mlp = StubAttention(2 * i), Stub(2 * i + 1)
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    return model


def literal(model: HybridModel, ids: Tensor, block: int) -> tuple[Tensor, list[int]]:
    """The published loop, over a list; and how many sources each read had."""
    counts: list[int] = []

    def mix(sources: list[Tensor], norm: nn.Module, proj: nn.Module) -> Tensor:
        counts.append(len(sources))
        return attn_res_mix(sources, norm.weight * proj.weight[0], EPS)

    bank: list[Tensor] = []
    p: Tensor | None = model.embed_tokens(ids)
    for i, layer in enumerate(model.layers):
        h = mix([*bank, p], layer.self_attention_res_norm, layer.self_attention_res_proj) if bank else p
        if i % block == 0:
            bank.append(p)
            p = None
        a = layer.self_attn(layer.input_layernorm(h))[0]
        p = a if p is None else p + a
        h = mix([*bank, p], layer.mlp_res_norm, layer.mlp_res_proj)
        p = p + layer.mlp(layer.post_attention_layernorm(h))
    return model.norm(mix([*bank, p], model.output_attn_res_norm, model.output_attn_res_proj)), counts


@pytest.mark.parametrize("layers", [1, 11, 12, 13, 93])
def test_bit_equal_to_the_literal_loop(layers: int) -> None:
    model, ids = stubbed(layers, 12), torch.arange(10).view(2, 5)
    got = model(ids, state=None, cu_seqlens=None, return_state=False)[0]
    want, counts = literal(model, ids, 12)
    assert torch.equal(got, want)
    # The embedding, the finished blocks, and the running sum: floor((L - 1) / 12) + 2 at the output.
    assert counts[-1] == (layers - 1) // 12 + 2
    reads = [0, *counts[:-1]]  # layer 0 reads the embedding alone
    for i in range(layers):
        assert reads[2 * i] == (0 if i == 0 else (i - 1) // 12 + 2)
        assert reads[2 * i + 1] == i // 12 + 2


@pytest.mark.parametrize("layers", [1, 12, 13, 93])
@torch.no_grad()
def test_two_phase_path_equals_the_loop(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = stubbed(layers, 12), torch.arange(10).view(2, 5)
    for stub in (m for m in model.modules() if isinstance(m, Stub)):
        stub.double()
        stub.factor = stub.factor.double()
    model.double()
    merges = []
    real = attn_res.attn_res_merge
    monkeypatch.setattr(attn_res, "attn_res_merge", lambda *a: merges.append(a[1]) or real(*a))
    got = model(ids, state=None, cu_seqlens=None, return_state=False)[0]
    assert len(merges) == 2 * layers, "every read but layer 0's goes through phase two"
    check_close("h", got, literal(model, ids, 12)[0], 1e-12)


def test_plain_residuals_have_no_bank() -> None:
    model = HybridModel(config(3, None))
    assert not any("res_" in name for name, _ in model.named_parameters())


def test_pseudo_queries_start_at_zero_however_the_model_is_built() -> None:
    fresh = HybridLM(config(3, 2))
    seeded = HybridLM(config(3, 2))
    seeded.init_weights(5)
    with torch.device("meta"):
        meta = HybridLM(config(3, 2))
    meta.to_empty(device="cpu")
    for p in meta.parameters():
        nn.init.constant_(p, float("nan"))
    meta.init_weights(5)
    for model in (fresh, seeded, meta):
        queries = [m for m in model.modules() if isinstance(m, PseudoQuery)]
        assert len(queries) == 7 and not any(bool(q.weight.any()) for q in queries)


def test_gradients_reach_every_pseudo_query_at_step_one() -> None:
    model = HybridLM(config(5, 2))
    model.init_weights(0)
    model(torch.arange(10).view(2, 5)).logits.square().sum().backward()
    for name, p in model.named_parameters():
        if "res_proj" in name and "layers.0.self_attention" not in name:
            assert p.grad is not None and bool((p.grad != 0).all()), name
    unused = model.model.layers[0].self_attention_res_proj.weight  # published, though layer 0 has nothing to mix
    assert unused.grad is None

"""The whole model on a GPU, as training runs it: bfloat16 autocast, packs, recomputation, one graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openkda.models.config import ModelConfig
from openkda.models.hybrid import HybridLM
from openkda.models.presets import PRESETS
from openkda.testing.compare import rel
from openkda.training.batches import Batch
from openkda.training.evaluate import token_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16, F32 = torch.bfloat16, torch.float32
CONFIG = PRESETS["tiny"]
K3 = CONFIG.replace(
    attn_res_block_size=2, q_lora_rank=24, num_experts=4, num_experts_per_token=2, num_shared_experts=1,
    moe_intermediate_size=32, routed_expert_hidden_size=32, latent_moe_use_norm=True, first_k_dense_replace=1,
    hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
)  # fmt: skip
LENGTHS = (70, 1, 129, 56)
both = pytest.mark.parametrize("config", [CONFIG, K3], ids=["hybrid", "k3"])


def build(device: str = "cuda", config: ModelConfig = CONFIG) -> HybridLM:
    model = HybridLM(config)
    model.init_weights(0)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.arange(bias.numel()))  # no rounding sends a token to another expert
    return model.to(device).train()


def batch(lengths: tuple[int, ...] = LENGTHS) -> Batch:
    gen = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CONFIG.vocab_size, (1, sum(lengths) + 1), generator=gen)
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(ids[:, :-1], ids[:, 1:], cu)


def gradients(model: HybridLM, b: Batch, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = token_loss(model, b.to(next(model.parameters()).device), dtype=dtype)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@both
def test_the_kernels_give_the_gradients_of_the_cpu(config: ModelConfig) -> None:
    """A pack: in float32 those of the plain torch path, in bfloat16 within its roundings."""
    loss, want = gradients(build("cpu", config), batch(), F32)
    for dtype, limit in ((F32, 1e-3), (BF16, 5e-2)):
        close, got = gradients(build("cuda", config), batch(), dtype)
        assert abs(close - loss) < 0.1 * limit * loss
        whole = max(g.norm().item() for g in want.values())
        for n, g in want.items():
            assert (got[n].cpu() - g).norm().item() < limit * max(g.norm().item(), 1e-2 * whole), (n, dtype)


@both
def test_a_step_repeats_to_the_bit(config: ModelConfig) -> None:
    """Forward and backward of every layer, twice: no float atomics anywhere on the way."""
    runs = [gradients(build("cuda", config), batch(), BF16) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    different = [n for n, g in runs[0][1].items() if not torch.equal(g, runs[1][1][n])]
    assert set(different) <= {"model.embed_tokens.weight"}, (
        different
    )  # torch's own scatter of the embedding adds atomically


@both
def test_a_step_on_dirty_memory(config: ModelConfig) -> None:
    """Of heads with Hopper kernels: steps on fresh memory, and on memory that the allocator hands out full of NaN, 1e30 or ones
    (NaN in any float), agree to the bit; the first calls are looked at, the second recorded, later ones repeated."""
    config = config.replace(kda_head_dim=128, hidden_size=128)
    model = build("cuda", config)
    (loss, want), _ = (gradients(model, batch(), BF16) for _ in range(2))
    for value in (float("nan"), 1e30, float("nan"), -1):
        dirty = [
            torch.full((size,), value, device="cuda", dtype=torch.int32 if value == -1 else F32)
            for size in (1 << 28, *[1 << 19] * 64, *[1 << 17] * 64, *[1 << 8] * 512)
        ]
        del dirty
        again, got = gradients(model, batch(), BF16)
        assert again == loss, value
        different = [n for n, g in want.items() if not torch.equal(g, got[n])]
        assert set(different) <= {"model.embed_tokens.weight"}, (value, different)


@both
def test_recomputation_changes_no_bit(config: ModelConfig) -> None:
    plain, again = (build("cuda", config) for _ in range(2))
    again.model.gradient_checkpointing = True
    (loss, want), (close, got) = (gradients(m, batch(), BF16) for m in (plain, again))
    assert close == loss
    for n, g in want.items():
        # torch's own scatter into the embedding adds atomically
        assert torch.equal(got[n], g) or "embed_tokens" in n, n


@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_forward_and_backward(packed: bool) -> None:
    """torch.compile(fullgraph=True) of the whole model under autocast, with inductor's own kernels around ours."""
    model, b = build(), batch().to(torch.device("cuda"))
    ids, cu = (b.input_ids, b.cu_seqlens) if packed else (b.input_ids.view(2, -1), None)

    def loss(ids: Tensor, cu: Tensor | None) -> Tensor:
        with torch.autocast("cuda", BF16):
            return model(ids, cu_seqlens=cu).logits.float().square().mean()

    leaves = list(model.parameters())
    want = loss(ids, cu)
    wanted = torch.autograd.grad(want, leaves)
    got = torch.compile(loss, fullgraph=True)(ids, cu)
    found = torch.autograd.grad(got, leaves)
    assert rel(got, want) < 2e-2
    whole = max(w.norm().item() for w in wanted)
    for (n, _), g, w in zip(model.named_parameters(), found, wanted, strict=True):
        assert (g - w).norm().item() < 5e-2 * max(w.norm().item(), 1e-2 * whole), n

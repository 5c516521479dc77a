"""transformers' own kimi_linear, with experts, reads our published layout by itself and agrees: logits, tokens, gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from openkda.models.hybrid import HybridLM
from openkda.models.make_checkpoint import miniature, random_model
from openkda.models.official import load_official, save_official
from openkda.models.official_config import FRESH_TEXT, OfficialConfig

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.kimi_linear")

BASE = miniature(
    "kimi-linear-48b", layers=4, hidden=64, heads=2, head_dim=32, experts=8, experts_per_token=2, vocab_size=96
).replace(initializer_range=0.1)
CONFIGS = {
    "as-published": BASE,
    "all-experts": BASE.replace(first_k_dense_replace=0, num_shared_experts=2, routed_scaling_factor=1.0),
    "mla-first": BASE.replace(kda_layers=(2, 3), full_attn_layers=(1, 4), q_lora_rank=24, first_k_dense_replace=2),
    "not-renormalised": BASE.replace(moe_renormalize=False, num_experts_per_token=3, short_conv_kernel_size=3),
}


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[HybridLM, torch.nn.Module]:
    config = CONFIGS[request.param]
    model = random_model(config, dtype=torch.float32)
    text = {**FRESH_TEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32"}
    save_official(model, tmp_path / "published", config=OfficialConfig(config, "kimi_linear", text))
    other, report = transformers.KimiLinearForCausalLM.from_pretrained(
        tmp_path / "published", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    ours = load_official(tmp_path / "published")
    assert isinstance(ours, HybridLM)
    return ours, other.eval()


def ids(length: int) -> Tensor:
    return torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(length))


def test_logits(pair: tuple[HybridLM, torch.nn.Module]) -> None:
    ours, other = pair
    with torch.no_grad():
        for length in (1, 40, 130):
            a, b = ours(ids(length)).logits, other(input_ids=ids(length)).logits
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_greedy_tokens(pair: tuple[HybridLM, torch.nn.Module]) -> None:
    ours, other = pair
    prompt = ids(9)
    with torch.no_grad():
        out = ours(prompt, return_state=True, last_only=True)
        rows = []
        for _ in range(30):
            rows.append(out.logits[:, -1].argmax(-1, keepdim=True))
            out = ours(rows[-1], state=out.state, return_state=True)
        theirs = other.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(torch.cat(rows, 1), theirs[:, 9:])


def their_gradient(name: str, grads: dict[str, Tensor]) -> Tensor:
    """The gradient of our parameter, cut out of their stacked ones."""
    at, _, last = name.rpartition("self_attn.")
    for part in ("q", "k", "v"):
        if last == f"{part}_conv1d.weight":
            return grads[f"{at}self_attn.conv1d.weight"].chunk(3)["qkv".index(part)]
    if last.startswith(("f_a_proj", "f_b_proj", "A_log", "dt_bias")) and at:
        return grads[f"{at}self_attn.forget_gate.{last}"]
    name = name.replace("block_sparse_moe", "mlp")
    at, _, matrix = name.rpartition(".experts.")
    if matrix in ("w1", "w3"):
        return grads[f"{at}.experts.gate_up_proj"].chunk(2, dim=1)[matrix == "w3"]
    return grads[f"{at}.experts.down_proj"] if matrix == "w2" else grads[name]


def test_gradients(pair: tuple[HybridLM, torch.nn.Module]) -> None:
    ours, other = pair
    x = ids(70)
    for logits in (ours(x).logits, other(input_ids=x).logits):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    grads = {n: p.grad for n, p in other.named_parameters() if p.grad is not None}
    largest = max(g.norm().item() for g in grads.values())
    for name, p in ours.named_parameters():
        want = their_gradient(name, grads).reshape(p.shape)
        assert p.grad is not None
        # 1e-5 of each (seen: 8e-6); sums that cancel to a thousandth of the others (A_log) have no more digits than those.
        assert (p.grad - want).norm() <= 1e-5 * max(want.norm().item(), 1e-2 * largest), name

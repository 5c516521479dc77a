"""The patch of transformers' models on CUDA tensors: the kernels run, by name; on a GPU with the originals' numbers."""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.compat import hf
from openkda.ops.kda import api
from openkda.ops.kda.call import KDACall, KDAOutput
from openkda.testing.compare import rel

transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")
MODULES = [importlib.import_module(f"transformers.models.{m}.modeling_{m}") for m in hf.MODELS if m in hf._modules()]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Pretended(Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.rsplit(".", 1)[-1])
@pytest.mark.parametrize("training", [False, True])
def test_cuda_tensors_reach_the_kernels(module: Any, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors that only pretend to be on a GPU: sequences and single tokens both choose the Triton implementation."""
    from openkda.ops.kda import hopper, triton

    chosen: list[tuple[str, bool]] = []

    def run(call: KDACall) -> KDAOutput:
        chosen.append(("run", call.needs_grad))
        return KDAOutput(torch.empty_like(call.v), call.v.new_empty(2, 3, 128, 128, dtype=torch.float32))

    def step(call: KDACall) -> tuple[Tensor, Tensor]:
        chosen.append(("step", call.needs_grad))
        assert call.initial_state is not None
        return call.v.new_empty(2, 3, 128), call.initial_state

    monkeypatch.setattr(triton, "run", run)
    monkeypatch.setattr(triton, "step", step)
    monkeypatch.setattr(hopper, "_device_refusals", lambda device: ["a pretended device"])
    with hf.patched():
        for T in (70, 1):
            q, k, v = (torch.zeros(2, T, 3, 128, dtype=torch.bfloat16).as_subclass(Pretended) for _ in range(3))
            g, beta = torch.zeros(2, T, 3, 128), torch.zeros(2, T, 3)
            options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
            v.requires_grad_(training)
            o, _ = module.chunk_kimi_delta_attention(q, k, v, g=g, beta=beta, initial_state=None, **options)
            assert o.dtype == torch.bfloat16
            state = torch.zeros(2, 3, 128, 128)
            module.recurrent_kimi_delta_attention(q, k, v, g=g, beta=beta, initial_state=state, **options)
    assert chosen == [(name, training) for name in ("run", "run", "run", "step")]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
def test_model_on_a_gpu(
    dtype: torch.dtype, limit: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, loss gradients and greedy tokens with the patch against transformers' own torch code, and what ran is said."""
    module = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    for name in hf._REPLACEMENTS:  # not fla's kernels, which transformers takes where fla is installed: tf32 in float32
        monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    config = transformers.KimiLinearConfig(
        vocab_size=97, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=32, num_local_experts=4, num_experts_per_tok=2, linear_head_dim=64, linear_num_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, layer_types=["linear_attention"] * 3 + ["full_attention"],
        mlp_layer_types=["dense"] * 4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.KimiLinearForCausalLM(config).to("cuda", dtype).eval()
    x = torch.randint(3, 97, (2, 150), device="cuda")
    want = model(x, labels=x)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(want.loss, parameters, allow_unused=True)
    api._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "openkda.ops.kda"), hf.patched():
        got = model(x, labels=x)
        found = torch.autograd.grad(got.loss, parameters, allow_unused=True)
        tokens = model.generate(x[:, :40], max_new_tokens=8, do_sample=False)
    assert "runs triton" in caplog.text and "runs chunkwise" not in caplog.text
    assert rel(got.logits, want.logits) < limit
    norm = max(w.float().norm().item() for w in wanted if w is not None)
    for g, w in zip(found, wanted, strict=True):
        assert (g is None) == (w is None)
        if g is not None and w is not None:
            assert (g - w).float().norm().item() < 3 * limit * max(w.float().norm().item(), 1e-2 * norm)
    if dtype == torch.float32:
        assert torch.equal(tokens, model.generate(x[:, :40], max_new_tokens=8, do_sample=False))

"""fla's own `KimiDeltaAttention` with fla's kernels beside ours with ours, on the same weights.

Needs flash-linear-attention 0.6.0 (fla-core alone has the ops, not the layers).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.compat.fla.models import load_fla_model
from openkda.compat.fla.weights import KEYS, load_fla
from openkda.layers.kda import KimiDeltaAttention
from openkda.models.config import ModelConfig
from openkda.models.presets import PRESETS
from openkda.testing.compare import rel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HIDDEN, HEADS, V_HEADS, SIZE = 256, 2, 4, 128
LENGTHS = (200, 1, 99)


@pytest.fixture(scope="module")
def fla_layer() -> Any:
    return pytest.importorskip("fla.layers.kda").KimiDeltaAttention


def config(bound: float | None) -> ModelConfig:
    return PRESETS["tiny"].replace(
        hidden_size=HIDDEN, kda_num_heads=HEADS, kda_num_v_heads=V_HEADS, kda_head_dim=SIZE, gate_lower_bound=bound,
        use_full_rank_gate=False, rms_norm_eps=1e-5,
    )  # fmt: skip


def layers(fla_layer: Any, bound: float | None) -> tuple[Any, KimiDeltaAttention]:
    """fla's layer after three steps of training, so that no parameter is where it began, and ours, empty."""
    torch.manual_seed(0)
    theirs = fla_layer(
        hidden_size=HIDDEN, head_dim=SIZE, num_heads=HEADS, num_v_heads=V_HEADS, lower_bound=bound,
        safe_gate=bound is not None, layer_idx=0, norm_eps=1e-5,
    ).cuda()  # fmt: skip
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for _ in range(3):
        run(theirs, tokens())[0].float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return theirs, KimiDeltaAttention(config(bound), 0).cuda()


def tokens() -> Tensor:
    x = torch.randn(1, sum(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(1))
    return x.cuda().requires_grad_()


def run(layer: Any, x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    with torch.autocast("cuda", torch.bfloat16):
        return layer(x, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_same_outputs_and_gradients(fla_layer: Any, bound: float | None, packed: bool) -> None:
    """bfloat16 on both sides: each rounds differently, by 2^-9 a product, so both are held to float32 on a CPU as well."""
    theirs, ours = layers(fla_layer, bound)
    load_fla(ours, theirs.state_dict())
    exact = KimiDeltaAttention(config(bound), 0)
    load_fla(exact, {n: t.cpu() for n, t in theirs.state_dict().items()})
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    found = []
    for layer, device in ((exact, "cpu"), (ours, "cuda"), (theirs, "cuda")):
        x = tokens().detach().to(device).requires_grad_()
        options = {"cu_seqlens": cu.to(device)} if packed else {}
        y = layer(x, **options)[0] if device == "cpu" else run(layer, x, **options)[0]
        names = dict(layer.named_parameters())
        named = names if layer is not theirs else {KEYS[n]: p for n, p in names.items()}
        grads = torch.autograd.grad(y.float().square().mean(), [x, *named.values()])
        found.append({"y": y, "x": grads[0], **dict(zip(named, grads[1:], strict=True))})
    want, got, peer = found
    assert got.keys() == peer.keys() == want.keys()
    for n, w in want.items():
        error, bar = rel(got[n], w), rel(peer[n].view(w.shape), w)
        assert error < max(1.5 * bar, 1e-2), f"{n}: {error:.2e} against fla's {bar:.2e}"
        assert rel(got[n], peer[n].view(w.shape)) < 6e-2, n


@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_whole_model(tmp_path: Path, bound: float | None) -> None:
    """fla's `KDAForCausalLM`, saved by transformers and loaded as ours: both in bfloat16 as far from float32 on a CPU."""
    pytest.importorskip("fla.layers.kda")
    models = pytest.importorskip("fla.models.kda")
    torch.manual_seed(0)
    theirs = models.KDAForCausalLM(
        models.KDAConfig(
            hidden_size=HIDDEN, num_heads=HEADS, num_v_heads=V_HEADS, head_dim=SIZE, num_hidden_layers=2, vocab_size=512,
            intermediate_size=384, lower_bound=bound, safe_gate=bound is not None, norm_eps=1e-5,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                p.add_(torch.randn_like(p), alpha=0.3)
    theirs.save_pretrained(tmp_path / "fla")
    exact, ours = load_fla_model(tmp_path / "fla"), load_fla_model(tmp_path / "fla", device="cuda")
    theirs = theirs.cuda().eval()
    ids = torch.randint(512, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = exact(ids).logits
        with torch.autocast("cuda", torch.bfloat16):
            got, peer = ours(ids.cuda()).logits, theirs(ids.cuda()).logits
    error, bar = rel(got.cpu().float(), want), rel(peer.cpu().float(), want)
    assert error < max(1.5 * bar, 1e-2) and bar < 0.1, f"{error:.2e} against fla's {bar:.2e}"

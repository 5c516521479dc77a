"""The KDA layer with the bounded gate against transformers' own of another model (glm5_next): outputs and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from openkda.layers.kda import KimiDeltaAttention
from openkda.models.presets import PRESETS
from openkda.testing.compare import check_close

modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")


@pytest.mark.parametrize("bound", [-5.0, -1.5, None])
def test_same_weights_same_layer(bound: float | None) -> None:
    config = PRESETS["tiny"].replace(gate_lower_bound=bound, use_full_rank_gate=False, initializer_range=0.2)
    torch.manual_seed(0)
    ours = KimiDeltaAttention(config, 0)
    with torch.no_grad():
        ours.A_log.uniform_(-1, 1)
        ours.o_norm.weight.uniform_(0.5, 1.5)
    theirs = modeling.Glm5NextTextLinearAttention(
        SimpleNamespace(
            hidden_size=config.hidden_size, linear_num_heads=2, linear_head_dim=32, linear_conv_kernel_dim=4, hidden_act="silu",
            rms_norm_eps=config.rms_norm_eps, layer_types=["linear_attention"], linear_lower_bound=bound,
        ),
        0,
    )  # fmt: skip
    names = {}
    for name in theirs.state_dict():
        source = name.replace("forget_gate.", "")
        names[name] = [f"{p}_conv1d.weight" for p in "qkv"] if name == "conv1d.weight" else [source]
    mine = ours.state_dict()
    theirs.load_state_dict({n: torch.cat([mine[s] for s in sources]) for n, sources in names.items()})
    x = torch.randn(2, 75, config.hidden_size, generator=torch.Generator().manual_seed(1))
    a, b = ours(x)[0], theirs(x)
    check_close("output", a, b, 1e-5)
    a.square().sum().backward()
    b.square().sum().backward()
    grads = {n: p.grad for n, p in ours.named_parameters()}
    for name, p in theirs.named_parameters():
        check_close(name, torch.cat([grads[s] for s in names[name]]), p.grad, 1e-4)

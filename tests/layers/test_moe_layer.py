"""The mixture-of-experts layer: what reads what, dtypes, packing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from openkda.layers.moe import Experts, PackedMXFP4Experts, SparseMoE, pack_experts, unpack_experts
from openkda.models.config import ModelConfig
from openkda.models.presets import PRESETS
from openkda.ops.mx.api import unpack_mxfp4
from openkda.testing.compare import check_close

LATENT = PRESETS["tiny"].replace(
    num_experts=6, num_experts_per_token=2, num_shared_experts=2, moe_intermediate_size=32, routed_expert_hidden_size=32,
    latent_moe_use_norm=True, hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
    initializer_range=0.2,
)  # fmt: skip
PLAIN = PRESETS["tiny"].replace(
    num_experts=6, num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=64, routed_scaling_factor=2.446,
    initializer_range=0.2,
)  # fmt: skip


def built(config: ModelConfig, seed: int = 0) -> SparseMoE:
    torch.manual_seed(seed)
    layer = SparseMoE(config)
    for name, p in layer.named_parameters():
        torch.nn.init.normal_(p, std=0.2) if "norm" not in name else torch.nn.init.uniform_(p, 0.5, 2)
    layer.gate.e_score_correction_bias.uniform_(-0.2, 0.2)
    return layer


def literal(layer: SparseMoE, config: ModelConfig, x: Tensor) -> Tensor:
    """One token at a time, in the order of the formula."""

    def act(g: Tensor, u: Tensor) -> Tensor:
        if config.hidden_act == "silu":
            return g * torch.sigmoid(g) * u
        return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)

    def mlp(m, v: Tensor) -> Tensor:
        return m.down_proj.weight @ act(m.gate_proj.weight @ v, m.up_proj.weight @ v)

    rows = []
    for v in x.flatten(0, -2):
        s = torch.sigmoid(layer.gate.weight @ v)
        top = (s + layer.gate.e_score_correction_bias).topk(config.num_experts_per_token).indices
        p = s[top] / (s[top].sum() + 1e-20) * config.routed_scaling_factor
        z = layer.routed_expert_down_proj.weight @ v if layer.latent else v
        w1, w3, w2 = layer.experts.w1, layer.experts.w3, layer.experts.w2
        u = sum(p_j * (w2[j] @ act(w1[j] @ z, w3[j] @ z)) for p_j, j in zip(p, top.tolist(), strict=True))
        if layer.latent:
            u = u / (u.square().mean() + config.rms_norm_eps).sqrt() * layer.routed_expert_norm.weight
            u = layer.routed_expert_up_proj.weight @ u
        rows.append(u + mlp(layer.shared_experts, v))
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("config", [LATENT, PLAIN], ids=["latent", "plain"])
def test_against_the_formula(config: ModelConfig) -> None:
    layer = built(config).double()
    x = torch.randn(2, 7, 64, dtype=torch.float64)
    got, want = layer(x), literal(layer, config, x)
    check_close("y", got, want, 1e-13)
    names = [n for n, _ in layer.named_parameters()]
    grads, wanted = (torch.autograd.grad(y.square().sum(), list(layer.parameters())) for y in (got, want))
    for name, a, b in zip(names, grads, wanted, strict=True):
        check_close(name, a, b, 1e-11)
        assert bool(a.any()), f"no gradient reaches {name}"


def test_published_parameter_names_and_shapes() -> None:
    got = {n: tuple(p.shape) for n, p in SparseMoE(LATENT).state_dict().items()}
    assert got == {
        "gate.weight": (6, 64),
        "gate.e_score_correction_bias": (6,),
        "experts.w1": (6, 32, 32),
        "experts.w3": (6, 32, 32),
        "experts.w2": (6, 32, 32),
        "routed_expert_down_proj.weight": (32, 64),
        "routed_expert_up_proj.weight": (64, 32),
        "routed_expert_norm.weight": (32,),
        "shared_experts.gate_proj.weight": (64, 64),
        "shared_experts.up_proj.weight": (64, 64),
        "shared_experts.down_proj.weight": (64, 64),
    }
    plain = SparseMoE(PLAIN).state_dict()
    assert tuple(plain["experts.w1"].shape) == (6, 64, 64) and not any("routed_expert" in n for n in plain)


def test_router_bias_stays_float32_under_every_cast() -> None:
    value = 0.123456
    for cast in (
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.type(torch.half),
    ):
        layer = built(LATENT)
        layer.gate.e_score_correction_bias.fill_(value)
        bias = cast(layer).gate.e_score_correction_bias
        assert bias.dtype == torch.float32 and (bias == torch.tensor(value)).all()
        assert layer.gate.weight.dtype != torch.float32
    assert built(LATENT).double().gate.e_score_correction_bias.dtype == torch.float64


def test_router_ignores_the_latent_and_the_norm_takes_a_common_factor_away() -> None:
    """LatentMoE normalises after the combine: scaling every weight by 3 changes nothing but the norm's eps."""
    layer = built(LATENT).double()
    scaled = copy.deepcopy(layer)
    scaled.gate.scale = 3.0
    x = torch.randn(1, 5, 64, dtype=torch.float64)
    check_close("scaled", scaled(x), layer(x), 1e-4)
    with torch.no_grad():
        layer.routed_expert_down_proj.weight.neg_()
    choice = layer.gate(x.flatten(0, -2)).experts
    assert torch.equal(choice, scaled.gate(x.flatten(0, -2)).experts)


def test_packed_experts_stay_packed_and_equal_their_dequantised_selves() -> None:
    layer = built(LATENT)
    plain = copy.deepcopy(layer)
    before = sum(p.nbytes for p in layer.experts.parameters())
    assert pack_experts(layer) == 1 and pack_experts(layer) == 0
    assert isinstance(layer.experts, PackedMXFP4Experts) and not list(layer.experts.parameters())
    assert sum(b.nbytes for b in layer.experts.buffers()) * 32 == before * 4.25  # 4 bits and a 32nd of a byte a value
    with torch.no_grad():
        for name in ("w1", "w2", "w3"):
            getattr(plain.experts, name).copy_(unpack_mxfp4(*layer.experts.matrix(name), dtype=torch.float32))
    x = torch.randn(3, 9, 64)
    check_close("packed", layer(x), plain(x), 1e-6)
    half = copy.deepcopy(layer).bfloat16()
    assert half.experts.w1_packed.dtype == torch.uint8 and half(x.bfloat16()).dtype == torch.bfloat16
    check_close("bfloat16", half(x.bfloat16()), layer(x), 0.03)


def test_unpacked_experts_are_the_packed_values() -> None:
    """They compute the same, and can be trained."""
    packed = built(LATENT)
    pack_experts(packed)
    layer = copy.deepcopy(packed)
    assert unpack_experts(layer) == 1 and unpack_experts(layer) == 0 and isinstance(layer.experts, Experts)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in layer.experts.parameters())
    x = torch.randn(3, 9, 64)
    check_close("unpacked", layer(x), packed(x), 1e-6)
    layer(x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.experts.parameters())


def test_packed_experts_from_the_config() -> None:
    config = LATENT.replace(packed_experts=True)
    layer = SparseMoE(config)
    assert isinstance(layer.experts, PackedMXFP4Experts)
    pack = built(LATENT)
    pack_experts(pack)
    layer.load_state_dict(pack.state_dict())
    x = torch.randn(1, 4, 64)
    assert torch.equal(layer(x), pack(x))


def test_quantisation_aware_training_is_a_switch() -> None:
    config = LATENT.replace(expert_quantization="ceil")
    layer = SparseMoE(config)
    assert isinstance(layer.experts, Experts) and layer.experts.quantize == "ceil"
    layer.load_state_dict(built(LATENT).state_dict())
    x = torch.randn(2, 6, 64)
    y = layer(x)
    packed = copy.deepcopy(layer)
    pack_experts(packed)
    assert not torch.equal(y, built(LATENT)(x))
    check_close("the packed model", packed(x), y, 0.06)  # it differs by the MXFP8 rounding of activations only
    y.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"expert_quantization": "up"}, "'ceil', 'floor', 'even' or null, received 'up'"),
        ({"expert_quantization": "ceil", "packed_experts": True}, "one of the two"),
        ({"packed_experts": True, "moe_intermediate_size": 40}, "multiples of 32"),
        ({"expert_quantization": "ceil", "routed_expert_hidden_size": 33}, "multiples of 32"),
    ],
)
def test_impossible_configs(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LATENT.replace(**changes)

"""The key map between fla's KDA layer and ours: same outputs and gradients, both ways, and refusals that name the key."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openkda.compat.fla.weights import KEYS, from_fla, load_fla, to_fla
from openkda.layers.kda import KimiDeltaAttention
from openkda.models.presets import PRESETS
from openkda.testing.compare import rel

CONFIG = PRESETS["tiny"].replace(kda_num_heads=2, kda_num_v_heads=4, kda_head_dim=8, use_full_rank_gate=False)


class FlaLayer(nn.Module):
    """What fla-core 0.6.0's KimiDeltaAttention computes, token by token in plain torch, with its modules' names."""

    def __init__(self, hidden: int, H: int, HV: int, D: int, lower_bound: float | None, eps: float, W: int = 4) -> None:
        super().__init__()
        self.H, self.HV, self.D, self.lower_bound, self.eps = H, HV, D, lower_bound, eps
        self.q_proj, self.k_proj = (nn.Linear(hidden, H * D, bias=False) for _ in "qk")
        self.v_proj = nn.Linear(hidden, HV * D, bias=False)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            nn.Conv1d(n, n, W, groups=n, padding=W - 1, bias=False) for n in (H * D, H * D, HV * D)
        )
        self.f_proj = nn.Sequential(nn.Linear(hidden, D, bias=False), nn.Linear(D, HV * D, bias=False))
        self.b_proj = nn.Linear(hidden, HV, bias=False)
        self.A_log = nn.Parameter(torch.empty(HV).uniform_(1, 4).log())
        self.dt_bias = nn.Parameter(torch.randn(HV * D))
        self.g_proj = nn.Sequential(nn.Linear(hidden, D, bias=False), nn.Linear(D, HV * D, bias=True))
        self.o_norm = nn.RMSNorm(D, eps)
        self.o_proj = nn.Linear(HV * D, hidden, bias=False)
        with torch.no_grad():
            self.o_norm.weight.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        H, HV, D = self.H, self.HV, self.D

        def mixed(name: str) -> Tensor:
            y = getattr(self, f"{name}_proj")(x).transpose(1, 2)
            return F.silu(getattr(self, f"{name}_conv1d")(y)[..., :T]).transpose(1, 2).unflatten(-1, (-1, D))

        q, k, v = mixed("q"), mixed("k"), mixed("v")
        q, k = (
            (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(HV // H, 2) for t in (q, k)
        )  # fmt: skip
        z = (self.f_proj(x) + self.dt_bias).unflatten(-1, (HV, D))
        rate = self.A_log.exp().view(HV, 1)
        g = -rate * F.softplus(z) if self.lower_bound is None else self.lower_bound * torch.sigmoid(rate * z)
        beta = self.b_proj(x).sigmoid()
        S, rows = x.new_zeros(B, HV, D, D), []
        for t in range(T):
            S = S * g[:, t].exp().unsqueeze(-1)
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t].unsqueeze(-1) * error)
            rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * D**-0.5)
        gate = self.g_proj(x).unflatten(-1, (HV, D)).sigmoid()
        return self.o_proj((self.o_norm(torch.stack(rows, 1)) * gate).flatten(-2))


def pair(lower_bound: float | None, bias: bool = True) -> tuple[FlaLayer, KimiDeltaAttention]:
    torch.manual_seed(0)
    config = CONFIG.replace(gate_lower_bound=lower_bound)
    theirs = FlaLayer(config.hidden_size, 2, 4, 8, lower_bound, config.rms_norm_eps)
    if not bias:
        nn.init.zeros_(theirs.g_proj[1].bias)
    return theirs, KimiDeltaAttention(config, 0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_same_outputs_and_gradients(lower_bound: float | None, bias: bool) -> None:
    theirs, ours = pair(lower_bound, bias)
    load_fla(ours, theirs.state_dict())
    assert (ours.g_b_proj.bias is not None) == bias
    x = torch.randn(2, 30, CONFIG.hidden_size, requires_grad=True)
    want, got = theirs(x), ours(x)[0]
    assert rel(got, want) < 1e-5
    upstream = torch.randn_like(want)
    wanted = torch.autograd.grad(want, [x, *theirs.parameters()], upstream)
    found = torch.autograd.grad(got, [x, *ours.parameters()], upstream)
    assert rel(found[0], wanted[0]) < 1e-5
    by_name = dict(zip((n for n, _ in ours.named_parameters()), found[1:], strict=True))
    for (name, _), w in zip(theirs.named_parameters(), wanted[1:], strict=True):
        if KEYS[name] in by_name:
            assert rel(by_name[KEYS[name]], w) < 1e-4, name


def test_there_and_back() -> None:
    theirs, ours = pair(-5.0)
    weights = theirs.state_dict(prefix="model.layers.3.attn.")
    load_fla(ours, weights | {"model.norm.weight": torch.ones(3)}, prefix="model.layers.3.attn.")
    back = to_fla(ours, prefix="model.layers.3.attn.")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[n], weights[n]) for n in weights)
    fresh = to_fla(KimiDeltaAttention(CONFIG, 0))
    assert not bool(fresh["g_proj.1.bias"].any())
    theirs.load_state_dict(fresh)  # strict
    load_fla(ours, fresh)
    assert ours.g_b_proj.bias is None


def test_loading_copies_and_keeps_float32_parameters() -> None:
    theirs, ours = pair(None)
    weights = {n: t.bfloat16() for n, t in theirs.state_dict().items()}
    ours = ours.to(torch.bfloat16)
    load_fla(ours, weights)
    assert ours.A_log.dtype == torch.float32 and ours.q_proj.weight.dtype == torch.bfloat16
    assert ours.g_b_proj.bias is not None and ours.g_b_proj.bias.dtype == torch.bfloat16
    weights["q_proj.weight"].zero_()
    assert bool(ours.q_proj.weight.any())


def test_what_cannot_be_represented_is_named_and_changes_nothing() -> None:
    theirs, ours = pair(None)
    before = {n: p.clone() for n, p in ours.named_parameters()}
    weights = theirs.state_dict()
    with pytest.raises(ValueError, match=r"cannot represent q_conv1d.bias \(a convolution's bias that is not zero\)"):
        load_fla(ours, weights | {"q_conv1d.bias": torch.ones(16)})
    with pytest.raises(ValueError, match=r"cannot represent lora\.weight; missing f_proj.1.weight"):
        from_fla({n: t for n, t in weights.items() if n != "f_proj.1.weight"} | {"lora.weight": torch.ones(1)})
    without = {n: t for n, t in weights.items() if "conv1d" not in n}
    with pytest.raises(ValueError, match=r"missing k_conv1d.weight \(use_short_conv=False has no counterpart\)"):
        load_fla(ours, without)
    with pytest.raises(ValueError, match=r"shapes differ.*f_b_proj.weight expected \[32, 8\], received \[32, 16\]"):
        load_fla(ours, weights | {"f_proj.0.weight": torch.ones(16, 64), "f_proj.1.weight": torch.ones(32, 16)})
    assert all(torch.equal(p, before[n]) for n, p in ours.named_parameters())
    load_fla(ours, weights | {"q_conv1d.bias": torch.zeros(16)})  # a bias of zeros says nothing

    full = KimiDeltaAttention(CONFIG.replace(use_full_rank_gate=True), 0)
    for refused in (lambda: load_fla(full, weights), lambda: to_fla(full)):
        with pytest.raises(ValueError, match="use_full_rank_gate=False"):
            refused()
    with pytest.raises(ValueError, match="received K = 8 and V = 16"):
        to_fla(KimiDeltaAttention(CONFIG.replace(kda_v_head_dim=16), 0))

"""Which parameter gets which optimizer, what never decays, and Muon's step against the formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from openkda.models.hybrid import HybridLM
from openkda.models.presets import PRESETS
from openkda.training.optim import Muon, Optimizer, group_parameters


def newton_schulz(m: Tensor) -> Tensor:
    """Five steps in float64 (Moonlight report, section 2.1)."""
    x = m.double().T if m.shape[0] > m.shape[1] else m.double()
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if m.shape[0] > m.shape[1] else x


def make(groups_of: nn.Module, lr: float = 0.1, decay: float = 0.5, per_head: bool = False) -> Optimizer:
    groups = group_parameters(groups_of, per_head=per_head)
    return Optimizer(groups, lr=lr, weight_decay=decay, momentum=0.95, betas=(0.9, 0.95))


@pytest.mark.parametrize("full_rank", [True, False])
def test_each_parameter_has_one_place(full_rank: bool) -> None:
    model = HybridLM(PRESETS["tiny"].replace(use_full_rank_gate=full_rank))
    groups = group_parameters(model)
    names = [*groups.muon, *groups.adamw, *groups.adamw_no_decay]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert {n.split(".")[-1] for n in groups.adamw_no_decay} == {"A_log", "dt_bias", "weight"}
    assert all("norm" in n or n.endswith(("A_log", "dt_bias")) for n in groups.adamw_no_decay)
    assert not [n for n in (*groups.muon, *groups.adamw) if "norm" in n or n.endswith(("A_log", "dt_bias"))]
    assert {n.split(".")[-2] for n in groups.adamw} == {
        "embed_tokens", "lm_head", "b_proj", "q_conv1d", "k_conv1d", "v_conv1d",
    }  # fmt: skip
    assert all(p.dim() == 2 for p in groups.muon.values())


def test_only_the_decay_groups_decay() -> None:
    model = HybridLM(PRESETS["tiny"])
    model.init_weights(0)
    with torch.no_grad():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            p.add_(1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    groups = group_parameters(model)
    make(model).step()
    for name, p in model.named_parameters():
        if name in groups.adamw_no_decay:
            assert torch.equal(p, before[name]), name
        else:
            torch.testing.assert_close(p.detach(), before[name] * (1 - 0.1 * 0.5), msg=name)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32), (40, 2)])
def test_muon_follows_the_formula_in_float32(shape: tuple[int, int]) -> None:
    """float32 leaves about 1e-6; torch's bfloat16 iteration on the same gradient is off by about 1e-2."""
    torch.manual_seed(0)
    start, grad = torch.randn(shape), torch.randn(shape)
    ours, torchs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours.grad, torchs.grad = grad.clone(), grad.clone()
    settings = {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    Muon([ours], **settings).step()
    torch.optim.Muon([torchs], **settings).step()
    update = newton_schulz(grad)  # a first step: momentum and Nesterov only scale the gradient
    want = start.double() * (1 - 0.05) - 0.1 * 0.2 * math.sqrt(max(shape)) * update
    scale = (want - start.double()).abs().max()
    assert (ours.double() - want).abs().max() / scale < 1e-5
    assert 1e-4 < (torchs.double() - want).abs().max() / scale < 0.1


def test_a_gradient_is_never_divided_in_place() -> None:
    """torch normalises its bfloat16 copy in place; ours must be a copy as well, also without Nesterov."""
    p = nn.Parameter(torch.randn(8, 8))
    p.grad = torch.full_like(p, 3.0)
    optimizer = Muon([p], lr=0.1, nesterov=False)
    optimizer.step()
    assert torch.equal(p.grad, torch.full_like(p, 3.0))
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], torch.full_like(p, 3.0 * 0.05))


def test_a_stack_is_its_matrices() -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(3, 8, 12), torch.randn(2, 3, 8, 12)
    stack, apart = nn.ParameterList([start.clone()]), nn.ParameterList([m.clone() for m in start])
    one, many = make(stack), make(apart)
    for grad in grads:
        stack[0].grad = grad.clone()
        for p, g in zip(apart, grad, strict=True):
            p.grad = g.clone()
        one.step(), many.step()
        one.zero_grad(), many.zero_grad()
    assert torch.equal(stack[0], torch.stack(list(apart)))
    assert not torch.equal(stack[0], start)


GROUPED = PRESETS["tiny"].replace(kda_num_v_heads=6, kda_v_head_dim=24, q_lora_rank=20, v_head_dim=24)


def test_heads_of_every_projection() -> None:
    """Queries, keys and values of both layers are cut, each row once; output projections and gates are not."""
    model = HybridLM(GROUPED)
    groups = group_parameters(model, per_head=True)
    shapes = {name: p.shape for name, p in groups.muon.items()}
    cut = {name.split("layers.")[1].removesuffix(".weight"): rows for name, rows in groups.head_rows.items()}
    assert cut == {
        **{f"{i}.self_attn.{name}": (32, 32) for i in range(3) for name in ("q_proj", "k_proj")},
        **{f"{i}.self_attn.v_proj": (24,) * 6 for i in range(3)},
        "3.self_attn.q_b_proj": (48, 48),
        "3.self_attn.kv_b_proj": (32, 24, 32, 24),
    }
    assert all(sum(rows) == shapes[name][0] for name, rows in groups.head_rows.items())
    assert not group_parameters(model).head_rows


def test_per_head_muon_is_muon_on_each_head_alone() -> None:
    """And plain Muon on everything else, bit by bit, over several steps; it is not what whole matrices would get."""
    models = [HybridLM(GROUPED) for _ in range(3)]
    for m in models:
        m.init_weights(0)
    ours, whole, apart = models
    rows = group_parameters(ours, per_head=True).head_rows
    start = dict(apart.named_parameters())
    heads = {n: nn.ParameterList(block.clone() for block in start[n].detach().split(rows[n])) for n in rows}
    settings = {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    alone = {n: [Muon([block], **settings) for block in blocks] for n, blocks in heads.items()}
    a, b = make(ours, per_head=True), make(whole)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for (name, p), q in zip(ours.named_parameters(), whole.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
            if name in rows:
                for block, optimizer, grad in zip(
                    heads[name], alone[name], p.grad.split(list(rows[name])), strict=True
                ):
                    block.grad = grad.clone()
                    optimizer.step()
        for optimizer in (a, b):
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(ours.named_parameters(), whole.parameters(), strict=True):
        if name in rows:
            assert torch.equal(p, torch.cat(list(heads[name]))), name
            assert not torch.allclose(p, q), name
        else:
            assert torch.equal(p, q), name


@pytest.mark.parametrize("per_head", [False, True])
def test_state_goes_round(per_head: bool) -> None:
    """Step, save, load into a fresh optimizer, step: the bits of two steps in a row."""

    def model() -> HybridLM:
        model = HybridLM(PRESETS["tiny"])
        model.init_weights(0)
        return model

    def grads(m: HybridLM, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in m.parameters():
            p.grad = torch.randn(p.shape, generator=generator)

    straight, broken = model(), model()
    a, b = make(straight, per_head=per_head), make(broken, per_head=per_head)
    for m, optimizer in ((straight, a), (broken, b)):
        grads(m, 1)
        optimizer.step()
    again = model()
    again.load_state_dict(broken.state_dict())
    c = make(again, per_head=per_head)
    c.load_state_dict(b.state_dict())
    for m, optimizer in ((straight, a), (again, c)):
        grads(m, 2)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(straight.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match="expected parts"):
        c.load_state_dict({"sgd": {}})

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


def make(groups_of: nn.Module, lr: float = 0.1, decay: float = 0.5) -> Optimizer:
    return Optimizer(group_parameters(groups_of), lr=lr, weight_decay=decay, momentum=0.95, betas=(0.9, 0.95))


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


def test_state_goes_round() -> None:
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
    a, b = make(straight), make(broken)
    for m, optimizer in ((straight, a), (broken, b)):
        grads(m, 1)
        optimizer.step()
    again = model()
    again.load_state_dict(broken.state_dict())
    c = make(again)
    c.load_state_dict(b.state_dict())
    for m, optimizer in ((straight, a), (again, c)):
        grads(m, 2)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(straight.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match="expected parts"):
        c.load_state_dict({"sgd": {}})

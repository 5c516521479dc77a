"""What a hand-written derivative cannot do is refused in words, by the choice of the implementation and by repeated calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openkda.ops.kda.api import kda
from openkda.testing.inputs import KDAInputs, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GATES = ["bounded", "softplus"]  # on Hopper the first has kernels of its own


def inputs(gate: str) -> KDAInputs:
    x = make_inputs(0, T=64, K=128, gate=gate, use_qk_l2norm=True, use_beta_sigmoid=True, unit_keys=False)
    return x.to(dtype=torch.bfloat16, device="cuda")


def call(x: KDAInputs, q: Tensor) -> Tensor:
    return kda(q, x.k, x.v, x.g, x.beta, gate=x.gate, use_qk_l2norm=True, use_beta_sigmoid=True).output


@pytest.mark.parametrize("gate", GATES)
def test_second_derivatives(gate: str) -> None:
    x = inputs(gate)
    for turn in range(4):
        q = x.q.detach().clone().requires_grad_()
        y = call(x, q).float().square().sum()
        (dq,) = torch.autograd.grad(y, q, create_graph=True)
        assert bool(dq.any()), turn
        with pytest.raises(NotImplementedError, match=r"second derivative.*impl='reference'"):
            dq.sum().backward()
    leaf = x.q.detach().clone().requires_grad_()
    want = kda(
        leaf, x.k, x.v, x.g, x.beta, gate=x.gate, use_qk_l2norm=True, use_beta_sigmoid=True, impl="reference"
    ).output
    (dq,) = torch.autograd.grad(want.float().square().sum(), leaf, create_graph=True)
    assert bool(torch.autograd.grad(dq.float().sum(), leaf)[0].any()), "the remedy works"


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("transform", ["vmap", "jvp", "dual numbers", "grad"])
def test_other_transforms(gate: str, transform: str) -> None:
    """After calls that leave something to repeat. Forward mode would have lost its tangent without a word."""
    x = inputs(gate)
    for _ in range(3):
        call(x, x.q.detach().clone().requires_grad_()).float().sum().backward()
        with torch.no_grad():
            call(x, x.q)
    with pytest.raises(NotImplementedError, match=r"inside.*impl='reference'"):
        if transform == "vmap":
            torch.vmap(lambda q: call(x, q))(x.q.detach().expand(2, *x.q.shape))
        elif transform == "jvp":
            torch.func.jvp(lambda q: call(x, q), (x.q.detach(),), (x.q.detach(),))
        elif transform == "grad":
            torch.func.grad(lambda q: call(x, q).float().sum())(x.q.detach())
        else:
            with torch.autograd.forward_ad.dual_level():
                call(x, torch.autograd.forward_ad.make_dual(x.q.detach(), x.q.detach()))

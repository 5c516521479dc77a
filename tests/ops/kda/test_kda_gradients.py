"""Gradients beyond the case list: scaling, missing parts, strides, groups, second derivatives, memory."""

from __future__ import annotations

import pytest
import torch

from openkda.ops.kda.api import kda
from openkda.testing.compare import rel
from openkda.testing.inputs import make_inputs
from openkda.testing.runs import check_errors, gradients, outputs, peak_bytes

NAMES = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("factor", [0.0, 0.5, -3.0])
def test_gradients_scale_with_the_upstream_gradient(factor: float) -> None:
    x = make_inputs(1, T=70, H=1, HV=2, K=16, gate="softplus")
    one = gradients(x)
    x.do, x.dS = factor * x.do, factor * x.dS
    scaled = gradients(x)
    for n in one:
        if n.startswith("d"):
            want = factor * one[n]
            assert torch.allclose(scaled[n], want, rtol=1e-4, atol=1e-6 * one[n].abs().max().item()), n
    if factor == 0.0:
        assert not any(bool(scaled[n].any()) for n in scaled if n.startswith("d"))


@pytest.mark.parametrize("wanted", [*NAMES, "A_log", "dt_bias", "initial_state"])
def test_one_input_alone_can_require_grad(wanted: str) -> None:
    x = make_inputs(2, T=70, H=1, HV=2, K=16)
    want = gradients(x)[f"d{wanted}"]
    y = x.to()
    leaf = y.tensors()[wanted].requires_grad_()
    out = kda(y.q, y.k, y.v, y.g, y.beta, **y.kwargs())
    (got,) = torch.autograd.grad((out.output, out.final_state), leaf, (x.do, x.dS))
    assert torch.equal(got, want)


@pytest.mark.parametrize("part", ["output", "final_state"])
def test_only_one_result_used(part: str) -> None:
    """The other result's gradient arrives as None and counts as zero."""
    x = make_inputs(3, T=70, H=1, K=16)
    zero = make_inputs(3, T=70, H=1, K=16)
    setattr(zero, "dS" if part == "output" else "do", torch.zeros_like(x.dS if part == "output" else x.do))
    want = gradients(zero)
    y = x.to().requires_grad_()
    out = kda(y.q, y.k, y.v, y.g, y.beta, **y.kwargs())
    upstream = x.do if part == "output" else x.dS
    got = torch.autograd.grad(getattr(out, part), (y.k, y.v, y.g, y.initial_state), upstream)
    for g, n in zip(got, ("dk", "dv", "dg", "dinitial_state"), strict=True):
        assert torch.equal(g, want[n])


def test_second_derivative_is_refused_clearly() -> None:
    x = make_inputs(4, T=20, H=1, K=8).to(dtype=torch.float64).requires_grad_()
    out = kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), impl="chunkwise")
    (dk,) = torch.autograd.grad(out.output.square().sum(), x.k, create_graph=True)  # the first one is fine
    with pytest.raises(NotImplementedError, match="second derivative"):
        dk.sum().backward()


def test_many_upstream_gradients_at_once_are_refused_clearly() -> None:
    x = make_inputs(0, T=20, K=8).requires_grad_()
    out = {n: kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), impl=n).output for n in ("chunkwise", "reference")}
    with pytest.raises(NotImplementedError, match=r"one by one, or impl='reference'"):
        torch.autograd.grad(out["chunkwise"], x.q, torch.stack([x.do, x.do]), is_grads_batched=True)
    (both,) = torch.autograd.grad(out["reference"], x.q, torch.stack([x.do, 2 * x.do]), is_grads_batched=True)
    assert torch.allclose(both[1], 2 * both[0]), "the remedy works"


def test_no_gate_equals_zero_log_decay_and_needs_no_gate_gradient() -> None:
    x = make_inputs(5, T=70, H=1, K=16, gate=None, decay="zero")
    assert bool((x.g == 0).all())
    check_errors(gradients(x), gradients(x.to(dtype=torch.float64), impl="reference"), 2e-5, 1e-4)


@pytest.mark.parametrize("impl", ["reference", "chunkwise"])
def test_value_heads_in_groups(impl: str) -> None:
    """HV = 3 H equals queries and keys repeated; their gradients are the sums over the group."""
    x = make_inputs(6, T=70, H=2, HV=6, K=16, V=8)
    got = gradients(x, impl=impl)
    y = make_inputs(6, T=70, H=2, HV=6, K=16, V=8)
    y.q, y.k = (t.repeat_interleave(3, 2) for t in (x.q, x.k))
    want = gradients(y, impl=impl)
    for n in ("dq", "dk"):
        want[n] = want[n].unflatten(2, (2, 3)).sum(3)
    check_errors(got, want, 1e-6, 5e-6)
    y.v = y.v[:, :, [1, 0, 2, 3, 4, 5]]
    assert rel(outputs(y, impl=impl)["o"], got["o"]) > 0.1  # swapping two value heads is seen


@pytest.mark.parametrize("impl", ["reference", "chunkwise"])
def test_strided_inputs_and_upstream_gradients(impl: str) -> None:
    """Slices of one fused projection, a padded beta, an expanded upstream gradient: the same as contiguous copies."""
    H, K = 2, 16
    for T in (64, 70):
        x = make_inputs(7, B=2, T=T, H=H, K=K)
        want_x = x.to()
        want_x.do = torch.full_like(x.do, 0.5)
        want = gradients(want_x, impl=impl)
        fused = torch.full((2, T, 4 * H * K + 40), float("nan"))
        parts = {}
        for i, n in enumerate(("q", "k", "v", "g")):
            parts[n] = fused[..., i * H * K : (i + 1) * H * K].unflatten(-1, (H, K))
        parts["beta"] = fused[..., 4 * H * K : 4 * H * K + H]
        for n, view in parts.items():
            view.copy_(getattr(x, n))
        leaves = {n: t.detach().requires_grad_() for n, t in parts.items()}
        out = kda(**leaves, **x.kwargs(), impl=impl)
        upstream = torch.tensor(0.5).expand_as(out.output)
        got = torch.autograd.grad((out.output, out.final_state), list(leaves.values()), (upstream, x.dS))
        for g, n in zip(got, leaves, strict=True):
            assert rel(g, want[f"d{n}"]) < 1e-6, n


@pytest.mark.parametrize("T", [1, 63, 64, 65])
def test_gradients_exist_at_every_length_outside_training_code(T: int) -> None:
    """No inference path is chosen behind autograd's back, however short the input."""
    x = make_inputs(8, T=T, H=1, K=8).to().requires_grad_()
    kda(x.q, x.k, x.v, x.g, x.beta, gate=x.gate).output.sum().backward()
    for t in (x.q, x.v, x.beta):
        assert t.grad is not None
        assert bool(t.grad.any())


def test_16_bit_gradients() -> None:
    """Each gradient comes back in its input's dtype, off by its one rounding."""
    x = make_inputs(9, T=100, H=1, HV=2, K=16, use_qk_l2norm=True).to(dtype=torch.bfloat16)
    got = gradients(x)
    assert all(got[f"d{n}"].dtype == torch.bfloat16 for n in NAMES)
    assert got["dA_log"].dtype == got["dinitial_state"].dtype == torch.float32
    check_errors(got, gradients(x.to(dtype=torch.float64), impl="reference"), 2e-3, 2e-3)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize(("B", "T"), [(1, 1024), (1, 4096), (32, 64)])
def test_peak_memory(gate: str, B: int, T: int) -> None:
    """Forward and backward together: at most 32 times the bytes of q, results and gradients included."""
    x = make_inputs(10, B=B, T=T, H=4, K=64, gate=gate, use_qk_l2norm=True, initial_state=False).requires_grad_()
    leaves = list(x.tensors().values())

    def both() -> object:
        out = kda(x.q, x.k, x.v, x.g, x.beta, **(x.kwargs() | {"output_final_state": False}))
        return out, torch.autograd.grad(out.output, leaves, x.do)

    times = peak_bytes(both) / (x.q.numel() * x.q.element_size())
    assert times <= 32, f"{times:.1f} times the bytes of q"


def test_inside_torch_compile() -> None:
    """One graph; results and gradients are those of the plain call."""
    x = make_inputs(11, T=40, H=1, K=8).requires_grad_()

    def f(q: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return 2 * kda(q * 0.5, x.k, x.v, g, x.beta, gate=x.gate).output

    compiled = torch.compile(f, backend="eager")
    want, got = f(x.q, x.g), compiled(x.q, x.g)
    assert torch.equal(got, want)
    for a, b in zip(*(torch.autograd.grad(o.sum(), (x.q, x.g)) for o in (got, want)), strict=True):
        assert torch.equal(a, b)
    assert torch._dynamo.explain(f)(x.q, x.g).graph_break_count == 0

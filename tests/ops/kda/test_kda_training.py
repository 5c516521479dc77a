"""The op inside torch's training machinery: transforms refused in words, checkpointing, autocast, accumulation, compilation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from openkda.ops.kda.api import kda, kda_step
from openkda.testing.compare import rel
from openkda.testing.inputs import KDAInputs, make_inputs


def loss(x: KDAInputs, tensors: dict[str, Tensor], **options: Any) -> Tensor:
    """A number of the op's results, in the named differentiable inputs `tensors`."""
    t = dict(tensors)
    gate = x.gate if x.gate is None else replace(x.gate, **{n: t.pop(n) for n in ("A_log", "dt_bias")})
    out = kda(**{n: t.pop(n) for n in ("q", "k", "v", "g", "beta")}, **(x.kwargs() | {"gate": gate} | t | options))
    assert out.final_state is not None
    return (out.output * x.do).sum() + (out.final_state * x.dS).sum()


def gradients(f: Callable[[dict[str, Tensor]], Tensor], named: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(f(named), list(named.values()))


def _dual(x: KDAInputs, f: Callable[[Tensor], Tensor]) -> None:
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x.q, x.q))


TRANSFORMS: dict[str, tuple[str, Callable[[KDAInputs, Callable[[Tensor], Tensor]], Any]]] = {
    "vmap": ("torch.func", lambda x, f: torch.vmap(f)(x.q.expand(3, *x.q.shape))),
    "grad": ("torch.func", lambda x, f: torch.func.grad(lambda q: f(q).sum())(x.q)),
    "jacrev": ("torch.func", lambda x, f: torch.func.jacrev(f)(x.q)),
    "jvp": ("forward-mode", lambda x, f: torch.func.jvp(f, (x.q,), (x.q,))),
    "dual": ("forward-mode", _dual),
    "hessian": ("forward-mode", lambda x, f: torch.func.hessian(lambda q: f(q).sum())(x.q)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_in_words_and_the_reference_has_them(name: str) -> None:
    where, transform = TRANSFORMS[name]
    x = make_inputs(0, T=3, K=8)

    def f(impl: str | None) -> Callable[[Tensor], Tensor]:
        return lambda q: kda(q, x.k, x.v, x.g, x.beta, gate=x.gate, impl=impl).output

    for impl in ("chunkwise", None):
        with pytest.raises(NotImplementedError, match=rf"chunkwise.*{where}.*impl='reference'"):
            transform(x, f(impl))
    transform(x, f("reference"))
    kda(x.q, x.k, x.v, x.g, x.beta, gate=x.gate)  # nothing of it stays behind


def test_the_step_has_every_transform() -> None:
    """One token is plain torch."""
    x = make_inputs(1, B=2, T=1, K=8)
    tokens = [t[:, 0] for t in (x.q, x.k, x.v, x.g, x.beta)]
    assert x.initial_state is not None
    many = torch.vmap(lambda s: kda_step(*tokens, s, gate=x.gate)[0])(x.initial_state.expand(3, *x.initial_state.shape))
    assert rel(many[2], kda_step(*tokens, x.initial_state, gate=x.gate)[0]) < 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(reentrant: bool) -> None:
    x = make_inputs(2, T=70, H=1, HV=2, K=16, lengths=(5, 0, 65)).requires_grad_()
    named = x.tensors()

    def again(t: dict[str, Tensor]) -> Tensor:
        names = list(t)
        run = lambda *tensors: loss(x, dict(zip(names, tensors, strict=True)))  # noqa: E731
        return checkpoint(run, *t.values(), use_reentrant=reentrant)  # type: ignore[no-any-return]

    if reentrant:  # it knows .backward() only
        again(named).backward()
        got = tuple(t.grad for t in named.values())
    else:
        got = gradients(again, named)
    for a, b in zip(got, gradients(lambda t: loss(x, t), named), strict=True):
        assert a is not None and torch.equal(a, b)


def test_autocast_leaves_the_arithmetic_alone() -> None:
    """Inside a bfloat16 region: the same bits as outside, states float32, gradients in each input's dtype."""
    x = make_inputs(3, T=70, K=16, use_qk_l2norm=True).to(dtype=torch.bfloat16).requires_grad_()
    named = x.tensors()
    want = gradients(lambda t: loss(x, t), named)

    def inside(t: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(x, t)

    for (n, t), a, b in zip(named.items(), gradients(inside, named), want, strict=True):
        assert a.dtype == t.dtype and torch.equal(a, b), n
    with torch.autocast("cpu", torch.bfloat16):
        out = kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs())
    assert out.final_state is not None
    assert out.output.dtype == torch.bfloat16 and out.final_state.dtype == torch.float32


def test_gradients_accumulate() -> None:
    """Two backward passes into .grad are the sum of the two, to the last bit's rounding."""
    parts = [make_inputs(s, T=40, K=16).requires_grad_() for s in (4, 5)]
    gate = parts[0].gate
    assert gate is not None and gate.A_log is not None and gate.dt_bias is not None
    alone = []
    for x in parts:
        x.gate = gate
        alone.append(torch.autograd.grad(loss(x, x.tensors()), (gate.A_log, gate.dt_bias)))
    for x in parts:
        loss(x, x.tensors()).backward()
    for t, a, b in zip((gate.A_log, gate.dt_bias), *alone, strict=True):
        assert t.grad is not None and torch.equal(t.grad, a + b)


@pytest.mark.parametrize(
    "gate, lengths, state",
    [("bounded", None, True), ("softplus", (5, 0, 30, 1), True), (None, None, False)],
)
def test_one_graph_forward_and_backward(gate: str | None, lengths: tuple[int, ...] | None, state: bool) -> None:
    """torch.compile(fullgraph=True): the same bits, packs included."""
    x = make_inputs(6, T=36, H=1, HV=2, K=16, gate=gate, lengths=lengths, initial_state=state).requires_grad_()
    compiled = torch.compile(lambda t: loss(x, t), fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(compiled, x.tensors()), gradients(lambda t: loss(x, t), x.tensors()), strict=True):
        assert torch.equal(a, b)


def test_one_graph_serves_other_lengths_and_checks_offsets_when_it_runs() -> None:
    runs = itertools.count()

    def counting(graph: Any, inputs: Any) -> Any:
        next(runs)
        return graph.forward

    f = torch.compile(
        lambda q, k, v, g, b, cu: kda(q, k, v, g, b, cu_seqlens=cu).output, fullgraph=True, backend=counting
    )
    for lengths in ((5, 0, 31), (1, 34, 1), (12, 12, 12)):
        x = make_inputs(7, K=8, gate=None, initial_state=False, lengths=lengths)
        cu = x.options["cu_seqlens"]
        assert torch.equal(f(x.q, x.k, x.v, x.g, x.beta, cu), kda(x.q, x.k, x.v, x.g, x.beta, cu_seqlens=cu).output)
    assert next(runs) == 1, "compiled again for the same sizes"
    with pytest.raises(ValueError, match="cu_seqlens"):
        f(x.q, x.k, x.v, x.g, x.beta, torch.tensor([0, 20, 12, 36]))


def test_operator_registration() -> None:
    """torch's own check: schema, fake tensors of the right shapes and strides, autograd registered, traceable."""
    x = make_inputs(8, T=5, H=1, HV=2, K=8).requires_grad_()
    assert x.gate is not None and x.initial_state is not None
    inputs = (x.q, x.k, x.v, x.g, x.beta, x.gate.A_log, x.gate.dt_bias, x.initial_state, None)
    options = (True, -5.0, 0.5, True, False)
    torch.library.opcheck(torch.ops.openkda.kda_chunkwise.default, (*inputs, *options))
    plain = [None if t is None else t.detach() for t in inputs]
    torch.library.opcheck(torch.ops.openkda.kda_chunkwise_backward.default, (x.do, x.dS, *plain, *options))
    torch.library.opcheck(torch.ops.openkda.kda_chunkwise_backward.default, (None, x.dS, *plain, *options))


def test_second_derivative_through_a_compiled_call_is_refused() -> None:
    x = make_inputs(9, T=5, K=8).requires_grad_()
    inputs = (x.q, x.k, x.v, x.g, x.beta, None, None, x.initial_state, None, False, None, 0.5, True, False)
    o, _ = torch.ops.openkda.kda_chunkwise.default(*inputs)
    (dk,) = torch.autograd.grad(o.square().sum(), x.k, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dk.sum().backward()

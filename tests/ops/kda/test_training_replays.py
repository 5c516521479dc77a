"""Training calls that are repeated from tapes: the bits of calls looked at anew, and all that torch promises of gradients.

In Triton's interpreter, whose kernels are handed addresses as a GPU's are (`address_driver.py`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from interpreter import INTERPRETED, patch_loop_bounds, run_interpreted


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_repeated_training_calls_in_the_interpreter() -> None:
    run_interpreted(__file__)


if INTERPRETED:
    patch_loop_bounds()
    from address_driver import use_addresses
    from torch import Tensor
    from torch.utils.checkpoint import checkpoint

    from openkda.ops.kda.api import KDAOutput, kda
    from openkda.ops.kda.call import CALLS
    from openkda.ops.kda.triton.autograd import BACKWARDS
    from openkda.ops.triton import stages
    from openkda.testing.inputs import KDAInputs, make_inputs

    @pytest.fixture
    def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
        CALLS.forget()
        BACKWARDS.forget()
        yield use_addresses(monkeypatch)
        CALLS.forget()
        BACKWARDS.forget()

    def inputs(seed: int = 0, **options: Any) -> KDAInputs:
        given = {"T": 9, "H": 1, "K": 16, "use_qk_l2norm": True, "use_beta_sigmoid": True} | options
        return make_inputs(seed, **given).requires_grad_()

    def call(x: KDAInputs, **options: Any) -> KDAOutput:
        return kda(x.q, x.k, x.v, x.g, x.beta, **(x.kwargs() | {"impl": "triton"} | options))

    def loss(x: KDAInputs, out: KDAOutput) -> Tensor:
        total = (out.output * x.do).sum()
        return total if out.final_state is None else total + (out.final_state * x.dS).sum()

    def gradients(x: KDAInputs, **options: Any) -> dict[str, Tensor]:
        named = x.tensors()
        out = call(x, **options)
        found = torch.autograd.grad(loss(x, out), list(named.values()))
        return dict(zip(("o", *named), (out.output.detach(), *found), strict=True))

    def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
        assert a.keys() == b.keys()
        for n in a:
            assert a[n].shape == b[n].shape and a[n].stride() == b[n].stride() and a[n].dtype == b[n].dtype, n
            assert torch.equal(a[n], b[n]), n

    def taped(log: list[str]) -> bool:
        return bool(log) and all(n.startswith("+") for n in log)

    def trained(log: list[str], make: Callable[[int], KDAInputs], use: Callable[[KDAInputs], Any]) -> Any:
        """What `use` gives of call 5, repeated, and of the same call looked at anew."""
        for seed in range(3):
            use(make(seed))
        x = make(9)
        log.clear()
        got = use(x)
        assert taped(log)
        CALLS.forget()
        BACKWARDS.forget()
        log.clear()
        want = use(x)
        assert not taped(log)
        return got, want

    CASES: dict[str, dict[str, Any]] = {
        "bounded": {"T": 17},
        "softplus": {"gate": "softplus"},
        "log decays, no state": {"gate": None, "initial_state": False},
        "pack": {"T": 17, "lengths": (3, 0, 14)},
        "grouped heads": {"HV": 2},
        "any keys": {"use_qk_l2norm": False, "use_beta_sigmoid": False},
        "batch": {"B": 2, "T": 9},
        "one token": {"T": 1},
    }

    @pytest.mark.parametrize(
        "name, block", [*((n, stages.ONE_BLOCK) for n in CASES), ("bounded", 0), ("grouped heads", 0)]
    )
    def test_the_bits_of_a_call_looked_at_anew(
        log: list[str], monkeypatch: pytest.MonkeyPatch, name: str, block: int
    ) -> None:
        """On other memory and values each time: forward and backward looked at, recorded, repeated by key and by guard."""
        monkeypatch.setattr(stages, "ONE_BLOCK", block)
        same(*trained(log, lambda seed: inputs(seed, **CASES[name]), gradients))

    @pytest.mark.parametrize("name", CASES)
    def test_what_the_forward_keeps_changes_time_and_memory_only(log: list[str], name: str) -> None:
        """`recompute=False`: the same states and gradients, without preparing chunks again; output to rounding, because M T
        stands where M and T did."""
        sizes: dict[bool, int] = {}
        results = {}
        for recompute, calls in ((True, 1), (False, 3)):
            for _ in range(calls):
                x = inputs(3, **CASES[name])
                held: list[int] = []
                with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.nbytes) or t, lambda t: t):  # type: ignore[func-returns-value]  # noqa: B023
                    out = call(x, recompute=recompute)
                named = x.tensors()
                log.clear()
                found = torch.autograd.grad(loss(x, out), list(named.values()))
                assert len([n for n in log if "prepare" in n]) == recompute
            results[recompute] = {"o": out.output.detach(), **dict(zip(named, found, strict=True))}
            sizes[recompute] = sum(held)
        assert taped(log)
        assert sizes[True] < sizes[False]
        for n, want in results[True].items():
            assert torch.allclose(results[False][n], want, rtol=1e-5, atol=1e-6 * float(want.abs().max())), n

    def test_nothing_is_kept_unless_asked_for(log: list[str]) -> None:
        x = inputs()
        call(x)
        assert "keep_kernel" not in log
        with torch.no_grad():
            call(x, recompute=False)
        call(x, recompute=False, state_positions=torch.tensor([3]))
        assert "keep_kernel" not in log
        call(x, recompute=False)
        assert "keep_kernel" in log

    def test_upstream_gradients_of_any_strides(log: list[str]) -> None:
        """Transposed, and the expanded number behind a sum; what is no plain row is copied first, and then repeated too."""

        def use(x: KDAInputs) -> Any:
            out = call(x)
            wide = torch.cat([x.do, x.do], -1)[..., : x.do.shape[-1]]
            named = list(x.tensors().values())
            found = []
            for do in (wide, x.do.transpose(1, 2).contiguous().transpose(1, 2), torch.ones(()).expand_as(x.do)):
                found += torch.autograd.grad(out.output, named, do, retain_graph=True, allow_unused=True)
            return found

        got, want = trained(log, inputs, use)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    @pytest.mark.parametrize("wanted", ["q", "A_log", "initial_state", "g dt_bias", "k v beta"])
    def test_only_what_requires_a_gradient_gets_one(log: list[str], wanted: str) -> None:
        def make(seed: int) -> KDAInputs:
            x = inputs(seed)
            for n, t in x.tensors().items():
                t.requires_grad_(n in wanted.split())
            return x

        def use(x: KDAInputs) -> Any:
            loss(x, call(x)).backward()
            found = {n: t.grad for n, t in x.tensors().items()}
            for t in x.tensors().values():
                t.grad = None
            return found

        got, want = trained(log, make, use)
        for n in got:
            assert (got[n] is not None) == (n in wanted.split())
            assert got[n] is None or torch.equal(got[n], want[n])

    def test_the_final_state_alone(log: list[str]) -> None:
        def use(x: KDAInputs) -> Any:
            final = call(x).final_state
            assert final is not None
            named = [t for n, t in x.tensors().items() if n != "q"]
            return torch.autograd.grad((final * x.dS).sum(), named)

        got, want = trained(log, inputs, use)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def test_a_graph_may_be_run_twice_and_gradients_accumulate(log: list[str]) -> None:
        for seed in range(4):
            x = inputs(seed)
            out = loss(x, call(x))
            out.backward(retain_graph=True)
            once = {n: t.grad.clone() for n, t in x.tensors().items() if t.grad is not None}
            log.clear()
            out.backward()
        assert taped(log)
        for n, t in x.tensors().items():
            assert t.grad is not None and torch.equal(t.grad, once[n] + once[n])
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing(log: list[str], reentrant: bool) -> None:
        def use(x: KDAInputs) -> Any:
            names = list(x.tensors())
            run = lambda *t: loss(x, call(x))  # noqa: E731
            checkpoint(run, *x.tensors().values(), use_reentrant=reentrant).backward()
            found = [x.tensors()[n].grad for n in names]
            for t in x.tensors().values():
                t.grad = None
            return found

        got, want = trained(log, inputs, use)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def test_many_upstream_gradients_at_once_are_taken_one_by_one(log: list[str]) -> None:
        for seed in range(4):
            x = inputs(seed)
            o, leaves = call(x).output, [x.q, x.v, x.initial_state]
            one = torch.autograd.grad(o, leaves, x.do, retain_graph=True)
            two = torch.autograd.grad(o, leaves, -x.do, retain_graph=True)
            both = torch.autograd.grad(o, leaves, torch.stack([x.do, -x.do]), is_grads_batched=True)
            assert all(torch.equal(b, torch.stack([p, q])) for b, p, q in zip(both, one, two, strict=True))
        assert CALLS.replays and BACKWARDS.replays

    def test_a_second_derivative_is_refused(log: list[str]) -> None:
        for seed in range(3):
            gradients(inputs(seed))
        x = inputs(9)
        (dq,) = torch.autograd.grad(loss(x, call(x)), x.q, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(dq.sum(), x.k)

    @pytest.mark.parametrize("name", ["q", "v", "A_log", "o"])
    def test_a_saved_tensor_that_was_changed_is_noticed(log: list[str], name: str) -> None:
        for seed in range(3):
            gradients(inputs(seed))
        x = inputs(9)
        out = call(x)
        assert taped(log[-1:])
        with torch.no_grad():
            (out.output if name == "o" else x.tensors()[name]).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss(x, out).backward()

    def test_hooks_on_saved_tensors_may_hand_back_other_strides(log: list[str]) -> None:
        """As `save_on_cpu` does: what the forward read strided, the backward gets dense."""

        def make(seed: int) -> KDAInputs:
            x = inputs(seed)
            x.q = torch.cat([x.q.detach(), x.q.detach()], -1)[..., :16].requires_grad_()
            x.k = x.k.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
            return x

        for seed in range(4):
            x = make(seed)
            want = gradients(x)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t
            ):
                same(gradients(x), want)

    @pytest.mark.parametrize("keep", [False, True], ids=["computed again", "kept"])
    @pytest.mark.parametrize("name", ["bounded", "softplus", "pack", "grouped heads"])
    def test_hooks_on_saved_tensors_may_hand_back_any_layout(log: list[str], name: str, keep: bool) -> None:
        """What the kernels step through densely (output, gate parameters, offsets, what the forward kept), too."""

        def pack(t: Tensor) -> Tensor:
            return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else torch.stack([t, t], 1)[:, 0]

        for seed in range(4):
            x = inputs(seed, **CASES[name])
            want = gradients(x, recompute=not keep)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                got = gradients(x, recompute=not keep)
            assert all(torch.equal(got[n], want[n]) for n in want)

    def test_gradients_are_not_lost_behind_calls_without(log: list[str]) -> None:
        """The same leaves, first without gradients: whether autograd is on is part of what a call is known by."""
        for seed in range(4):
            x = inputs(seed)
            for t in (x.q, x.k, x.v, x.g, x.beta):
                t.requires_grad_(False)
            with torch.no_grad():
                assert not call(x).output.requires_grad
        out = call(x)
        assert out.output.requires_grad and out.final_state is not None and out.final_state.requires_grad
        with torch.no_grad():
            assert not call(x).output.requires_grad
        with torch.inference_mode():
            assert not call(x).output.requires_grad
        assert call(x).output.requires_grad

    def test_nothing_outlives_the_backward(log: list[str]) -> None:
        for seed in range(3):
            gradients(inputs(seed))
        x = inputs(9)
        q = x.q * 1
        out = kda(q, x.k, x.v, x.g, x.beta, **x.kwargs(), impl="triton")
        held = [weakref.ref(q), weakref.ref(out.output)]
        total = loss(x, out)
        assert taped(log[-1:])
        del q, out
        total.backward()
        del total
        gc.collect()
        assert [r() for r in held] == [None, None]

    @pytest.mark.parametrize("form", ["shared", "unaligned"])
    def test_memory_as_no_tape_has_it_goes_the_long_way(log: list[str], form: str) -> None:
        for seed in range(3):
            gradients(inputs(seed))
        x = inputs(9)
        if form == "shared":
            x.k = x.q
        else:
            odd = torch.empty(x.q.numel() + 1)[1:].view(x.q.shape)
            x.q = odd.copy_(x.q.detach()).requires_grad_()
        got = gradients(x) if form == "unaligned" else torch.autograd.grad(loss(x, call(x)), [x.q, x.v])
        CALLS.forget()
        BACKWARDS.forget()
        want = gradients(x) if form == "unaligned" else torch.autograd.grad(loss(x, call(x)), [x.q, x.v])
        pairs = [(got[n], want[n]) for n in got] if isinstance(got, dict) else zip(got, want, strict=True)  # type: ignore[index]
        assert all(torch.equal(a, b) for a, b in pairs)

    def test_states_at_positions_and_steps_have_no_tape(log: list[str]) -> None:
        from openkda.ops.kda.api import kda_step

        for seed in range(4):
            x = inputs(seed)
            out = call(x, state_positions=torch.tensor([3, 7]))
            assert out.states_at is not None
            torch.autograd.grad(loss(x, out) + out.states_at.sum(), list(x.tensors().values()))
        assert not CALLS.replays and not BACKWARDS.replays
        for seed in range(4):
            x = inputs(seed)
            assert x.initial_state is not None
            row = [t[:, 0] for t in (x.q, x.k, x.v, x.g, x.beta)]
            o, state = kda_step(*row, x.initial_state, gate=x.gate, impl="triton")
            assert o.shape == row[2].shape and o.requires_grad and state.requires_grad
            torch.autograd.grad(o.sum() + state.sum(), x.initial_state)

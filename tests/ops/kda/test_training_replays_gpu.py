"""Repeated training calls on a GPU: the bits of calls looked at anew, on any stream, in threads, in a CUDA graph, in as little
memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.ops.kda.api import kda
from openkda.ops.kda.call import CALLS
from openkda.testing.inputs import KDAInputs, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES: dict[str, dict[str, Any]] = {
    "bounded": {},
    "bounded, no state": {"initial_state": False},
    "softplus": {"gate": "softplus"},
    "pack": {"lengths": (70, 0, 330)},
    "grouped heads": {"HV": 4, "gate": "softplus"},
    "any keys": {"use_qk_l2norm": False, "gate": None, "use_beta_sigmoid": False},
    "float32": {"dtype": torch.float32, "T": 90, "K": 64},
}


def inputs(seed: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> KDAInputs:
    given: dict[str, Any] = {"T": 400, "H": 2, "K": 128, "use_qk_l2norm": True, "use_beta_sigmoid": True} | options
    return make_inputs(seed, **given).to(dtype=dtype, device="cuda").requires_grad_()


def gradients(x: KDAInputs) -> dict[str, Tensor]:
    named = x.tensors()
    out = kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs())
    found = torch.autograd.grad((out.output, out.final_state), list(named.values()), (x.do, x.dS))
    return {"o": out.output.detach(), **dict(zip(named, found, strict=True))}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for n in a:
        assert (a[n].shape, a[n].dtype) == (b[n].shape, b[n].dtype), n
        wrong = int((a[n] != b[n]).sum())  # a number, because pytest would print the tensors
        assert wrong == 0, n


def forget() -> None:
    from openkda.ops.kda.triton.autograd import BACKWARDS

    CALLS.forget()
    BACKWARDS.forget()


def taped() -> tuple[int, int]:
    from openkda.ops.kda.triton.autograd import BACKWARDS

    return len(CALLS.replays), len(BACKWARDS.replays)


def warm(**options: Any) -> None:
    forget()
    for seed in range(4):
        gradients(inputs(seed, **options))
    assert taped() == (1, 1)


@pytest.mark.parametrize("name, block", [*((n, None) for n in CASES), ("bounded", 0), ("any keys", 0)])
def test_the_bits_of_a_call_looked_at_anew(monkeypatch: pytest.MonkeyPatch, name: str, block: int | None) -> None:
    from openkda.ops.triton import stages

    if block is not None:
        monkeypatch.setattr(stages, "ONE_BLOCK", block)
    warm(**CASES[name])
    x = inputs(7, **CASES[name])
    got = gradients(x)
    assert taped() == (1, 1)
    forget()
    same(got, gradients(x))
    assert taped() == (0, 0)


@pytest.mark.parametrize("name", ["bounded", "softplus", "pack", "any keys"])
def test_what_the_forward_keeps_changes_time_and_memory_only(name: str) -> None:
    x = inputs(7, **CASES[name])
    found = {}
    for recompute in (True, False):
        forget()
        x.options["recompute"] = recompute
        for _ in range(4):
            found[recompute] = gradients(x)
        assert taped() == (1, 1)
    for n, want in found[True].items():
        scale = max(want.float().norm(), 1e-3 * found[True]["q"].float().norm())
        error = float((found[False][n].float() - want.float()).norm() / scale)
        assert error <= 8e-3, n


def test_on_another_stream() -> None:
    warm()
    x = inputs(7)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # whoever launched elsewhere would read and write too early
        x.q.data.mul_(2)
        got = gradients(x)
    stream.synchronize()
    forget()
    same(got, gradients(x))


def test_in_threads() -> None:
    warm()
    results: dict[int, list[dict[str, Tensor]]] = {}

    def run(i: int) -> None:
        x = inputs(i)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            results[i] = [gradients(x) for _ in range(20)]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    forget()
    for i in range(4):
        want = gradients(inputs(i))
        for got in results[i]:
            same(got, want)


def test_in_a_graph() -> None:
    warm()
    x = inputs(7)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(x)
    fresh = inputs(8)
    with torch.no_grad():
        for a, b in zip(x.tensors().values(), fresh.tensors().values(), strict=True):
            a.copy_(b)
        x.do.copy_(fresh.do)
        x.dS.copy_(fresh.dS)
    graph.replay()
    torch.cuda.synchronize()
    forget()
    same(got, gradients(fresh))


def test_memory_is_dropped_as_early() -> None:
    """Peak above the inputs, and nothing left behind. In one thread: torch's own for gradients may still hold them when the
    caller already has them."""

    def peak(x: KDAInputs) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autograd.set_multithreading_enabled(False):
            gradients(x)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        return torch.cuda.max_memory_allocated() - before

    options: dict[str, Any] = {"T": 2048, "H": 16, "initial_state": False}
    warm(**options)
    x = inputs(7, **options)
    repeated = peak(x)
    assert taped() == (1, 1)
    forget()
    assert repeated <= peak(x) * 1.01


def test_a_tensor_changed_in_between_is_noticed() -> None:
    warm()
    x = inputs(7)
    out = kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs())
    with torch.no_grad():
        x.v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.output.sum().backward()


@pytest.mark.parametrize("name", ["bounded", "softplus", "pack", "any keys"])
def test_at_the_same_addresses_calls_are_graphs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On the values that lie there now, forward and backward; and inside a capture they are kernels."""
    from openkda.ops.triton.graphs import TIMES, Graphs

    launch, launched = Graphs.launch, [0]

    def counted(self: Graphs, *arguments: Any) -> int | None:
        status = launch(self, *arguments)
        launched[0] += status is not None
        return status

    monkeypatch.setattr(Graphs, "launch", counted)
    forget()
    x, fresh = inputs(7, **CASES[name]), inputs(8, **CASES[name])
    # Memory of something dropped earlier that is collected meanwhile moves the next call's: it takes as many calls as it takes.
    for _ in range(8 * TIMES):
        before = launched[0]
        gradients(x)
        if launched[0] == before + 2:
            break
    assert launched[0] == before + 2
    with torch.no_grad():
        for a, b in zip(x.tensors().values(), fresh.tensors().values(), strict=True):
            a.copy_(b)
        x.do.copy_(fresh.do)
        x.dS.copy_(fresh.dS)
    before = launched[0]
    got = gradients(x)
    assert launched[0] == before + 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(x)
    assert launched[0] == before + 2
    graph.replay()
    torch.cuda.synchronize()
    forget()
    want = gradients(fresh)
    same(got, want)
    same(captured, want)


def test_another_thread_may_capture_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made and dropped in a mode that does not end it."""
    from openkda.ops.triton import graphs

    make, made = graphs.GraphDriver.make, []
    monkeypatch.setattr(graphs.GraphDriver, "make", lambda *arguments: made.append(make(*arguments)) or made[-1])
    forget()
    x, y = inputs(7), inputs(8)
    for _ in range(4):
        gradients(x)
    torch.cuda.synchronize()
    warm, captures, done = threading.Event(), threading.Event(), threading.Event()

    def beside() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.autograd.set_multithreading_enabled(False):
                for _ in range(2):
                    gradients(y)  # memory of that stream: torch cannot ask for more while someone captures
                warm.set()
                captures.wait(60)
                for _ in range(8 * graphs.TIMES):
                    gradients(y)
                forget()
        finally:
            warm.set()
            done.set()

    thread = threading.Thread(target=beside)
    thread.start()
    warm.wait(60)
    with torch.cuda.stream(torch.cuda.Stream()), torch.autograd.set_multithreading_enabled(False):
        gradients(x)
        torch.cuda.synchronize()
        graph, before = torch.cuda.CUDAGraph(), len(made)
        graph.capture_begin(capture_error_mode="global")
        got = gradients(x)
        captures.set()
        done.wait(60)
        graph.capture_end()
    thread.join()
    assert len(made) >= before + 2 and None not in made
    graph.replay()
    torch.cuda.synchronize()
    forget()
    same(got, gradients(x))

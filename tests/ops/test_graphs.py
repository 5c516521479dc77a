"""Launches that become a CUDA graph where the same addresses come again, on a CPU."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from fake_cuda import Card, fake_card

import openkda.ops.kda.triton as kernels
from openkda.ops.kda.api import BoundedGate, kda
from openkda.ops.kda.call import CALLS
from openkda.ops.kda.triton import backward as backward_host
from openkda.ops.kda.triton.autograd import BACKWARDS
from openkda.ops.triton import graphs, launch

H, D = 2, 64


class Allocator:
    """Memory at as few addresses as a GPU's allocator gives: of each kind of tensor some, in turn. sets: how many calls it
    takes until the first addresses come again."""

    def __init__(self) -> None:
        self.sets = 1
        self.made: dict[Any, list[Tensor]] = {}
        self.taken: dict[Any, int] = {}
        self.upstream = torch.zeros(1, 40, H, D, dtype=torch.bfloat16)

    def __call__(self, *like: Any) -> Tensor:
        found, n = self.made.setdefault(like, []), self.taken.get(like, 0)
        self.taken[like] = n + 1
        while len(found) <= n:
            found.append(torch.empty_strided(*like[:2], dtype=like[2]))
        return found[n].detach()

    def next_call(self, number: int) -> None:
        if number % self.sets == 0:
            self.taken.clear()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(launch, "_allocator", lambda device: found)
    return found


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, memory: Allocator) -> Iterator[Card]:
    monkeypatch.setattr(kernels, "triton_refusals", lambda x: [])
    for host in ("HOPPER_WALKS", "HOPPER_PRODUCTS", "HOPPER_GRADIENTS"):
        monkeypatch.setattr(backward_host, host, False)
    CALLS.forget()
    BACKWARDS.forget()
    with fake_card() as found:
        yield found
        CALLS.forget()
        BACKWARDS.forget()
        gc.collect()
        assert not found.graphs.alive  # they go with their tapes


def inputs(training: bool) -> dict[str, Any]:
    new = lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype).requires_grad_(training)  # noqa: E731
    gate = BoundedGate(-5.0, new(H, dtype=torch.float32), new(H, D, dtype=torch.float32))
    return {n: new(1, 40, H, D) for n in ("q", "k", "v", "g")} | {"beta": new(1, 40, H), "gate": gate}


def run(card: Card, memory: Allocator, x: dict[str, Any], number: int = 0) -> list[Any]:
    """The launches of one call, with its backward if its inputs ask for gradients."""
    memory.next_call(number)
    card.launches.clear()
    o = kda(**x, use_qk_l2norm=True, use_beta_sigmoid=True, impl="triton").output
    if o.requires_grad:
        torch.autograd.grad(o, [x["q"], x["v"], x["gate"].A_log], memory.upstream)
    return list(card.launches)


@pytest.mark.parametrize("training", [False, True])
def test_addresses_that_come_again_are_one_launch(card: Card, memory: Allocator, training: bool) -> None:
    x = inputs(training)
    runs = [run(card, memory, x) for _ in range(9)]
    assert len(runs[0]) == (7 if training else 2) and card.graphs.made == (2 if training else 1)
    assert all(r == runs[3] for r in runs[4:])  # by kernels, then from graphs
    assert card.graphs.launched == 3 * len(runs[0])
    assert [(name, grid) for name, grid, _ in runs[0]] == [(name, grid) for name, grid, _ in runs[8]]
    y = inputs(training)
    launched = card.graphs.launched
    other = run(card, memory, y)
    assert card.graphs.launched == launched and other != runs[8]
    known = {t.data_ptr() for t in (y["q"], y["k"], y["v"], y["g"], y["beta"], y["gate"].A_log, y["gate"].dt_bias)}
    assert known <= {a for _, _, values in other for a in values}
    assert run(card, memory, x) == runs[8] and card.graphs.launched > launched


def test_a_captured_stream_gets_kernels(card: Card, memory: Allocator) -> None:
    """The fake driver fails the test where a graph is made or launched meanwhile."""
    x = inputs(True)
    card.graphs.captures = True
    for _ in range(8):
        run(card, memory, x)
    card.graphs.captures = False
    want = [run(card, memory, x) for _ in range(2)][-1]
    assert card.graphs.launched
    launched, card.graphs.captures = card.graphs.launched, True
    assert run(card, memory, x) == want and card.graphs.launched == launched
    card.graphs.captures = False
    assert run(card, memory, x) == want and card.graphs.launched > launched


def test_a_graph_is_used_by_one_at_a_time(card: Card, memory: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes while another one is inside the driver launches kernels."""
    x = inputs(False)
    want = [run(card, memory, x) for _ in range(8)][-1]
    launch_graph, between = card.graphs.launch, []

    def slow(graph: int, stream: int) -> int:
        monkeypatch.setattr(card.graphs, "launch", launch_graph)
        launched = card.graphs.launched
        between.append(run(card, memory, x))
        assert card.graphs.launched == launched
        card.launches.clear()
        return launch_graph(graph, stream)

    monkeypatch.setattr(card.graphs, "launch", slow)
    assert run(card, memory, x) == want and between == [want]


@pytest.mark.parametrize("sets", [5, 40, 300])
def test_as_many_graphs_as_pay(card: Card, memory: Allocator, monkeypatch: pytest.MonkeyPatch, sets: int) -> None:
    """Layers of one shape have one each. More than there may be push each other out before they are launched again: then no
    new ones are made."""
    monkeypatch.setattr(graphs, "MOST", 20)
    monkeypatch.setattr(graphs, "_AT_ONCE", 25)
    x, rounds = inputs(False), graphs.TIMES + 6
    memory.sets = sets
    for i in range(rounds * sets):
        run(card, memory, x, i)
        assert len(card.graphs.alive) <= 20
    if sets == 5:
        assert card.graphs.made == sets and card.graphs.launched == 2 * (rounds * sets - 2 - sets * graphs.TIMES)
    else:
        assert card.graphs.made <= 25 + card.graphs.launched // 16


def test_what_comes_seldom_is_no_graph(card: Card, memory: Allocator) -> None:
    x = inputs(False)
    for _ in range(2 + graphs.TIMES - 1):
        run(card, memory, x)
    assert not card.graphs.made
    run(card, memory, x)
    assert card.graphs.made == 1


def test_what_the_driver_refuses_is_an_error(card: Card, memory: Allocator) -> None:
    x = inputs(False)
    for _ in range(8):
        run(card, memory, x)
    assert card.graphs.launched
    card.status = 700
    with pytest.raises(RuntimeError, match="error 700"):
        run(card, memory, x)


def test_what_the_driver_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in a row, in a mode that leaves other threads' captures alone; nothing is left of a graph that cannot be made."""
    asked: list[Any] = []
    fail: list[str] = []

    class Function:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, *arguments: Any) -> int:
            n = len(asked)
            values = [a.value if isinstance(a, ctypes.c_void_p) else a for a in arguments]
            if self.name == "cuGraphAddKernelNode_v2":
                node = graphs.KernelNode.from_address(values[4])
                before = values[2][0] if values[2] else None
                asked.append(("node", values[1], before, values[3], node.function, node.parameters))
            elif self.name == "cuThreadExchangeStreamCaptureMode":
                mode = ctypes.c_int.from_address(values[0])
                asked.append(("mode", mode.value))
                mode.value = 2 - mode.value  # the default is 0
            else:
                asked.append((self.name.removeprefix("cuGraph"), values[-1]))
            if self.name in ("cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags"):
                ctypes.c_void_p.from_address(values[0]).value = 100 + n
            return 1 if self.name in fail else 0

    class Library:
        def __getattr__(self, name: str) -> Function:
            return Function(name)

    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", bool, raising=False)
    driver = graphs.GraphDriver(Library())
    nodes = [graphs.KernelNode(f, (3, 1, 1), (128, 1, 1), 64, 1000 + f) for f in (7, 8, 9)]
    made = driver.make(nodes, 11)
    assert asked == [
        ("mode", 2), ("Create", 0),
        ("node", 101, None, 0, 7, 1007), ("node", 101, 102, 1, 8, 1008), ("node", 101, 103, 1, 9, 1009),
        ("InstantiateWithFlags", 0), ("Destroy", 101), ("Upload", 11), ("mode", 0),
    ]  # fmt: skip
    assert made == 105
    for name in ("cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags", "cuGraphUpload"):
        fail[:] = [name]
        asked.clear()
        assert driver.make(nodes, 11) is None and asked[-1] == ("mode", 0)
        assert (("Destroy", 101) in asked) == (name != "cuGraphCreate")
        assert (("ExecDestroy", 105) in asked) == (name == "cuGraphUpload")
    fail.clear()
    asked.clear()
    driver.drop(105)
    assert asked == [("mode", 2), ("ExecDestroy", 105), ("mode", 0)]


def test_a_node_is_laid_out_as_in_cuda_h() -> None:
    where = {name: getattr(graphs.KernelNode, name).offset for name, *_ in graphs.KernelNode._fields_}
    assert where == {
        "function": 0, "grid": 8, "block": 20, "shared": 32, "parameters": 40, "extra": 48, "kernel": 56, "context": 64,
    }  # fmt: skip
    assert ctypes.sizeof(graphs.KernelNode) == 72

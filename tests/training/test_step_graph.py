"""Steps replayed from a CUDA graph: without a GPU the bookkeeping, with one the numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.models.hybrid import HybridLM
from openkda.models.presets import PRESETS
from openkda.ops.packing.api import longest_sequence
from openkda.training import graph as graphs
from openkda.training.batches import Batch
from openkda.training.evaluate import token_loss
from openkda.training.graph import GraphedGradients, GraphedUpdate, graph_refusals
from openkda.training.metrics import read_metrics
from openkda.training.optim import Optimizer
from openkda.training.options import TrainOptions
from openkda.training.train import resume, train

Make = Callable[..., TrainOptions]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MODEL = PRESETS["tiny"]


def batch(*lengths: int, seed: int = 0) -> Batch:
    ids = torch.randint(0, 257, (1, sum(lengths) + 1), generator=torch.Generator().manual_seed(seed))
    cu = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), cu)


def test_documents_are_padded_by_empty_ones() -> None:
    for lengths, many in (((5,), 1), ((5, 6), 2), ((1, 1, 9), 4), ((3,) * 9, 16)):
        one = batch(*lengths)
        assert graphs._size(one) == (sum(lengths), many)
        padded = graphs._padded(one, many)
        assert padded.cu_seqlens.tolist() == one.cu_seqlens.tolist() + [sum(lengths)] * (many - len(lengths))
        assert padded.input_ids is one.input_ids


def test_when_there_is_none(options: Make) -> None:
    model, cuda = HybridLM(MODEL), torch.device("cuda")
    assert graph_refusals(model, options(), cuda) == []
    assert "needs a GPU, not cpu" in graph_refusals(model, options(), torch.device("cpu"))
    for changes, reason in (
        ({"recompute": True}, "random state"),
        ({"cuda_graph": False}, "false"),
        ({"qk_clip": 9.0}, "qk_clip"),
    ):
        assert reason in " ".join(graph_refusals(model, options(**changes), cuda))
    experts = MODEL.replace(num_experts=4, num_experts_per_token=2, moe_intermediate_size=16)
    assert "experts" in " ".join(graph_refusals(HybridLM(experts), options(), cuda))


class FakeGraph:
    """Computes what was captured when it is replayed, and not before."""

    run: Callable[[], None]

    def replay(self) -> None:
        self.run()

    def pool(self) -> int:
        return 7


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """A CPU that says it has streams and graphs. Returns the graphs that were captured."""
    made: list[FakeGraph] = []
    computes = GraphedGradients._run
    inside: list[FakeGraph] = []

    def run(self: GraphedGradients, one: Batch) -> Tensor:
        if not inside:
            return computes(self, one)
        loss, fake = torch.zeros(()), inside[0]

        def again() -> None:
            loss.copy_(computes(self, one))

        fake.run = again
        return loss

    @contextmanager
    def capture(fake: FakeGraph, pool: Any = 7, *, capture_error_mode: str) -> Iterator[None]:
        assert pool == 7 or not made, "graphs share their memory"
        inside.append(fake)
        yield
        made.append(inside.pop())

    class Stream:
        def __init__(self, *_: Any) -> None: ...

        def wait_stream(self, _: Any) -> None: ...

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    updates = GraphedUpdate._run

    def update(self: GraphedUpdate) -> None:
        if not inside:
            updates(self)
        else:
            inside[0].run = lambda: updates(self)

    monkeypatch.setattr(GraphedGradients, "_run", run)
    monkeypatch.setattr(GraphedUpdate, "_run", update)
    only_rates = lambda self: [g.update(lr=torch.tensor(g["lr"])) for g in self._param_groups()]  # noqa: E731
    monkeypatch.setattr(Optimizer, "make_capturable", only_rates)  # torch wants a GPU for the rest
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr("openkda.training.trainer.graph_refusals", lambda *_: [])
    return made


def losses(options: TrainOptions) -> list[float]:
    return [line["loss"] for line in read_metrics(train(options).out / "metrics.jsonl") if "loss" in line]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_takes_the_steps_of_a_plain_one(
    options: Make, monkeypatch: pytest.MonkeyPatch, faked: list[FakeGraph], accumulate: int
) -> None:
    """Gradients accumulate in place and start from zero, the warm-up leaves nothing behind, the longest document is a bound."""
    seen: list[int] = []
    good = graphs.token_loss

    def token_loss(model: Any, one: Batch, **kwargs: Any) -> Tensor:
        seen.append(longest_sequence(one.cu_seqlens))
        return good(model, one, **kwargs)

    monkeypatch.setattr(graphs, "token_loss", token_loss)
    got = losses(options("graphed", accumulate=accumulate))
    assert 2 <= len(faked) <= 5 and seen[0] == 24
    monkeypatch.setattr("openkda.training.trainer.graph_refusals", lambda *_: ["no"])
    want = losses(options("plain", accumulate=accumulate))
    assert len(got) == 6 and all(abs(a - b) < 1e-5 * b for a, b in zip(got, want, strict=True))


def test_what_cannot_be_captured_is_launched(
    options: Make, monkeypatch: pytest.MonkeyPatch, faked: list[FakeGraph], caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def fails(self: GraphedGradients, one: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        token_loss(self.model, one, dtype=self.dtype).backward()
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr(GraphedGradients, "_run", fails)
    with caplog.at_level(logging.WARNING, logger="openkda.training"):
        got = losses(options("graphed"))
    assert (
        calls == 1 and "training without CUDA graphs: operation not permitted when stream is capturing" in caplog.text
    )
    monkeypatch.setattr("openkda.training.trainer.graph_refusals", lambda *_: ["no"])
    assert all(abs(a - b) < 1e-5 * b for a, b in zip(got, losses(options("plain")), strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_on_a_gpu(dtype: torch.dtype) -> None:
    """Batches of one size and of others, one after the other, with the graphs' memory shared: those of the launched calls."""
    model = HybridLM(MODEL.replace(kda_head_dim=128, kda_num_heads=2, hidden_size=128))
    model.init_weights(0)
    model.cuda().train()
    names, parameters = zip(*model.named_parameters(), strict=True)
    graphed = GraphedGradients(model, dtype=dtype, parts=2, longest=200)
    several = [
        batch(70, 1, 129),
        batch(100, 50, 50, seed=1),
        batch(200, seed=2),
        batch(70, 1, 129),
        batch(*[8] * 25, seed=3),
    ]
    for turn, one in enumerate([*several, *several]):
        want = token_loss(model, one.to(torch.device("cuda")), dtype=dtype) / 2
        wanted = torch.autograd.grad(want, parameters)
        got = graphed(one)
        assert abs(got.item() - want.item()) < 1e-4 * want.item(), turn
        whole = max(g.norm().item() for g in wanted)
        for n, p, g in zip(names, parameters, wanted, strict=True):
            assert p.grad is not None
            limit = (1e-5 if dtype == torch.float32 else 1e-3) * max(g.norm().item(), 1e-2 * whole)
            assert (p.grad - g).norm().item() < limit, (turn, n)
            p.grad.zero_()
    assert len(graphed._graphs) == 3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_on_a_gpu(options: Make, accumulate: int) -> None:
    """With a graph and without one: the same losses up to torch's atomic sums, validation and resuming between replays."""
    runs = {
        name: train(
            options(name, device="cuda", accumulate=accumulate, cuda_graph=name == "graphed", checkpoint_every=3)
        )
        for name in ("graphed", "plain")
    }
    got, want = (
        [line["loss"] for line in read_metrics(r.out / "metrics.jsonl") if "loss" in line] for r in runs.values()
    )
    assert all(abs(a - b) < 2e-3 * b for a, b in zip(got, want, strict=True)), (got, want)
    resumed = resume(runs["graphed"].out / "step-3")
    assert resumed.step == 6 and abs(resumed.val_loss - runs["plain"].val_loss) < 2e-3 * resumed.val_loss

"""Steps replayed from a CUDA graph: without a GPU the bookkeeping, with one the numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
    graphed = GraphedGradients(HybridLM(MODEL), dtype=torch.float32, parts=1, longest=9)
    for lengths, many in (((5,), 2), ((5, 6), 4), ((1, 1, 9), 8), ((3,) * 9, 32)):
        one = batch(*lengths)
        assert graphed._size(one) == (sum(lengths), many)
        padded = graphs._padded(one, many)
        assert padded.cu_seqlens.tolist() == one.cu_seqlens.tolist() + [sum(lengths)] * (many - len(lengths))
        assert padded.input_ids is one.input_ids
    for room in (16, 8):
        graphed._graphs[27, room] = None  # type: ignore[assignment]
    assert graphed._size(batch(*[9] * 3)) == (27, 8) and graphed._size(batch(*[3] * 9)) == (27, 16), (
        "the smallest with room"
    )
    assert graphed._size(batch(28)) == (28, 2) and graphed._size(batch(*[1] * 27)) == (27, 64)


def test_when_there_is_none(options: Make) -> None:
    model, cuda = HybridLM(MODEL), torch.device("cuda")

    def reasons(model: HybridLM, options: TrainOptions, dtype: torch.dtype = torch.bfloat16) -> str:
        return " ".join(graph_refusals(model, options, dtype, cuda))

    assert reasons(model, options()) == ""
    assert "needs a GPU, not cpu" in graph_refusals(model, options(), torch.bfloat16, torch.device("cpu"))
    assert reasons(model, options(), torch.float32) == "attention: it wants 16-bit inputs, not torch.float32"
    for changes, reason in (
        ({"recompute": True}, "random state"),
        ({"cuda_graph": False}, "false"),
        ({"qk_clip": 9.0}, "qk_clip"),
    ):
        assert reason in reasons(model, options(**changes))
    experts = MODEL.replace(num_experts=4, num_experts_per_token=2, moe_intermediate_size=16)
    assert "experts" in reasons(HybridLM(experts), options())


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
    monkeypatch.setattr(graphs, "_no_waiting", nullcontext)
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
        seen.append(longest_sequence(one.cu_seqlens, 99))
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
def test_gradients_on_a_gpu() -> None:
    """Batches of one size and of others, one after the other, with the graphs' memory shared: those of the launched calls."""
    model = HybridLM(MODEL.replace(kda_head_dim=128, kda_num_heads=2, hidden_size=128))
    model.init_weights(0)
    model.cuda().train()
    names, parameters = zip(*model.named_parameters(), strict=True)
    graphed = GraphedGradients(model, dtype=torch.bfloat16, parts=2, longest=200)
    several = [
        batch(70, 1, 129),
        batch(100, 50, 50, seed=1),
        batch(200, seed=2),
        batch(*[8] * 25, seed=3),
        batch(64, 1, 64),
    ]
    for turn, one in enumerate([*several, *several]):
        got = graphed(one).item()
        kept = [p.grad.clone() for p in parameters if p.grad is not None]
        for p in parameters:
            assert p.grad is not None
            p.grad.zero_()
        want = token_loss(model, one.to(torch.device("cuda")), dtype=torch.bfloat16) / 2
        wanted = torch.autograd.grad(want, parameters)
        assert abs(got - want.item()) < 1e-4 * want.item(), turn
        del want  # what autograd keeps of a launched call belongs to its stream, which a capture may not touch
        whole = max(g.norm().item() for g in wanted)
        for n, g, w in zip(names, kept, wanted, strict=True):
            assert (g - w).norm().item() < 1e-3 * max(w.norm().item(), 1e-2 * whole), (turn, n)
    assert set(graphed._graphs) == {(200, 8), (200, 64), (129, 8)}


@pytest.mark.gpu
@needs_gpu
def test_a_step_that_waits_for_the_gpu_is_launched(
    options: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is found before the capture."""
    good = graphs.token_loss

    def waits(*args: Any, **kwargs: Any) -> Tensor:
        loss = good(*args, **kwargs)
        return loss * (1.0 + 0.0 * loss.item())

    monkeypatch.setattr(graphs, "token_loss", waits)
    with caplog.at_level(logging.WARNING, logger="openkda.training"):
        result = train(options("waits", device="cuda"))
    assert result.step == 6 and "without CUDA graphs: called a synchronizing CUDA operation" in caplog.text


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


@pytest.mark.gpu
@needs_gpu
def test_a_run_that_was_stopped_goes_on_to_the_bit_on_a_gpu(options: Make) -> None:
    """Its first steps are launched where those of the whole run were replayed; and a run may go on with graphs or without."""
    model = {"kda_head_dim": 128, "hidden_size": 128}
    whole = train(options("whole", device="cuda", steps=12, checkpoint_every=6, keep=9, model=model))

    def losses(out: Any) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line}

    want = losses(whole.out)
    for settings in ((), ("cuda_graph=false",)):
        resumed = resume(whole.out / "step-6", settings=settings)
        assert resumed.step == 12 and losses(resumed.out) == want, settings

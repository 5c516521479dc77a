"""Gradients of a micro-batch replayed from a CUDA graph: one call of the host instead of some thousand.

A step of the 100 M model has 1,750 launches forward and backward. On an H200's host they took 108 ms, the GPU 84: it waited.
A graph holds the launches of one size of batch, so what changes from batch to batch is padded: documents, by empty ones, to
what an earlier graph has room for, else to twice their number and more. Its memory is its own (all graphs share one pool;
while a second one is captured two steps' memory is needed), and so are the gradients it adds to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.layers.mla import GatedMLA
from openkda.layers.moe import SparseMoE
from openkda.models.hybrid import HybridLM
from openkda.ops.device.api import on_device
from openkda.ops.mla.api import reads_packs
from openkda.ops.packing.api import declare_longest
from openkda.training.batches import Batch
from openkda.training.evaluate import token_loss
from openkda.training.optim import Optimizer
from openkda.training.options import TrainOptions

log = logging.getLogger("openkda.training")

WARM_UP = 4
"""Calls before a capture: kernels are compiled by the first, repeated calls are recorded by the second and third."""

MOST = 16
"""Graphs; batches of still other sizes go without one."""


def graph_refusals(model: HybridLM, options: TrainOptions, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Why the steps of a run are launched one by one; empty when they can be replayed."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"needs a GPU, not {device.type}")
    if not options.cuda_graph:
        reasons.append("cuda_graph is false")
    if options.recompute:
        reasons.append("recompute looks at the random state, which a capture may not")
    if any(isinstance(m, SparseMoE) for m in model.modules()):
        reasons.append("experts count their tokens in fresh memory")
    widths = [(m.q_dim, m.v_dim) for m in model.modules() if isinstance(m, GatedMLA)]
    reasons += {f"attention: {r}" for q, v in widths for r in reads_packs(dtype, q, v)}
    if options.qk_clip is not None:
        reasons.append("qk_clip reads how long each document is")
    return reasons


@dataclass
class _Graph:
    """One size of batch: what a replay reads, and the loss that it writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    loss: Tensor


class GraphedGradients:
    """The loss of micro-batches over `parts`. Each call adds its gradient to those of the parameters, which stay where they
    are: between steps they are set to zero in place, not to None."""

    def __init__(self, model: HybridLM, *, dtype: torch.dtype, parts: int, longest: int) -> None:
        self.model, self.dtype, self.parts, self.longest = model, dtype, parts, longest
        self.device = next(model.parameters()).device
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None

    def takes(self, batch: Batch) -> bool:
        """Whether there is a graph for this size, or room for one more."""
        return self._size(batch) in self._graphs or len(self._graphs) < MOST

    def _size(self, batch: Batch) -> tuple[int, int]:
        """(tokens, documents that there is room for)."""
        tokens, documents = batch.input_ids.numel(), batch.cu_seqlens.numel() - 1
        fitting = [room for known, room in self._graphs if known == tokens and room >= documents]
        return tokens, min(fitting, default=1 << (2 * documents - 1).bit_length())

    def __call__(self, batch: Batch) -> Tensor:
        """batch: on the host. The loss is overwritten by the next call. Raises RuntimeError, with the gradients as they were,
        where something cannot be captured."""
        key = self._size(batch)
        padded = _padded(batch, key[1])
        found = self._graphs.get(key)
        with on_device(self.device):
            if found is None:
                found = self._graphs[key] = self._captured(padded)
            else:
                _fill(found.batch, padded)
            found.graph.replay()
        return found.loss

    def _captured(self, padded: Batch) -> _Graph:
        ids, targets, cu = (torch.empty_like(t, device=self.device) for t in padded.tensors())
        batch = Batch(ids, targets, cu)
        _fill(batch, padded)
        declare_longest(cu, self.longest)
        self._warm_up(batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # empties the cache first
            loss = self._run(batch)
        self._pool = graph.pool()
        log.info("training: a CUDA graph for %d tokens in up to %d documents", ids.numel(), cu.numel() - 1)
        return _Graph(graph, batch, loss)

    def _warm_up(self, batch: Batch) -> None:
        """What it adds to the gradients is taken away again; where there were none there are zeros then."""
        parameters = list(self.model.parameters())
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        here, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP - 1):
                    self._run(batch)
                with _no_waiting():
                    self._run(batch)
        finally:
            here.wait_stream(side)
            for p, kept in zip(parameters, before, strict=True):
                if p.grad is not None:
                    p.grad.zero_() if kept is None else p.grad.copy_(kept)

    def _run(self, batch: Batch) -> Tensor:
        loss = token_loss(self.model, batch, dtype=self.dtype) / self.parts
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        return loss.detach()


class GraphedUpdate:
    """The optimizer's step, and gradients of zero behind it, as one CUDA graph from the fourth call on: the first makes the
    parameters' states. The gradients have to lie where they lay."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        self._calls += 1
        if self._graph is None and self._calls < WARM_UP:
            self._run()
            return
        with on_device(self.device):
            if self._graph is None:
                self.optimizer.make_capturable()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._run()
                self._graph = graph
            self._graph.replay()

    def _run(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(keep=True)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """RuntimeError where the host waits for the GPU: found here, and not in a capture, from which not every driver recovers."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _padded(batch: Batch, documents: int) -> Batch:
    """With empty documents behind the last."""
    cu = batch.cu_seqlens
    more = documents + 1 - cu.numel()
    return Batch(batch.input_ids, batch.targets, F.pad(cu, (0, more), value=batch.input_ids.numel()))


def _fill(target: Batch, source: Batch) -> None:
    for to, t in zip(target.tensors(), source.tensors(), strict=True):
        to.copy_(t.pin_memory() if to.is_cuda else t, non_blocking=True)

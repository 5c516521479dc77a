"""Decoding steps replayed from a CUDA graph: small batches wait for Python and for launches, hardly for the GPU.

A graph reads and writes the same memory every time. So the states live in tensors that stay where they are, with room for more
tokens in the latent caches; when the room is used up they move into larger ones, and the step is captured again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from openkda.generation.decoder import Decoder, check_step
from openkda.layers.state import KDAState, LayerState, MLAState, ModelState
from openkda.models.hybrid import HybridLM

ROOM = 512
"""Tokens until the next capture, which takes a few steps' time and a copy of the latent caches."""


class FixedStep:
    """One step on tensors that stay where they are: `token` [N, 1] goes in, `logits` [N, 1, vocab] come out, `state` moves on.

    state: is copied. room: steps that fit. In inference mode, like everything here.
    """

    def __init__(self, model: HybridLM, state: ModelState, room: int) -> None:
        self.model, self.room, self.done = model, room, 0
        self.state = tuple(_with_room(layer, room) for layer in state)
        device = next(model.parameters()).device
        self.token = torch.zeros(state[0].num_sequences, 1, dtype=torch.int64, device=device)
        self.logits: Tensor | None = None

    def run(self) -> None:
        """Everything here is done by the GPU alone: nothing is read back, no size depends on the number of tokens so far."""
        # A fresh tail: these tensors are the newest state of their buffers every time.
        before = tuple(replace(s, tail=[s.length]) if isinstance(s, MLAState) else s for s in self.state)
        out = self.model(self.token, state=before, return_state=True)
        for mine, new in zip(self.state, out.state or (), strict=True):
            if isinstance(mine, MLAState) and isinstance(new, MLAState):  # everything else was written in place
                mine.length.copy_(new.length)
        self.logits = out.logits

    def ordinary_state(self) -> ModelState:
        """A copy that does not change with further steps."""
        return tuple(_without_room(layer, self.room - self.done) for layer in self.state)


def _with_room(layer: LayerState, room: int) -> LayerState:
    if isinstance(layer, KDAState):
        rows = torch.arange(layer.num_sequences, dtype=torch.int32, device=layer.recurrent.device)
        return replace(_copy(layer), slots=rows)
    longest = int(layer.length.max()) if layer.longest is None else layer.longest
    latent = layer.latent.new_zeros(layer.latent.shape[0], longest + room, layer.latent.shape[2])
    latent[:, :longest] = layer.latent[:, :longest]
    # One less than the capacity, so that a step reads all of it; what lies behind a row's length is masked.
    return MLAState(latent, layer.length.clone(), longest + room - 1)


def _without_room(layer: LayerState, left: int) -> LayerState:
    if isinstance(layer, KDAState):
        return _copy(layer)
    longest = layer.latent.shape[1] - left
    return MLAState(layer.latent[:, :longest].clone(), layer.length.clone(), longest)


def _copy(layer: KDAState) -> KDAState:
    return KDAState(*(t.clone() for t in layer.tensors()))


def captured(step: FixedStep, state: ModelState) -> Callable[[], None]:
    """`step.run` as a graph. Kernels are compiled and chosen first, on a copy of `state`, so that `step` does not move."""
    device = step.token.device
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        rehearsal = FixedStep(step.model, state, step.room)
        for _ in range(3):
            rehearsal.run()
    torch.cuda.current_stream(device).wait_stream(side)
    del rehearsal
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph.replay


class GraphDecoder(Decoder):
    """`Decoder` whose steps are replayed from a CUDA graph: the same logits.

    The first step after a prefill, `keep` or change of `state`, and one in every `room`, captures anew. Reading `state` makes
    a copy.
    Raises: ValueError for a model that is not on a CUDA device.
    """

    def __init__(
        self, model: HybridLM, *, state: ModelState | None = None, prefill_chunk: int = 1024, room: int = ROOM
    ) -> None:
        if room < 2:
            raise ValueError(f"room: expected at least 2 tokens, received {room}")
        self.room = room
        super().__init__(model, state=state, prefill_chunk=prefill_chunk)
        _check_device(self.device)

    @property
    def state(self) -> ModelState | None:  # type: ignore[override]
        return self._state if self._fixed is None else self._fixed.ordinary_state()

    @state.setter
    def state(self, value: ModelState | None) -> None:
        self._state = value
        self._fixed: FixedStep | None = None
        self._replay: Callable[[], None] | None = None

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        if self._fixed is None or self._fixed.done == self.room:
            self._capture(self.state)
        fixed = self._fixed
        assert fixed is not None and self._replay is not None  # for the type checker: _capture made both
        check_step(tokens, fixed.token.shape[0])
        fixed.token.copy_(tokens.unsqueeze(1))
        self._replay()
        fixed.done += 1
        assert fixed.logits is not None
        return fixed.logits[:, 0].clone()  # the next step writes over it

    def _capture(self, state: ModelState | None) -> None:
        if state is None:
            raise ValueError("step: expected a state, from prefill or given to the Decoder; there is none")
        training = self.model.training
        self.model.eval()
        try:
            fixed = FixedStep(self.model, state, self.room)
            self._replay = captured(fixed, state)
        finally:
            self.model.train(training)
        self._state, self._fixed = None, fixed


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"GraphDecoder: expected a model on a CUDA device, received {device}; use Decoder there")

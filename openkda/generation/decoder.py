"""A model and the state of a running batch: prompts in, then one token a row at a time."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openkda.generation.state import select
from openkda.layers.state import ModelState
from openkda.models.hybrid import HybridLM


class Decoder:
    """Continues N sequences with `model`. Row n of every input, output and of the state is sequence n.

    Prompts of different lengths are laid end to end, never padded. The KDA part of the state has the same size whatever the
    length; only the MLA latents grow. Gradients are never recorded; a model in training mode is switched for the call.

    model: any module with HybridLM's forward. state: of earlier tokens, to continue them (see `state.StateStore`).
    prefill_chunk: tokens of the batch processed in one call at most; bounds memory, not the result.
    """

    def __init__(self, model: HybridLM, *, state: ModelState | None = None, prefill_chunk: int = 1024) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk: expected a positive integer, received {prefill_chunk}")
        self.model, self.state, self.prefill_chunk = model, state, prefill_chunk
        self.device = next(model.parameters()).device

    @property
    def state_bytes(self) -> int:
        """Bytes that the state of all rows holds (capacity reserved for tokens to come is not counted)."""
        return 0 if self.state is None else sum(layer.nbytes for layer in self.state)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "N vocab"]:
        """Process prompts (lists of token ids, each at least one) and return the logits of what follows each.

        Raises: ValueError for no prompt, an empty one, or ids outside the vocabulary.
        """
        if not prompts:
            raise ValueError("prompts: expected at least one, received none")
        ids = [token_ids(n, prompt) for n, prompt in enumerate(prompts)]
        for n, prompt in enumerate(ids):
            if not prompt:
                raise ValueError(
                    f"prompt {n}: expected at least one token (begin with the tokenizer's eos_id), received 0"
                )
        self._check_ids([t for prompt in ids for t in prompt])
        done = [0] * len(ids)
        last: list[Tensor | None] = [None] * len(ids)
        while takes := self._next_chunk([len(p) - d for p, d in zip(ids, done, strict=True)]):
            pieces = [p[d : d + take] for p, d, take in zip(ids, done, takes, strict=True)]
            logits = self._run_pack(pieces)
            done = [d + take for d, take in zip(done, takes, strict=True)]
            for n, take in enumerate(takes):
                if take and done[n] == len(ids[n]):
                    last[n] = logits[n]
        return torch.stack([row for row in last if row is not None])

    def step(self, tokens: Int[Tensor, " N"]) -> Float[Tensor, "N vocab"]:
        """One more token for every row; logits of what follows."""
        if self.state is None:
            raise ValueError("step: expected a state, from prefill or given to the Decoder; there is none")
        check_step(tokens, self.state[0].num_sequences)
        return self._forward(tokens.to(self.device).unsqueeze(1), None)[:, 0]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order; a row may come twice (it is forked)."""
        if self.state is not None:
            self.state = select(self.state, rows)

    def _next_chunk(self, left: list[int]) -> list[int]:
        """How many tokens of each row come next; [] when none are left."""
        takes, room = [], self.prefill_chunk
        for n in left:
            takes.append(min(n, room))
            room -= takes[-1]
        return takes if any(takes) else []

    def _run_pack(self, pieces: list[list[int]]) -> Tensor:
        """Logits [N, vocab] after each piece (of no meaning where it is empty)."""
        ids = torch.tensor([[t for piece in pieces for t in piece]], dtype=torch.int64, device=self.device)
        if len(pieces) == 1:
            return self._forward(ids, None)[:, -1]
        ends = torch.tensor([0, *(len(piece) for piece in pieces)], device=self.device).cumsum(0)
        return self._forward(ids, ends)[0]

    @torch.inference_mode()
    def _forward(self, ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        training = self.model.training
        if training:
            self.model.eval()
        try:
            out = self.model(ids, state=self.state, cu_seqlens=cu_seqlens, return_state=True, last_only=True)
        finally:
            if training:
                self.model.train()
        self.state = out.state
        return out.logits

    def _check_ids(self, ids: list[int]) -> None:
        size = self.model.config.vocab_size
        if min(ids) < 0 or max(ids) >= size:
            raise ValueError(f"prompts: expected token ids in [0, {size}), received {min(ids)}..{max(ids)}")


def token_ids(n: int, prompt: Sequence[int]) -> list[int]:
    """Prompt number n as a list of integers. ValueError for anything else, such as text."""
    try:
        return [operator.index(t) for t in prompt]
    except TypeError:
        raise ValueError(
            f"prompt {n}: expected token ids, received {prompt!r:.80}; prompts is a list of lists"
        ) from None


def check_step(tokens: Tensor, rows: int) -> None:
    """ValueError unless `tokens` has one token for each of `rows` sequences."""
    if not isinstance(tokens, Tensor) or tuple(tokens.shape) != (rows,):
        got = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"step: expected a tensor of token ids [N], one for each of {rows} rows, received {got}")

"""From logits to the next token: greedy, temperature, top-k, top-p, no repeated n-gram.

Every sequence draws from a random generator of its own, on the CPU, one number a token: its tokens depend neither on its
neighbours in the batch nor on the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How to continue a prompt. Raises ValueError for a value that means nothing.

    max_new_tokens: tokens at most, 0 or more.
    temperature: 0 = always the most likely token; else logits are divided by it.
    top_k: draw among the k most likely tokens; None = among all.
    top_p: draw among the fewest tokens that hold this much probability, in (0, 1]; after top_k.
    no_repeat_ngram: never make a sequence of so many tokens that the text (its prompt included) holds already; None = no
        such rule. It ends the loops of small models: a byte model that gives a space 0.9 after thirty of them gives it
        all of the nucleus once temperature and top-p have sharpened that.
    seed: sequence i of a batch draws with seed + i unless `generate` is given seeds.
    stop_strings: the text ends before the first of them; they may span tokens. They need a tokenizer.
    stop_tokens: the sequence ends at the first of them, which is not part of it.
    prefill_chunk: tokens of the prompts processed at a time, over the whole batch; bounds memory, not the result.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    no_repeat_ngram: int | None = None
    seed: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    prefill_chunk: int = 1024

    def __post_init__(self) -> None:
        if isinstance(self.stop_strings, str):
            raise ValueError(f"stop_strings: expected a tuple of strings, received the string {self.stop_strings!r}")
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        checks = (
            ("max_new_tokens", _is_int(self.max_new_tokens) and self.max_new_tokens >= 0, "an integer, 0 or more"),
            ("temperature", _is_number(self.temperature) and 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k is None or (_is_int(self.top_k) and self.top_k >= 1), "a positive integer or None"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            (
                "no_repeat_ngram",
                self.no_repeat_ngram is None or (_is_int(self.no_repeat_ngram) and self.no_repeat_ngram >= 1),
                "a positive integer or None",
            ),
            ("seed", _is_int(self.seed), "an integer"),
            ("stop_strings", all(isinstance(s, str) and s for s in self.stop_strings), "strings, none empty"),
            ("stop_tokens", all(_is_int(t) and t >= 0 for t in self.stop_tokens), "token ids"),
            ("prefill_chunk", _is_int(self.prefill_chunk) and self.prefill_chunk >= 1, "a positive integer"),
        )
        for name, good, expected in checks:
            if not good:
                raise ValueError(f"{name}: expected {expected}, received {getattr(self, name)!r}")


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def greedy(logits: Float[Tensor, "N V"]) -> Int[Tensor, " N"]:
    """The most likely token of each row; of equal ones the first."""
    return logits.argmax(-1)


def keep_top_k(logits: Float[Tensor, "N V"], k: int) -> Float[Tensor, "N V"]:
    """The k largest logits of each row, the others -inf. Exactly k survive, also among equals."""
    if k >= logits.shape[-1]:
        return logits
    values, at = logits.topk(k)
    return torch.full_like(logits, -torch.inf).scatter(-1, at, values)


def keep_top_p(logits: Float[Tensor, "N V"], p: float) -> Float[Tensor, "N V"]:
    """The fewest most likely tokens whose probabilities sum to at least p, the others -inf. At least one survives.

    Source: Holtzman et al. (arXiv 1904.09751), nucleus sampling.
    """
    if p >= 1:
        return logits
    ordered, at = logits.sort(descending=True, stable=True)
    before = ordered.double().softmax(-1).cumsum(-1).roll(1, -1)
    before[..., 0] = 0
    return torch.full_like(logits, -torch.inf).scatter(-1, at, ordered.masked_fill(before >= p, -torch.inf))


class NGrams:
    """The n-grams of one growing text, kept by what followed them. n: their length; text: what there is so far."""

    def __init__(self, n: int, text: Iterable[int]) -> None:
        self._n, self._text = n, []  # type: tuple[int, list[int]]
        self._followed_by: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for token in text:
            self.append(token)

    def append(self, token: int) -> None:
        if len(self._text) >= self._n - 1:
            self._followed_by[self._context()].add(token)
        self._text.append(token)

    def repeating(self) -> set[int]:
        """The tokens that would now complete an n-gram for the second time."""
        return self._followed_by.get(self._context(), set()) if len(self._text) >= self._n - 1 else set()

    def _context(self) -> tuple[int, ...]:
        return tuple(self._text[len(self._text) - self._n + 1 :])


def without(logits: Float[Tensor, "N V"], tokens: Sequence[set[int]]) -> Float[Tensor, "N V"]:
    """The logits of each row's tokens -inf. A row that would lose all of them keeps them."""
    if not any(tokens):
        return logits
    logits = logits.clone()
    for row, banned in zip(logits, tokens, strict=True):
        if banned and len(banned) < len(row):
            row[list(banned)] = -torch.inf
    return logits


def draw(logits: Float[Tensor, "N V"], uniform: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """One token a row by inverting its cumulative distribution (float64) at uniform [N] float64 in [0, 1)."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    target = uniform.to(cumulative.device).unsqueeze(-1) * cumulative[..., -1:]
    return (cumulative <= target).sum(-1).clamp(max=logits.shape[-1] - 1)


def generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One CPU generator a sequence. A seed is taken modulo 2^64, which is what a generator holds."""
    return [torch.Generator().manual_seed(seed % (1 << 64)) for seed in seeds]


def sample(
    logits: Float[Tensor, "N V"],
    options: SamplingOptions,
    rng: Sequence[torch.Generator],
    ngrams: Sequence[NGrams] = (),
) -> Int[Tensor, " N"]:
    """The next token of each row. rng: one generator a row; each gives one number (none when greedy).
    ngrams: of each row's text, for no_repeat_ngram.

    Raises: ValueError for logits that are not finite, naming the row.
    """
    if not bool(torch.isfinite(logits).all()):
        row = int((~torch.isfinite(logits)).any(-1).nonzero()[0])
        raise ValueError(f"logits of row {row}: expected finite numbers, received NaN or infinity")
    if ngrams:
        logits = without(logits, [text.repeating() for text in ngrams])
    if options.temperature == 0:
        return greedy(logits)
    # The largest becomes 0, so that no temperature makes it infinite; in float64, where none is 0 itself.
    logits = logits.double()
    logits = (logits - logits.amax(-1, keepdim=True)) / options.temperature
    if options.top_k is not None:
        logits = keep_top_k(logits, options.top_k)
    logits = keep_top_p(logits, options.top_p)
    return draw(logits, torch.stack([torch.rand((), dtype=torch.float64, device="cpu", generator=g) for g in rng]))

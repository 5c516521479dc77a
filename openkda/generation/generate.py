"""The generation loop: prefill, then sample, show and step until every sequence has come to its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from openkda.generation.decoder import Decoder, token_ids
from openkda.generation.sampling import NGrams, SamplingOptions, generators, sample
from openkda.generation.text import TextStream
from openkda.models.hybrid import HybridLM
from openkda.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Increment:
    """What one step adds to one sequence.

    row: index of its prompt. token: the new token, None where the sequence ends without one.
    text: the text that became final ("" without a tokenizer): characters cut in half and possible beginnings of a stop
    string are held back, so the increments of a row joined are its whole text and nothing is ever taken back.
    finish: None while the row goes on; "length", "stop_token" or "stop_string" in its last increment.
    """

    row: int
    token: int | None
    text: str
    finish: str | None


@dataclass
class Completion:
    """A finished sequence. tokens include those of a stop string, text does not; neither includes a stop token."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


def generate(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    tokenizer: Tokenizer | None = None,
    seeds: Sequence[int] | None = None,
    decoder: Decoder | None = None,
) -> Iterator[Increment]:
    """Continue `prompts` (token ids, any lengths) and yield an increment for every row still running, step by step.

    Rows that are done leave the batch; the others' tokens do not depend on them.

    tokenizer: gives text and stop strings. With one, an empty prompt is replaced by its eos_id, the document border.
    seeds: one a prompt; default options.seed + row.
    decoder: of the same model, with a state that the prompts continue and that can be looked at meanwhile; its last
        state has seen every token but the last drawn.
    Raises: ValueError, before anything runs, for bad prompts, or for stop strings without a tokenizer.
    """
    begun = [_prompt(n, prompt, tokenizer) for n, prompt in enumerate(prompts)]
    if not begun:
        raise ValueError("prompts: expected at least one, received none")
    if options.stop_strings and tokenizer is None:
        raise ValueError("stop_strings: expected a tokenizer to find them with, received none")
    if seeds is not None and len(seeds) != len(begun):
        raise ValueError(f"seeds: expected one for each of {len(begun)} prompts, received {len(seeds)}")
    seeds = [options.seed + n for n in range(len(begun))] if seeds is None else list(seeds)
    decoder = Decoder(model, prefill_chunk=options.prefill_chunk) if decoder is None else decoder
    return _loop(decoder, begun, options, tokenizer, seeds)


def complete(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    tokenizer: Tokenizer | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Completion]:
    """`generate` to the end: one `Completion` a prompt."""
    prompts = list(prompts)
    done = [Completion() for _ in prompts]
    for step in generate(model, prompts, options, tokenizer=tokenizer, seeds=seeds):
        row = done[step.row]
        if step.token is not None:
            row.tokens.append(step.token)
        row.text, row.finish = row.text + step.text, step.finish
    return done


def _prompt(n: int, prompt: Sequence[int], tokenizer: Tokenizer | None) -> list[int]:
    ids = token_ids(n, prompt)
    if ids:
        return ids
    if tokenizer is None:
        raise ValueError(f"prompt {n}: expected at least one token, received none (and no tokenizer to begin with)")
    return [tokenizer.eos_id]


def _loop(
    decoder: Decoder,
    prompts: list[list[int]],
    options: SamplingOptions,
    tokenizer: Tokenizer | None,
    seeds: list[int],
) -> Iterator[Increment]:
    rows = [_Row(n, prompt, options, tokenizer) for n, prompt in enumerate(prompts)]
    if options.max_new_tokens == 0:
        yield from (Increment(row.index, None, "", "length") for row in rows)
        return
    rng = generators(seeds)
    logits = decoder.prefill(prompts)
    while True:
        ngrams = [row.ngrams for row in rows if row.ngrams is not None]
        tokens = sample(logits, options, [rng[row.index] for row in rows], ngrams)
        increments = [row.advance(token) for row, token in zip(rows, tokens.tolist(), strict=True)]
        alive = [n for n, step in enumerate(increments) if step.finish is None]
        yield from increments
        if not alive:
            return
        if len(alive) < len(rows):
            decoder.keep(alive)
            rows, tokens = [rows[n] for n in alive], tokens[alive]
        logits = decoder.step(tokens)


class _Row:
    """One running sequence: how far it is, and whether it ends here."""

    def __init__(self, index: int, prompt: list[int], options: SamplingOptions, tokenizer: Tokenizer | None) -> None:
        self.index, self._options, self._count = index, options, 0
        self.ngrams = None if options.no_repeat_ngram is None else NGrams(options.no_repeat_ngram, prompt)
        self._stream = None if tokenizer is None else TextStream(tokenizer, options.stop_strings)

    def advance(self, token: int) -> Increment:
        if token in self._options.stop_tokens:
            return self._end(None, "", "stop_token")
        self._count += 1
        if self.ngrams is not None:
            self.ngrams.append(token)
        text, stopped = ("", False) if self._stream is None else self._stream.push(token)
        if stopped:
            return Increment(self.index, token, text, "stop_string")
        if self._count == self._options.max_new_tokens:
            return self._end(token, text, "length")
        return Increment(self.index, token, text, None)

    def _end(self, token: int | None, text: str, finish: str) -> Increment:
        rest, stopped = ("", False) if self._stream is None else self._stream.flush()
        return Increment(self.index, token, text + rest, "stop_string" if stopped else finish)

"""Laws of the loop: greedy is the argmax of full forwards, rows are independent, stops stop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openkda.generation.decoder import Decoder
from openkda.generation.generate import Increment, complete, generate
from openkda.generation.sampling import SamplingOptions
from openkda.models.hybrid import HybridLM
from openkda.models.tokenizer import ByteTokenizer


def argmax_rollout(model: HybridLM, prompt: list[int], n: int) -> list[int]:
    """Greedy continuation with no state at all: a forward over everything for each token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def tokens_of(model: HybridLM, prompts: list[list[int]], **options: object) -> list[list[int]]:
    seeds = options.pop("seeds", None)
    done = complete(model, prompts, SamplingOptions(**options), seeds=seeds)  # type: ignore[arg-type]
    return [row.tokens for row in done]


def test_greedy_is_argmax_of_full_forwards(model: HybridLM, prompts: list[list[int]]) -> None:
    got = tokens_of(model, prompts, max_new_tokens=12)
    assert got == [argmax_rollout(model, prompt, 12) for prompt in prompts]


def test_greedy_limits_of_sampling(model: HybridLM, prompts: list[list[int]]) -> None:
    want = tokens_of(model, prompts, max_new_tokens=12)
    assert tokens_of(model, prompts, max_new_tokens=12, temperature=2.0, top_k=1) == want
    assert tokens_of(model, prompts, max_new_tokens=12, temperature=2.0, top_p=1e-6) == want


def test_seed_is_reproducible_and_independent_of_neighbours(model: HybridLM, prompts: list[list[int]]) -> None:
    options = {"max_new_tokens": 16, "temperature": 1.0, "top_k": 50, "top_p": 0.95}
    together = tokens_of(model, prompts, seed=7, **options)
    assert tokens_of(model, prompts, seed=7, **options) == together
    assert tokens_of(model, prompts, seed=8, **options) != together
    for n, prompt in enumerate(prompts):
        assert tokens_of(model, [prompt], seeds=[7 + n], **options) == [together[n]]


def test_rows_that_stop_leave_the_others_alone(model: HybridLM, prompts: list[list[int]]) -> None:
    """Each row stops at a token of its own choosing; the others go on as if it had never been there."""
    free = tokens_of(model, prompts, max_new_tokens=14, temperature=1.0)
    stops = (free[0][2], free[2][0], free[3][9])
    done = complete(model, prompts, SamplingOptions(max_new_tokens=14, temperature=1.0, stop_tokens=stops))
    for row, whole in zip(done, free, strict=True):
        cut = next((i for i, t in enumerate(whole) if t in stops), None)
        assert row.tokens == whole[:cut]
        assert row.finish == ("length" if cut is None else "stop_token")
    assert done[2].tokens == [] and len({len(row.tokens) for row in done}) > 2


def test_stop_string_across_token_borders(model: HybridLM) -> None:
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode("ab")
    free = complete(model, [prompt], SamplingOptions(max_new_tokens=60, temperature=1.0, seed=3), tokenizer=tokenizer)[
        0
    ]
    stop = free.text[20:23]
    assert len(stop.encode()) >= 3
    options = SamplingOptions(max_new_tokens=60, temperature=1.0, seed=3, stop_strings=(stop,))
    steps = list(generate(model, [prompt], options, tokenizer=tokenizer))
    text = "".join(step.text for step in steps)
    assert text == free.text[: free.text.index(stop)]
    assert steps[-1].finish == "stop_string" and all(step.finish is None for step in steps[:-1])
    tokens = [step.token for step in steps]
    assert tokens == free.tokens[: len(tokens)]
    assert stop in tokenizer.decode(tokens) and stop not in tokenizer.decode(tokens[:-1])


def test_text_of_increments_is_the_decoded_text(model: HybridLM, prompts: list[list[int]]) -> None:
    tokenizer = ByteTokenizer()
    done = complete(model, prompts, SamplingOptions(max_new_tokens=40, temperature=1.5), tokenizer=tokenizer)
    for row in done:
        assert row.text == tokenizer.decode(row.tokens) and len(row.tokens) == 40


def test_streams_step_by_step(model: HybridLM) -> None:
    """The first token is there before the second has been computed."""
    decoder = Decoder(model)
    steps = generate(model, [[1, 2, 3], [4]], SamplingOptions(max_new_tokens=3), decoder=decoder)
    first = [next(steps), next(steps)]
    assert [step.row for step in first] == [0, 1]
    assert decoder.state is not None and decoder.state[3].length.tolist() == [3, 1]  # type: ignore[union-attr]
    next(steps)
    assert decoder.state[3].length.tolist() == [4, 2]  # type: ignore[union-attr]
    assert not torch.is_inference_mode_enabled()


def test_no_tokens_asked_for(model: HybridLM) -> None:
    assert list(generate(model, [[1]], SamplingOptions(max_new_tokens=0))) == [Increment(0, None, "", "length")]


def test_empty_prompt_begins_a_document(model: HybridLM) -> None:
    tokenizer, options = ByteTokenizer(), SamplingOptions(max_new_tokens=8)
    got = complete(model, [[], [7, 8]], options, tokenizer=tokenizer)
    want = complete(model, [[tokenizer.eos_id], [7, 8]], options, tokenizer=tokenizer)
    assert got == want
    with pytest.raises(ValueError, match="prompt 0"):
        generate(model, [[]], options)


@pytest.mark.parametrize("n", [1, 3])
def test_no_ngram_comes_twice(model: HybridLM, prompts: list[list[int]], n: int) -> None:
    """With the rule no n-gram of a row's prompt and text comes a second time, whatever its neighbours do."""
    length = 40
    free = tokens_of(model, prompts, max_new_tokens=length)
    bound = tokens_of(model, prompts, max_new_tokens=length, no_repeat_ngram=n)
    looped = 0
    for prompt, text, plain in zip(prompts, bound, free, strict=True):
        held: set[tuple[int, ...]] = set()
        whole = prompt + text
        for end in range(n, len(whole) + 1):
            gram = tuple(whole[end - n : end])
            assert end <= len(prompt) or gram not in held
            held.add(gram)
        looped += text != plain  # the free text has something to forbid
        assert text == tokens_of(model, [prompt], max_new_tokens=length, no_repeat_ngram=n)[0]
    assert looped or n == 3


def test_the_default_device_changes_nothing(model: HybridLM, prompts: list[list[int]]) -> None:
    want = tokens_of(model, prompts, max_new_tokens=4, temperature=1.0, no_repeat_ngram=2)
    with torch.device("meta"):
        assert tokens_of(model, prompts, max_new_tokens=4, temperature=1.0, no_repeat_ngram=2) == want


def test_prompts_may_come_one_by_one(model: HybridLM, prompts: list[list[int]]) -> None:
    options = SamplingOptions(max_new_tokens=3)
    assert complete(model, iter(prompts), options) == complete(model, prompts, options)  # type: ignore[arg-type]


def test_bad_calls_raise_before_anything_runs(model: HybridLM) -> None:
    with pytest.raises(ValueError, match="at least one"):
        generate(model, [], SamplingOptions())
    with pytest.raises(ValueError, match="tokenizer"):
        generate(model, [[1]], SamplingOptions(stop_strings=("x",)))
    with pytest.raises(ValueError, match="seeds"):
        generate(model, [[1], [2]], SamplingOptions(), seeds=[1])


@pytest.mark.parametrize("prompt", [[1.5], [float("nan")], ["1"], [None], [[1]], 1, None, "text"])
def test_what_is_no_token_id_is_not_rounded_to_one(model: HybridLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt 1: expected token ids, received"):
        complete(model, [[1], prompt], SamplingOptions(max_new_tokens=1))

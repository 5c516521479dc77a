"""Each sampler does what its name says, on distributions small enough to count."""

from __future__ import annotations

import pytest
import torch

from openkda.generation.sampling import (
    NGrams,
    SamplingOptions,
    draw,
    generators,
    greedy,
    keep_top_k,
    keep_top_p,
    sample,
    without,
)

LOGITS = torch.log(torch.tensor([[0.05, 0.4, 0.15, 0.3, 0.1]]))


def kept(logits: torch.Tensor) -> list[int]:
    return torch.isfinite(logits[0]).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("k", "want"), [(1, [1]), (2, [1, 3]), (4, [1, 2, 3, 4]), (5, list(range(5))), (99, list(range(5)))]
)
def test_top_k(k: int, want: list[int]) -> None:
    assert kept(keep_top_k(LOGITS, k)) == want


def test_top_k_of_equals_keeps_k() -> None:
    assert len(kept(keep_top_k(torch.zeros(1, 9), 4))) == 4


@pytest.mark.parametrize(
    ("p", "want"),
    [(1e-9, [1]), (0.39, [1]), (0.41, [1, 3]), (0.71, [1, 2, 3]), (0.96, list(range(5))), (1.0, list(range(5)))],
)
def test_top_p(p: float, want: list[int]) -> None:
    assert kept(keep_top_p(LOGITS, p)) == want


def test_draw_inverts_the_cumulative_distribution() -> None:
    uniform = torch.tensor(
        [0.0, 0.049, 0.051, 0.449, 0.451, 0.599, 0.601, 0.899, 0.901, 1 - 2**-53], dtype=torch.float64
    )
    assert draw(LOGITS.expand(10, -1), uniform).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_draw_never_takes_what_was_cut_off() -> None:
    logits = keep_top_k(LOGITS, 2).expand(2, -1)
    assert draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 3]


def test_frequencies_follow_the_temperature() -> None:
    n, temperature = 4000, 0.7
    options = SamplingOptions(temperature=temperature)
    tokens = sample(LOGITS.expand(n, -1), options, generators(range(n)))
    want = (LOGITS[0] / temperature).softmax(-1)
    got = torch.bincount(tokens, minlength=5) / n
    # Four standard deviations of a binomial count.
    assert bool(((got - want).abs() < 4 * (want * (1 - want) / n).sqrt()).all())


def test_greedy_limits() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    want = greedy(logits)
    for options in (
        SamplingOptions(temperature=0),
        SamplingOptions(temperature=1.5, top_k=1),
        SamplingOptions(temperature=1.5, top_p=1e-9),
        SamplingOptions(temperature=1e-40),
        SamplingOptions(temperature=5e-324),
    ):
        assert torch.equal(sample(logits, options, generators(range(6))), want)


def test_non_finite_logits_name_the_row() -> None:
    logits = torch.zeros(3, 4)
    logits[2, 1] = torch.nan
    with pytest.raises(ValueError, match="row 2"):
        sample(logits, SamplingOptions(), generators(range(3)))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_ngrams_name_what_would_repeat(n: int) -> None:
    """Against the definition: every token whose n-gram the text holds already, at every length of a random text."""
    text = torch.randint(3, (60,), generator=torch.Generator().manual_seed(n)).tolist()
    grown = NGrams(n, text[:7])
    for end in range(7, len(text) + 1):
        held = {tuple(text[i : i + n]) for i in range(end - n + 1)}
        want = {t for t in range(3) if (*text[end - n + 1 : end], t) in held} if end >= n - 1 else set()
        assert grown.repeating() == NGrams(n, text[:end]).repeating() == want
        if end < len(text):
            grown.append(text[end])


def test_a_text_shorter_than_an_ngram_repeats_nothing() -> None:
    assert NGrams(4, []).repeating() == NGrams(4, [1, 1]).repeating() == set()


def test_a_repeating_token_is_never_taken_and_a_row_without_others_is_left_alone() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]]).expand(3, -1)
    assert without(logits, [set(), {1}, {0, 1, 2}]).tolist() == [[0, 9, 1], [0, -torch.inf, 1], [0, 9, 1]]
    assert without(logits, [set()] * 3) is logits and logits[1, 1] == 9
    texts = [NGrams(2, [0, 1, 0]), NGrams(2, [0, 2, 0]), NGrams(2, [0])]
    assert sample(logits, SamplingOptions(), generators(range(3)), texts).tolist() == [2, 1, 1]


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": -1}, {"max_new_tokens": 1.5}, {"temperature": -0.1}, {"temperature": float("nan")},
        {"temperature": float("inf")}, {"top_k": 0}, {"top_k": True}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": "x"},
        {"no_repeat_ngram": 0}, {"no_repeat_ngram": 2.0}, {"stop_strings": "end"}, {"stop_strings": ("",)},
        {"stop_tokens": (-1,)}, {"prefill_chunk": 0},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options(bad: dict[str, object]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name}: expected .* received"):
        SamplingOptions(**bad)  # type: ignore[arg-type]


def test_any_integer_is_a_seed() -> None:
    """Also near the end of what a generator holds, where seed + row would be past it."""
    for seed in (0, 7, -1, (1 << 64) - 1, 10**30, -(10**30)):
        one, same, other = generators([seed, seed, seed + 1])
        a, b, c = (torch.rand(4, generator=g) for g in (one, same, other))
        assert torch.equal(a, b) and not torch.equal(a, c)

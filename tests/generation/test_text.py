"""Text in pieces equals the text at once: any Unicode, broken bytes, stop strings across any borders."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openkda.generation.text import IncrementalDecoder, StopFilter
from openkda.models.tokenizer import ByteTokenizer


def pieces(ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(ByteTokenizer())
    return [decoder.push(i) for i in ids] + [decoder.flush()]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20))
def test_text_comes_back_character_by_character(text: str) -> None:
    got = pieces(list(text.encode()))
    assert "".join(got) == text
    assert all(len(piece) <= 2 for piece in got)  # one character a piece; two where a true U+FFFD was held back


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 256), st.sampled_from([0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0xFF, 256])), max_size=30)
)
def test_any_bytes_give_what_decoding_at_once_gives(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == ByteTokenizer().decode(ids)


def test_half_a_character_is_not_shown() -> None:
    assert pieces([0x61, 0xE4, 0xB8, 0xAD]) == ["a", "", "", "中", ""]
    assert pieces([0xE4, 0xB8]) == ["", "", "\ufffd"]


def cut_at_first_stop(text: str, stops: list[str]) -> str:
    """Direct form: the stop that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


@settings(max_examples=400, deadline=None)
@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(0, 24), max_size=8),
)
def test_stop_strings_whatever_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    out, stopped = "", False
    stop_filter = StopFilter(stops)
    for begin, end in pairwise(borders):
        shown, stopped = stop_filter.push(text[begin:end])
        out += shown
        if stopped:
            break
    if not stopped:
        out += stop_filter.flush()
    assert out == cut_at_first_stop(text, stops)
    assert stopped == any(s in text for s in stops)


@pytest.mark.parametrize("text", ["x\n", "x\n\nde", "x\n\ndef"])
def test_only_a_possible_beginning_is_held_back(text: str) -> None:
    shown, stopped = StopFilter(["\n\ndef "]).push(text)
    assert (shown, stopped) == ("x", False)

"""Token ids to text while they arrive: characters that span tokens, stop strings that span tokens."""

from __future__ import annotations

from collections.abc import Sequence

from openkda.models.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoding makes of bytes that are not (yet) a character


class IncrementalDecoder:
    """Text of a growing token sequence, in pieces that are never taken back.

    The pieces joined are `tokenizer.decode` of all tokens. A trailing U+FFFD is held back: it may be a character of which
    some bytes are still to come. Each call decodes only the tokens since the last whole character but one, which
    gives tokenizers that strip a leading space a neighbour to see.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context = 0  # tokens of the window that are already out
        self._shown = 0  # characters of the window's text that are already out

    def push(self, token: int) -> str:
        """The text that `token` completes."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        whole = text.removesuffix(REPLACEMENT)
        piece, self._shown = whole[self._shown :], max(self._shown, len(whole))
        if whole == text and text:
            del self._window[: self._context]
            self._context = len(self._window)
            self._shown = len(self._tokenizer.decode(self._window))
        return piece

    def flush(self) -> str:
        """What is left when no token follows: half a character, as U+FFFD."""
        piece = self._tokenizer.decode(self._window)[self._shown :]
        self._window, self._context, self._shown = [], 0, 0
        return piece


class StopFilter:
    """Lets text through up to the first stop string; holds back an end that may be the beginning of one.

    The first is the one that ends first (of two with the same end the longer), so that it does not matter in which pieces
    the text comes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string was found: then nothing follows)."""
        text = self._held + piece
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max((_overlap(text, s) for s in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back when no text follows."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """Both of one sequence: tokens in, text out that is final, until a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder, self._filter = IncrementalDecoder(tokenizer), StopFilter(stops)

    def push(self, token: int) -> tuple[str, bool]:
        return self._filter.push(self._decoder.push(token))

    def flush(self) -> tuple[str, bool]:
        """The rest, when the sequence ends for another reason; True if a stop string appears only now."""
        text, stopped = self._filter.push(self._decoder.flush())
        return (text, True) if stopped else (text + self._filter.flush(), False)

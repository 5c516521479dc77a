"""Generation in a terminal: the text as it comes, and what the state weighs beside a full-attention model's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from openkda.generation.decoder import Decoder
from openkda.generation.generate import generate
from openkda.generation.sampling import SamplingOptions
from openkda.models.hybrid import HybridLM
from openkda.models.inspect import ModelReport, describe
from openkda.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LENGTHS = (1_000, 10_000, 100_000, 1_000_000)


def stream(
    model: HybridLM,
    tokenizer: Tokenizer,
    prompt: str,
    options: SamplingOptions,
    *,
    console: Console | None = None,
) -> str:
    """Continue `prompt`, showing the text while it is made, and below it the bytes of the state; return the new text.

    The prompt begins a document (the tokenizer's eos_id goes before it), and eos_id ends the text. On a terminal the last
    line and the state are redrawn with every token; elsewhere the plain text is written, and the state once at the end.
    Needs rich.
    """
    console = _console() if console is None else console
    report = describe(model.config, dtype=next(model.parameters()).dtype)
    decoder = Decoder(model, prefill_chunk=options.prefill_chunk)
    ids = [tokenizer.eos_id, *tokenizer.encode(prompt)]
    options = replace(options, stop_tokens=(*options.stop_tokens, tokenizer.eos_id))
    count, text = len(ids), ""
    with _screen(console) as screen:
        screen.write(prompt)
        for step in generate(model, [ids], options, tokenizer=tokenizer, decoder=decoder):
            count += step.token is not None
            text += step.text
            screen.footer = memory_line(report, decoder.state_bytes, count)
            screen.write(step.text)
    console.print(memory_line(report, decoder.state_bytes, count), style="dim", markup=False, highlight=False)
    return text


def memory_line(report: ModelReport, state_bytes: int, tokens: int) -> str:
    """State of one running sequence in a line. state_bytes: measured; the rest follows from the config."""
    full = report.full_attention_bytes(tokens)
    return (
        f"{tokens:,} tokens: state {size(state_bytes)} ({size(report.constant_bytes)} constant "
        f"+ {size(report.bytes_per_token)} a token); full attention of this size: {size(full)} "
        f"({size(report.full_attention_bytes_per_token)} a token)"
    )


def memory_table(report: ModelReport, lengths: Sequence[int] = LENGTHS) -> Table:
    """State of one sequence at each length, beside the keys and values that full attention in every layer would hold."""
    from rich.table import Table

    table = Table(title="memory of one sequence", title_justify="left")
    for heading in ("tokens", "this model", "full attention", "full / this"):
        table.add_column(heading, justify="right")
    for n in lengths:
        ours, full = report.state_bytes(n), report.full_attention_bytes(n)
        table.add_row(f"{n:,}", size(ours), size(full), f"{full / ours:.1f}x")
    return table


def size(n: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def visible(text: str) -> str:
    """Control characters as U+FFFD, but for line ends and tabs: an untrained byte model may clear the screen."""
    return "".join("\ufffd" if (c < " " and c not in "\n\t") or "\x7f" <= c < "\xa0" else c for c in text)


class _Screen:
    """Plain text on a pipe; on a terminal whole lines scroll by and the last one stays live above the footer."""

    def __init__(self, console: Console) -> None:
        self._console, self._live, self._line, self.footer = console, None, "", ""
        if console.is_terminal:
            from rich.live import Live

            self._live = Live(console=console, auto_refresh=False, transient=True)

    def write(self, piece: str) -> None:
        piece = visible(piece)
        if self._live is None:
            self._plain(piece)
            return
        from rich.console import Group
        from rich.text import Text

        *whole, self._line = (self._line + piece).split("\n")
        for line in whole:
            self._plain(line + "\n")
        self._live.update(Group(Text(self._line), Text(self.footer, style="dim")), refresh=True)

    def _plain(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, emoji=False, soft_wrap=True)

    def open(self) -> None:
        if self._live is not None:
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._plain(self._line)
        self._plain("\n")


@contextmanager
def _screen(console: Console) -> Iterator[_Screen]:
    screen = _Screen(console)
    screen.open()
    try:
        yield screen
    finally:
        screen.close()


def _console() -> Console:
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise ModuleNotFoundError("streaming to a terminal needs rich: pip install 'openkda[cli]'") from None
    return Console()

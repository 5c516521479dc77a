"""What a run tells the person who waits for it: a live bar on a terminal, plain lines elsewhere, nothing by default."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from openkda.training.evaluate import Evaluation


@dataclass(frozen=True)
class StepReport:
    """After one optimizer step. loss: nats per token of this batch; done: share of the run, 0..1.

    tokens: trained on since the run began; tokens_per_second: over the last 20 steps; seconds of training.
    expert_load: largest load of an expert over the mean load, in the worst layer (1 is perfect); None without experts.
    max_logit: largest attention score of a Gated MLA head in this step; None without QK-clip.
    """

    step: int
    done: float
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    seconds: float
    seconds_left: float
    expert_load: float | None = None
    max_logit: float | None = None


class Progress:
    """Receives the events of a run. This one stays silent; subclasses override what they show."""

    def tokenizing(self, done_bytes: int, total_bytes: int) -> None: ...

    def begin(self, step: int, steps: int) -> None: ...

    def step(self, report: StepReport) -> None: ...

    def log(self, report: StepReport) -> None:
        """Every `log_every` steps, with the numbers that also go to metrics.jsonl."""

    def validated(self, step: int, result: Evaluation) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainProgress(Progress):
    """One line an event: for logs and pipes. The first step has a line too: it says how long the run will take."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._all_read = False
        self._shown: int | None = None  # the last step that has a line

    def tokenizing(self, done_bytes: int, total_bytes: int) -> None:
        if done_bytes >= total_bytes and not self._all_read:
            self._all_read = True
            self.note(f"text: {total_bytes / 1e6:.1f} MB")

    def step(self, report: StepReport) -> None:
        if self._shown is None:
            self.log(report)

    def log(self, report: StepReport) -> None:
        if report.step == self._shown:
            return
        self._shown = report.step
        self.note(
            f"step {report.step}  {report.done:.0%}  loss {report.loss:.4f}  lr {report.lr:.2e}  "
            f"{report.tokens_per_second:,.0f} tokens/s  {duration(report.seconds_left)} left"
        )

    def validated(self, step: int, result: Evaluation) -> None:
        self.note(f"step {step}  validation loss {result.loss:.4f}  {result.bits_per_byte:.4f} bits/byte")

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveProgress(Progress):
    """A bar with loss, validation loss, tokens/s and time left. Needs rich."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=console or Console(stderr=True),
        )
        self._bars.start()
        self._task: Any = None
        self._validation = ""

    def tokenizing(self, done_bytes: int, total_bytes: int) -> None:
        if self._task is None:
            self._task = self._bars.add_task("reading", total=total_bytes, numbers=f"{total_bytes / 1e6:.1f} MB")
        self._bars.update(self._task, completed=done_bytes)

    def begin(self, step: int, steps: int) -> None:
        self._task = self._bars.add_task("training", total=1.0, numbers="")

    def step(self, report: StepReport) -> None:
        numbers = (
            f"step {report.step}  loss {report.loss:.3f}{self._validation}  "
            f"{report.tokens_per_second:,.0f} tokens/s  {duration(report.seconds_left)} left"
        )
        self._bars.update(self._task, completed=report.done, numbers=numbers)

    def validated(self, step: int, result: Evaluation) -> None:
        self._validation = f"  validation {result.loss:.3f}"

    def note(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bars.stop()


def console_progress() -> Progress:
    """The live bar when standard error is a terminal and rich is installed, else plain lines."""
    if not sys.stderr.isatty():
        return PlainProgress()
    try:
        return LiveProgress()
    except ModuleNotFoundError:
        return PlainProgress()


def scoring_lines(*, stream: TextIO | None = None, every: float = 10.0) -> Callable[[int, int], None]:
    """For `evaluate_paths(advance=...)`: a line each `every` seconds with what is scored and how long the rest takes."""
    began = last = time.monotonic()

    def advance(scored: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < every:
            return
        last, left = now, (now - began) * (total - scored) / max(1, scored)
        text = f"{scored / total:.0%}  {scored:,} of {total:,} tokens  {duration(left)} left"
        print(text, file=stream or sys.stderr, flush=True)

    return advance


def duration(seconds: float) -> str:
    """12 -> "0:12", 3700 -> "1:01:40"."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"

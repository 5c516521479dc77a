"""What is shown while a run goes on."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from openkda.training.evaluate import Evaluation
from openkda.training.progress import LiveProgress, PlainProgress, Progress, StepReport, duration, scoring_lines

REPORT = StepReport(
    step=7,
    done=0.5,
    loss=2.5,
    lr=1e-3,
    grad_norm=1.0,
    tokens=700,
    tokens_per_second=1234.5,
    seconds=3.0,
    seconds_left=65.0,
)


def events(progress: Progress) -> None:
    for done in (10**6, 2 * 10**6, 2 * 10**6):
        progress.tokenizing(done, 2 * 10**6)
    progress.begin(0, 14)
    progress.validated(7, Evaluation(nats=30.0, tokens=20, text_bytes=20))
    progress.step(REPORT)
    progress.log(REPORT)
    progress.note("[brackets] stay")
    progress.close()


def test_plain_lines() -> None:
    stream = io.StringIO()
    events(PlainProgress(stream))
    assert stream.getvalue().splitlines() == [
        "text: 2.0 MB",
        "step 7  validation loss 1.5000  2.1640 bits/byte",
        "step 7  50%  loss 2.5000  lr 1.00e-03  1,234 tokens/s  1:05 left",
        "[brackets] stay",
    ]


def test_plain_lines_of_the_first_step_and_of_those_logged() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    for step in range(1, 7):
        report = replace(REPORT, step=step)
        progress.step(report)
        if step in (1, 4):
            progress.log(report)
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 1", "step 4"]


def test_live_bar() -> None:
    stream = io.StringIO()
    events(LiveProgress(Console(file=stream, force_terminal=True, width=140)))
    for shown in ("reading", "50%", "loss 2.500", "validation 1.500", "1,234 tokens/s", "1:05 left", "[brackets] stay"):
        assert shown in stream.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0:00"), (12.4, "0:12"), (3700, "1:01:40"), (59.9, "1:00")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_long_evaluations_say_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 12.0, 13.0])
    monkeypatch.setattr("openkda.training.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    advance = scoring_lines(stream=stream)
    for scored in (10, 30, 35):
        advance(scored, 100)
    assert stream.getvalue() == "30%  30 of 100 tokens  0:28 left\n"

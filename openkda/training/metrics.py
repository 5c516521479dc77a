"""metrics.jsonl: one JSON object a line, training and validation lines mixed, in order of `step`; and its picture."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends lines; each has left the process when `write` returns.

    resume_at: drop what an interrupted run wrote after that step, so that no step stands twice.
    """

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        self.path = path
        self.last_validation: tuple[int, float] = (-1, math.nan)  # its step and loss
        if resume_at is not None and path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= resume_at]
            for line in kept:
                if "val_loss" in line:
                    self.last_validation = line["step"], line["val_loss"]
            partial = path.with_name(path.name + ".partial")
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(partial, path)

    def write(self, line: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line cut off by a crash is left out. ValueError names the line of other damage."""
    *whole, _ = Path(path).read_bytes().split(b"\n")
    return [_parsed(path, number, line) for number, line in enumerate(whole, 1) if line]


def _parsed(path: str | Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or type(fields.get("step")) is not int:
        raise ValueError(f"{path}, line {number}: expected a JSON object with a step, received {line[:80]!r}")
    return fields


def draw_loss_curve(metrics: str | Path, picture: str | Path) -> None:
    """Training and validation loss over steps as a PNG. Needs the extra `lab` (matplotlib)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("the loss curve needs matplotlib: pip install 'openkda[lab]'") from None
    lines = read_metrics(metrics)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, label, style in (("loss", "training", {"alpha": 0.7}), ("val_loss", "validation", {"marker": "o"})):
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    partial = Path(picture).with_name(f".{Path(picture).name}.partial")
    try:
        figure.savefig(partial, format="png", dpi=120)
        os.replace(partial, picture)
    finally:
        partial.unlink(missing_ok=True)

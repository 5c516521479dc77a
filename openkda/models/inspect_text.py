"""A model report as plain text, for `openkda inspect`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from openkda.models.inspect import LayerRow, ModelReport


def render(report: ModelReport, lengths: Sequence[int]) -> str:
    """Layers, parameters by kind, and state of one sequence at each of `lengths` tokens. Sizes in bytes."""
    total = report.total_parameters
    kinds = [(kind, f"{count:,}", f"{count / total:.1%}") for kind, count in report.parameters.items()]
    kinds += [("total", f"{total:,}", ""), ("of these in matrices", f"{report.matrix_parameters:,}", "")]
    kinds += [("active a token", f"{report.active_parameters:,}", "")]
    states = [
        (f"{n:,}", f"{report.state_bytes(n):,}", f"{report.full_attention_bytes(n):,}",
         f"{report.full_attention_bytes(n) / report.state_bytes(n):.1f}x")
        for n in lengths
    ]  # fmt: skip
    dtype = str(report.dtype).removeprefix("torch.")
    parts = [
        _table(("layers", "attention", "MLP", "parameters each"), map(_layers, _runs(report.layers))),
        _table(("parameters", "count", "share"), kinds),
        f"state of one sequence, activations in {dtype}: {report.constant_bytes:,} bytes whatever the length, "
        f"and {report.bytes_per_token:,} bytes a token\n"
        f"full attention of this size: {report.full_attention_bytes_per_token:,} bytes a token",
        _table(("tokens", "this model", "full attention", "full / this"), states),
    ]
    return "\n\n".join(parts)


def _runs(rows: Sequence[LayerRow]) -> list[list[LayerRow]]:
    """Neighbouring layers of the same make, together."""
    return [list(group) for _, group in groupby(rows, key=lambda r: (r.attention, r.mlp, r.parameters))]


def _layers(run: list[LayerRow]) -> tuple[str, ...]:
    first, last = run[0], run[-1]
    numbers = f"{first.number}" if first is last else f"{first.number}-{last.number}"
    return numbers, first.attention, first.mlp, f"{first.parameters:,}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, numbers to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(w) if i and not cell.isalpha() else cell.ljust(w) for i, (cell, w) in cells).rstrip()
        for cells in (list(enumerate(zip(line, widths, strict=True))) for line in lines)
    )

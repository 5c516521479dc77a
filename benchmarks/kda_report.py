"""The table of `benchmarks/kda.py`: as text, as JSON, and with the rows that an earlier run left."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

import openkda

Row = dict[str, Any]


def show(value: float | str | None) -> str:
    return (
        "-" if value is None else value if isinstance(value, str) else f"{value:.3g}" if value < 10 else f"{value:.1f}"
    )


def render_errors(table: list[Row]) -> str:
    columns = ("ours", "triton", "triton_exact", "fla")
    lines = ["| worst relative error | ours | impl=triton | impl=triton_exact | fla-core |", "|---|" + "---:|" * 4]
    for row in table:
        cells = [f"{row[c]:.1e}" if isinstance(row.get(c), float) else str(row.get(c, "-")) for c in columns]
        lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def render(table: list[Row]) -> str:
    columns = ("ours", "triton", "fla", "cudnn", "floor")
    lines = [
        "| case | unit | ours | impl=triton | fla-core | cudnn | floor | ours / floor |",
        "|---|---|" + "---:|" * 6,
    ]
    for row in table:
        ratio = f"{row['ours'] / row['floor']:.2f}" if row["floor"] and not isinstance(row["ours"], str) else "-"
        cells = [show(row.get(c)) for c in columns]
        lines.append(f"| {row['case']} | {row['unit']} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    out = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "openkda": openkda.__version__}
    for name in ("triton", "fla-core", "nvidia-cudnn-frontend"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "not installed"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {**out, "commit": commit.stdout.strip() or "unknown"}


def kept(path: Path, about: dict[str, str], fresh: list[str], order: list[str]) -> dict[str, list[Row]]:
    """Rows of other groups that an earlier run on the same machine and versions stored; each knows its commit."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    same = all(stored["about"].get(n) == v for n, v in about.items() if n not in ("commit", "copy"))
    return {g: r for g, r in stored.get("groups", {}).items() if same and g in order and g not in fresh}


def store(
    folder: Path, about: dict[str, str], errors: list[Row], found: dict[str, list[Row]], order: list[str]
) -> None:
    """Writes the table as JSON and as text; order: of the groups of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("kda-" + about["device"].lower().replace(" ", "-") + ".json")
    groups = {**kept(path, about, list(found), order), **found}
    groups = {g: groups[g] for g in order if g in groups}
    path.write_text(json.dumps({"about": about, "errors": errors, "groups": groups}, indent=1))
    head = ", ".join(f"{k} {v}" for k, v in about.items())
    older = sorted(
        {f"{g}: commit {r[0]['commit']}" for g, r in groups.items() if r and r[0]["commit"] != about["commit"]}
    )
    text = [head, *(["Rows of an earlier run: " + ", ".join(older)] if older else []), render_errors(errors)]
    path.with_suffix(".md").write_text(
        "\n\n".join([*text, render([r for rows in groups.values() for r in rows])]) + "\n"
    )

"""docs/at-a-glance.png: what a sequence of Kimi K3 keeps by length, and the op beside its peers, from the stored results.

    python benchmarks/picture.py

Left from the configuration (openkda/models/inspect.py), middle and right from benchmarks/results/kda-nvidia-h200.json and
kda-training-nvidia-h200.json: rows as measured, nothing is timed here. Needs the extra `lab`.
"""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tables import ROOT, forward_rows, training_rows

from openkda.models.inspect import describe
from openkda.models.presets import PRESETS

NAMES = {"ours": "openkda", "cudnn": "cudnn-frontend", "fla": "fla-core", "floor": "memory floor"}
COLOURS = {"ours": "tab:blue", "cudnn": "tab:green", "fla": "tab:orange", "floor": "0.75"}


def memory(axes: Any) -> None:
    report = describe(PRESETS["kimi-k3"])
    lengths = [2**n for n in range(8, 21)]
    ours = [report.state_bytes(n) / 2**30 for n in lengths]
    full = [report.full_attention_bytes(n) / 2**30 for n in lengths]
    mla = [report.latent_attention_bytes_per_token * n / 2**30 for n in lengths]
    axes.loglog(lengths, full, color="tab:orange", label="attention in every layer")
    axes.loglog(lengths, mla, color="0.5", linestyle="--", label="MLA in every layer")
    axes.loglog(lengths, ours, color="tab:blue", linewidth=2.5, label="Kimi K3: 69 KDA, 24 Gated MLA")
    axes.set(title="GiB that one sequence keeps", xlabel="tokens")
    axes.legend(loc="upper left", fontsize=8)
    axes.grid(alpha=0.3)


def bars(axes: Any, title: str, groups: dict[str, dict[str, float]]) -> None:
    """groups: label -> peer -> ms, missing or None where a peer cannot do it."""
    axes.set(title=title, yticks=[])
    at, ticks = 0.0, {}
    for label, row in groups.items():
        ticks[label] = at + (len(row) - 1) / 2
        for peer, ms in row.items():
            axes.barh(at, ms, color=COLOURS[peer], height=0.85)
            axes.text(ms, at, f" {ms:g}", va="center", fontsize=7)
            at += 1
        at += 0.7
    axes.set_yticks(list(ticks.values()), list(ticks), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(ms for row in groups.values() for ms in row.values()))


def shown(row: dict[str, Any], peers: tuple[str, ...]) -> dict[str, float]:
    return {peer: float(f"{row[peer]:.3g}") for peer in peers if isinstance(row.get(peer), int | float)}


def main() -> None:
    rows = forward_rows() | training_rows()
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    memory(left)
    cases = {"fast decay": ", bounded gate", "slow decay": ", bounded gate, slow", "softplus gate": ", softplus gate"}
    peers = ("floor", "ours", "cudnn", "fla")
    bars(
        middle, "forward, ms: H200, 96 heads, 8,192 tokens",
        {label: shown(rows[f"forward H=96 1x8192{case}"], peers) for label, case in cases.items()},
    )  # fmt: skip
    bars(
        right, "forward + backward, ms (cudnn: core)",
        {label: shown(rows[f"forward+backward H=96 1x8192{case}"], peers) for label, case in cases.items()},
    )  # fmt: skip
    handles = [middle.barh(0, 0, color=COLOURS[p], label=NAMES[p]) for p in peers]
    figure.legend(handles=handles, fontsize=8, loc="outside lower right", ncols=len(peers))
    figure.savefig(ROOT / "docs" / "at-a-glance.png", dpi=110)


if __name__ == "__main__":
    main()

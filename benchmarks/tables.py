"""The tables of measurements in README.md and docs/, written from the stored results.

    python benchmarks/tables.py            # rewrites what stands between <!-- table NAME --> and <!-- end -->; timed is nothing

A test runs it too, and fails while a page says something else than benchmarks/results.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/measured.md", "docs/capabilities.md", "docs/kernels.md")
BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(?=<!-- end -->)", re.S)
Row = dict[str, Any]


def result(name: str) -> dict[str, Any]:
    found = json.loads((RESULTS / f"{name}.json").read_text())
    assert isinstance(found, dict)
    return found


def cell(value: object, digits: int = 3) -> str:
    """Three digits (more where the number has more before its point), thousands apart; - for what was not measured."""
    if not isinstance(value, int | float):
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:#.{digits}g}".rstrip(".")


def error(value: object) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if isinstance(value, int | float) else "-"


def of(row: Row, key: str) -> Row:
    """A part of a row; empty where a peer could not do it, and a text says why."""
    part = row.get(key)
    return part if isinstance(part, dict) else {}


def pair(*texts: str) -> str:
    return " / ".join(texts)


def table(head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """words: columns of text at the left; the others are numbers."""
    lines = [head, ["---"] * words + ["---:"] * (len(head) - words), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def forward_rows() -> dict[str, Row]:
    """By case; "the same ..." rows, which stand behind what they continue, are left out."""
    groups = result("kda-nvidia-h200")["groups"]
    return {r["case"]: r for rows in groups.values() for r in rows if not r["case"].startswith("the same")}


def forward_errors() -> dict[str, Row]:
    return {r["case"]: r for r in result("kda-nvidia-h200")["errors"]}


def training_rows() -> dict[str, Row]:
    """By case; of two of one name, which belong to the rows in front of them, the first."""
    return {r["case"]: r for r in reversed(result("kda-training-nvidia-h200")["rows"])}


def of_commit(name: str, rows: dict[str, Row]) -> str:
    """Versions, the commit, and the rows (by label) that are of another one."""
    about = result(name)["about"]
    parts = [about["device"], f"torch {about['torch']}", f"triton {about['triton']}"]
    parts += [f"{label} {about[key]}" for label, key in PEERS.items() if about.get(key)]
    older: dict[str, list[str]] = {}
    for label, r in rows.items():
        if r.get("commit", about["commit"]) != about["commit"]:
            older.setdefault(r["commit"], []).append(label.strip())
    rest = "".join(f"; of {commit}: {', '.join(labels)}" for commit, labels in older.items())
    return f"{', '.join(parts)}; commit {about['commit']}{rest}.\n\n"


PEERS = {"fla-core": "fla-core", "cudnn-frontend": "nvidia-cudnn-frontend"}


def measured(
    name: str, rows: dict[str, Row], shown: dict[str, str], head: list[str], more: list[list[str]] | None = None
) -> str:
    """The rows of a result that are there, in the order of shown (label -> case), ours beside the peers; more: below them. Of
    two labels that are to read alike one ends in a blank."""
    found = {label: rows[case] for label, case in shown.items() if case in rows}
    body = [
        [label.strip(), r["unit"], *(cell(r.get(k)) for k in ("ours", "fla", "cudnn", "floor"))]
        for label, r in found.items()
    ]
    return of_commit(name, found) + table(head, body + (more or []), 2)


def forward() -> str:
    rows = forward_rows()
    shown = {
        "forward, 1 x 8192, bounded gate": "forward H=96 1x8192, bounded gate",
        "the same, slowly forgetting gates": "forward H=96 1x8192, bounded gate, slow",
        "forward, 1 x 8192, softplus gate": "forward H=96 1x8192, softplus gate",
        "the same, slowly forgetting gates ": "forward H=96 1x8192, softplus gate, slow",
        "forward, 8 x 1024": "forward H=96 8x1024, bounded gate",
        "forward, pack of 6 sequences": "forward H=96 mixed pack, bounded gate",
        "one token for 1 sequence, in a graph": "decode H=96 B=1, in a graph",
        "one token for 32 sequences, in a graph": "decode H=96 B=32, in a graph",
        "one token for 256 sequences, in a graph": "decode H=96 B=256, in a graph",
        "convolution and SiLU of q, k, v": "conv + SiLU of q, k, v, H=96 1x8192",
        "gated norm": "gated norm, H=96 1x8192",
        "host time of a forward, inference mode": "host time of a prefill, inference mode",
        "first call, empty kernel cache": "first call, empty cache",
    }
    head = ["96 heads", "unit", "ours", "fla-core", "cudnn-frontend", "floor"]
    return measured("kda-nvidia-h200", rows, shown, head)


def forward_error() -> str:
    found = forward_errors()
    body = []
    gates = ("bounded gate", "softplus gate")
    for case in (*gates, *(f"{gate}, near-equal keys" for gate in gates)):
        both = [
            [error(found[f"{case}: {what}"].get(k)) for what in ("output", "state")]
            for k in ("ours", "triton_exact", "fla")
        ]
        body.append([case, *(pair(*b) for b in both)])
    return table(["worst relative error of output / state", "ours", "impl=triton_exact", "fla-core"], body)


def near() -> str:
    """By implementation, for capabilities.md."""
    found, times = forward_errors(), forward_rows()
    first = times["forward H=96 1x8192, bounded gate"]
    ms = {
        "ours": first["ours"],
        "triton": first["triton"],
        "triton_exact": times["the first with impl=triton_exact"]["ours"],
    }
    body = []
    for key, name in {"ours": "hopper", "triton": "triton", "triton_exact": "triton_exact"}.items():
        gates = ("bounded gate", "softplus gate")
        cells = [
            pair(*(error(found[f"{g}, near-equal keys: {w}"].get(key)) for w in ("output", "state"))) for g in gates
        ]
        body.append([f"`{name}`", *cells, cell(ms[key])])
    return table(["error of output / state", "bounded gate", "softplus gate", "ms, 1 x 8192, 96 heads"], body)


def training() -> str:
    rows, about = training_rows(), result("kda-training-nvidia-h200")
    shown = {
        "96 heads, 1 x 8192, bounded gate": "forward+backward H=96 1x8192, bounded gate",
        "the same, slowly forgetting gates": "forward+backward H=96 1x8192, bounded gate, slow",
        "the same, softplus gate": "forward+backward H=96 1x8192, softplus gate",
        "64 heads, 1 x 8192, bounded gate": "forward+backward H=64 1x8192, bounded gate",
        "16 heads, a pack of 8 x 2048": "forward+backward H=16 8x2048 packed, bounded gate",
        "peak memory above the inputs, 96 heads": "peak memory above its inputs",
        "96 heads, chunks kept by the forward": "kept by the forward: H=96 1x8192, bounded gate",
        "its peak memory": "its peak memory above its inputs",
        "host time (floor: a function that does nothing)": "host time of forward+backward",
        "of 8 calls in one backward, each": "the same, of 8 in one backward",
        "host time in one thread": "host time of forward+backward, in one thread",
        "of 8 calls in one backward in one thread, each": "the same, of 8 in one backward, in one thread",
        "first step, empty kernel cache": "first step, empty cache",
    }
    body = []
    errors = {r["case"]: r for r in about["errors"]}
    for label, case in {
        "error of dq / dv / A_log, random keys": "bounded gate, random decay",
        "the same, near-equal keys": "bounded gate, random decay, near-equal keys",
    }.items():
        sides = [pair(*(error(of(errors[case], k).get(g)) for g in ("dq", "dv", "dA_log"))) for k in ("ours", "fla")]
        body.append([label, "", *sides, "", ""])
    head = ["forward + backward", "unit", "ours", "fla-core", "cudnn core", "floor"]
    return measured("kda-training-nvidia-h200", rows, shown, head, body)


def models() -> str:
    runs = {r["ops"]: r for r in result("train-100m-nvidia-h200")["rows"]}
    k3 = {r["model"]: r for r in result("k3_gpu-nvidia-h200")["rows"]}
    ours, launched, fla = (runs.get(name, {}) for name in ("ours", "ours, launched", "fla"))
    kimi, peer = k3["Kimi Linear style, bfloat16"], k3["the same in transformers with fla-core"]
    whole, packed = k3["K3 style, bfloat16"], k3["K3 style, packed MXFP4 experts"]

    def several(row: Row, *keys: str) -> str:
        return "; ".join(cell(row.get(k), 4) if row.get(k, 0) >= 100 else cell(row.get(k)) for k in keys)

    gib = pair(cell(packed["weights_gib"]), cell(whole["weights_gib"]))
    graph = ("prefill", "graph_1", "graph_32")
    speeds = {
        "training, 104 M parameters, replayed from CUDA graphs": (
            cell(ours.get("tokens/s")),
            cell(fla.get("tokens/s")),
        ),
        "the same, launched": (cell(launched.get("tokens/s")), cell(fla.get("tokens/s"))),
        "Kimi Linear style: prefill of 8,192 tokens": (cell(kimi["prefill"]), cell(peer["prefill"])),
        "decoding 1 sequence; 32, called from Python": [several(r, "decode_1", "decode_32") for r in (kimi, peer)],
        "the same from a CUDA graph": (several(kimi, "graph_1", "graph_32"), "-"),
        "Kimi K3 style: prefill; decoding 1; 32 from a graph": (several(whole, *graph), "-"),
        f"with packed MXFP4 experts (weights {gib} GiB)": (several(packed, *graph), "-"),
    }
    body = [[label, "tokens/s", *texts] for label, texts in speeds.items()]
    shares = [(ours, launched), (fla, fla)]  # a replayed step allocates nothing: memory is that of launched ones
    texts = [f"{cell(r.get('MFU %'))}; {cell(other.get('peak GiB'))}" for r, other in shares]
    body.insert(1, ["share of the bfloat16 peak; memory, launched", "%; GiB", *texts])
    commits = ", ".join(f"{name} {r['commit']}" for name, r in runs.items())
    return f"Training rows: {commits}.\n\n" + table(["", "unit", "ours", "peer"], body, 2)


def cpu() -> str:
    op = {(r["gate"], r["T"]): r for r in result("cpu_kda-amd-epyc-2026-11-30")["rows"] if r["threads"] == 1}
    patched = result("hf_kimi_linear-amd-epyc-2026-11-30")["rows"][0]
    experts = result("cpu_moe-amd-epyc-2026-11-30")["rows"][0]
    body = []
    for gate, label in (
        ("bounded", "the op, 4 heads of 128, 1024 tokens, bounded gate"),
        ("softplus", "softplus gate"),
    ):
        for key, what in (("forward", f"{label}, forward"), ("both", "the same, forward and backward")):
            r = op[gate, 1024][key]
            body.append([what, "ms", cell(r["ours_ms"]), cell(r["peer_ms"]), cell(r["ratio"])])
    for label, r, names in (
        ("`kimi_linear` of 18 M parameters, patched: forward", patched["forward"], ("patched", "plain")),
        ("the same, training", patched["training"], ("patched", "plain")),
        ("with experts, our model: prefill", experts["prefill"], ("ours", "theirs")),
        ("the same, training", experts["training"], ("ours", "theirs")),
        ("the same, decoding", experts["decode"], ("ours", "theirs")),
    ):
        body.append([label, "tokens/s", *(cell(r[n]) for n in names), cell(r["ratio"], 2)])
    return table(["one thread", "unit", "ours", "transformers", "times"], body, 2)


HOPPER = {  # floor, the two targets this work was given, and cudnn-frontend on the same kind of card, fast / slow gates
    "H=96 1x8192": (0.236, 0.70, 0.50, "1.134 / 2.445"),
    "H=96 8x1024": (0.258, 0.60, 0.45, "0.888 / 0.889"),
    "H=96 mixed": (0.252, 0.65, 0.50, "1.304 / 1.303"),
    "H=64 1x8192": (0.157, 0.50, 0.38, "0.578 / 2.383"),
    "H=64 8x1024": (0.172, 0.42, 0.34, "0.601 / 0.600"),
    "H=12 1x8192": (0.030, 0.22, 0.13, "0.284 / 2.263"),
    "H=16 1x65536": (0.31, 1.60, 0.90, "-"),
}


def hopper_rows() -> list[Row]:
    stored = json.loads((RESULTS / "hopper-forward-nvidia-h200.json").read_text())
    rows: list[Row] = stored["rows"] if isinstance(stored, dict) else stored
    return rows


def schedule(who: str) -> str:
    """ "('segments', 8)" -> "8 segments"."""
    name, _, count = who.strip("()").replace("'", "").partition(", ")
    return f"{count} {name}" if count else name


def both_gates(row: Row | None) -> str:
    return "-" if row is None else pair(f"{row['fast']:.3f}", f"{row['slow']:.3f}")


def hopper() -> str:
    body = []
    for case, (floor, must, aim, cudnn) in HOPPER.items():
        rows = [r for r in hopper_rows() if r["case"] == case]
        ours = next(r for r in rows if r["chosen"])
        flash = next((r for r in rows if r["who"] == "FlashKDA"), None)
        worst = max(ours["fast"], ours["slow"])
        met = "aim" if worst <= aim else "must" if worst <= must else "fast gates" if ours["fast"] <= must else "no"
        body.append(
            [
                case,
                schedule(ours["who"]),
                f"{floor:.3f}",
                both_gates(ours),
                f"{must:.2f} / {aim:.2f}",
                met,
                both_gates(flash),
                cudnn,
            ]
        )
    head = ["case", "schedule", "floor", "fast / slow gates", "must / aim", "met", "FlashKDA", "cudnn-frontend"]
    return table(head, body, 2)


def schedules() -> str:
    """Every schedule that was timed, the chosen one first."""
    cases: dict[str, list[Row]] = {}
    for r in hopper_rows():
        if r["who"] != "FlashKDA":
            cases.setdefault(r["case"], []).append(r)
    body = []
    for case, rows in cases.items():
        if len(rows) > 1:
            rows.sort(key=lambda r: not r["chosen"])
            texts = [f"{schedule(r['who'])} {r['fast']:.3f}" for r in rows]
            body.append([case, texts[0], ", ".join(texts[1:])])
    return table(["fast gates, ms", "chosen", "others"], body)


def short() -> str:
    """The README's."""
    f, t, e = forward_rows(), training_rows(), forward_errors()
    fast, slow = (f[f"forward H=96 1x8192, bounded gate{s}"] for s in ("", ", slow"))
    soft, step = f["forward H=96 1x8192, softplus gate"], f["decode H=96 B=256, in a graph"]
    both = t["forward+backward H=96 1x8192, bounded gate"]
    runs = {r["ops"]: r for r in result("train-100m-nvidia-h200")["rows"]}
    cpu_rows = result("cpu_kda-amd-epyc-2026-11-30")["rows"]
    op = next(r for r in cpu_rows if (r["gate"], r["T"], r["threads"]) == ("bounded", 1024, 1))
    wrong = [pair(*(error(e[f"bounded gate: {w}"].get(k)) for w in ("output", "state"))) for k in ("ours", "fla")]
    body = [
        ["forward, bounded gate, fast / slow decay", "ms", pair(cell(fast["ours"]), cell(slow["ours"])),
         f"cudnn-frontend {pair(cell(fast.get('cudnn')), cell(slow.get('cudnn')))}; fla {cell(fast.get('fla'))}"],
        ["forward, softplus gate", "ms", cell(soft["ours"]), f"fla {cell(soft.get('fla'))}"],
        ["error of the output / state against float64", "", wrong[0], f"fla {wrong[1]}"],
        ["forward and backward, bounded gate", "ms", cell(both["ours"]),
         f"fla {cell(both.get('fla'))}; cudnn-frontend's bare core {cell(both.get('cudnn'))}"],
        ["one token for 256 sequences", "us", cell(step["ours"]),
         f"fla's recurrence alone {cell(step.get('fla'))}; reading and writing the states {cell(step.get('floor'))}"],
        ["training a hybrid of 104 M parameters", "tokens/s", cell(runs["ours"].get("tokens/s")),
         f"fla's functions {cell(runs.get('fla', {}).get('tokens/s'))}"],
        ["CPU: the op forward, and with backward, 4 heads of 128, 1024 tokens", "ms",
         ", ".join(cell(op[k]["ours_ms"]) for k in ("forward", "both")),
         f"transformers {', '.join(cell(op[k]['peer_ms']) for k in ('forward', 'both'))}"],
    ]  # fmt: skip
    return table(["", "unit", "ours", "best peer"], body, 2)


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (forward, forward_error, near, training, models, cpu, hopper, schedules, short)
}  # fmt: skip


def filled(text: str) -> str:
    """The page with every table as the results have it."""
    return BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + "\n", text)


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        old = path.read_text()
        new = filled(old)
        if new != old:
            path.write_text(new)
        print(f"{page}: {'rewritten' if new != old else 'as it was'}", file=sys.stderr)


if __name__ == "__main__":
    main()

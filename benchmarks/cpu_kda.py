"""KDA on a CPU, side by side in one process with the torch fallback of the installed `transformers`.

    python benchmarks/cpu_kda.py                 # about five minutes; prints a table and writes benchmarks/results/
    python benchmarks/cpu_kda.py --no-write --threads 1

Both get the same tensors (B = 1, H = 4, K = V = 128, float32). The peer takes the log decay ready made, outside its clock; ours
computes the gate inside. Results and gradients of both are compared before any clock starts. Times are the best of
several alternating runs, processor time with one thread and wall time with more; memory is the peak of tensor memory alive
at once, as the profiler counts it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as peer_module

from openkda import kda
from openkda.testing.compare import rel
from openkda.testing.inputs import KDAInputs, make_inputs
from openkda.testing.runs import peak_bytes

SHAPE = {"B": 1, "H": 4, "K": 128}
GOALS = {("bounded", "forward"): 15, ("bounded", "both"): 20, ("softplus", "forward"): 8, ("softplus", "both"): 10}
PEER = getattr(peer_module, "torch_chunk_kimi_delta_attention", peer_module.chunk_kimi_delta_attention)


class Bench:
    """One set of inputs and the four calls on it. `forward` runs without gradients, `both` adds all of them."""

    def __init__(self, T: int, gate: str) -> None:
        x = make_inputs(0, T=T, gate=gate, initial_state=False, unit_keys=False, use_qk_l2norm=True, **SHAPE)
        assert x.gate is not None  # for the type checker: a gate was asked for
        self.x: KDAInputs = x.requires_grad_()
        with torch.no_grad():
            log_a = x.gate(x.g)
        self.peer_leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v, log_a, x.beta)]
        self.our_leaves = list(x.tensors().values())

    def ours(self) -> Tensor:
        x = self.x
        return kda(x.q, x.k, x.v, x.g, x.beta, gate=x.gate, use_qk_l2norm=True).output

    def peer(self) -> Tensor:
        return PEER(*self.peer_leaves, use_qk_l2norm_in_kernel=True)[0]

    def call(self, who: str, what: str) -> Callable[[], Any]:
        function, leaves = (self.ours, self.our_leaves) if who == "ours" else (self.peer, self.peer_leaves)

        def forward() -> Tensor:
            with torch.no_grad():
                return function()

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(function(), leaves, self.x.do)

        return forward if what == "forward" else both


def check(bench: Bench) -> dict[str, float]:
    """Relative difference of results and of the gradients that both sides have (q, k, v, beta). Raises above 1e-4."""
    found = {"output": rel(bench.ours(), bench.peer())}
    ours = dict(zip(bench.x.tensors(), bench.call("ours", "both")(), strict=True))
    peer = dict(zip(("q", "k", "v", "log_a", "beta"), bench.call("peer", "both")(), strict=True))
    found |= {f"d{n}": rel(ours[n], peer[n]) for n in ("q", "k", "v", "beta")}
    bad = {n: e for n, e in found.items() if not e < 1e-4}
    if bad:
        raise SystemExit(f"ours and the peer disagree, nothing was timed: {bad}")
    return found


def best_of(calls: dict[str, Callable[[], Any]], budget: float = 5.0) -> dict[str, float]:
    """Seconds, the best run of each call; in turn, always the one that has had less time, until each spent `budget` seconds.

    At least two runs each. The best, not the mean: whatever else the machine does can only add time. With one thread the
    clock is the processor's own (equal to the wall's on an idle machine), so that other programs' turns do not count.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best, spent, runs = dict.fromkeys(calls, math.inf), dict.fromkeys(calls, 0.0), dict.fromkeys(calls, 0)
    for call in calls.values():
        call()
    while min(spent.values()) < budget or min(runs.values()) < 2:
        name = min(spent, key=lambda n: spent[n])
        start = clock()
        calls[name]()
        taken = clock() - start
        best[name], spent[name], runs[name] = min(best[name], taken), spent[name] + taken, runs[name] + 1
    return best


def compare(gate: str, threads: int, T: int) -> dict[str, Any]:
    bench = Bench(T, gate)
    row: dict[str, Any] = {"gate": gate, "threads": threads, "T": T, "difference": check(bench)}
    for what in ("forward", "both"):
        calls = {who: bench.call(who, what) for who in ("ours", "peer")}
        seconds = best_of(calls)
        row[what] = {
            "ours_ms": seconds["ours"] * 1e3,
            "peer_ms": seconds["peer"] * 1e3,
            "ratio": seconds["peer"] / seconds["ours"],
            "goal": GOALS[gate, what],
        }
        if threads == 1:
            ours, peer = (peak_bytes(call) for call in calls.values())
            q = bench.x.q.numel() * 4
            row[what] |= {"ours_bytes_per_q": ours / q, "peer_bytes_per_q": peer / q, "memory_share": ours / peer}
    return row


def slope(gate: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Exponent p of time ~ T^p, least squares in the logarithms; 1 is linear."""
    out: dict[str, Any] = {"gate": gate, "T": list(lengths)}
    for what in ("forward", "both"):
        seconds = [best_of({"x": Bench(T, gate).call("ours", what)}, 2.0)["x"] for T in lengths]
        x, y = ([math.log(v) for v in values] for values in (lengths, seconds))
        mx, my = sum(x) / len(x), sum(y) / len(y)
        exponent = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)
        out[what] = {"ms": [s * 1e3 for s in seconds], "exponent": exponent}
    return out


def environment() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(
            (s.split(":", 1)[1].strip() for s in info.read_text().splitlines() if s.startswith("model name")), cpu
        )
    where = Path(__file__).resolve().parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=where, check=False
    )
    return {
        "cpu": cpu,
        "slug": "-".join(re.findall("[a-z0-9]+", cpu.lower().replace("(r)", ""))[:4]),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def table(result: dict[str, Any]) -> str:
    env = result["environment"]
    lines = [
        "# KDA on a CPU against transformers' torch fallback",
        "",
        f"{env['cpu']} ({env['capability']}, {env['cores']} threads by default), torch {env['torch']}, transformers "
        f"{env['transformers']}, Python {env['python']}, commit {env['commit']}, {env['date']}. B=1 H=4 K=V=128 float32; "
        "written by benchmarks/cpu_kda.py. Memory in multiples of the bytes of q.",
        "",
        "| gate | T | threads | what | ours ms | transformers ms | faster | goal | ours mem | transformers mem |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        for what, name in (("forward", "forward"), ("both", "forward + backward")):
            r = row[what]
            memory = f"{r['ours_bytes_per_q']:.1f} | {r['peer_bytes_per_q']:.0f}" if "memory_share" in r else "|"
            lines.append(
                f"| {row['gate']} | {row['T']} | {row['threads']} | {name} | {r['ours_ms']:.1f} | {r['peer_ms']:.0f} "
                f"| {r['ratio']:.1f}x | {r['goal']}x | {memory} |"
            )
    lines += ["", "Time over length, ours, 1 thread:", "", "| gate | what | ms | exponent of T |", "|---|---|---|---|"]
    for row in result["slopes"]:
        for what in ("forward", "both"):
            ms = ", ".join(f"{T}: {m:.0f}" for T, m in zip(row["T"], row[what]["ms"], strict=True))
            lines.append(f"| {row['gate']} | {what} | {ms} | {row[what]['exponent']:.2f} |")
    return "\n".join(lines) + "\n"


def publish(name: str, text: str, result: dict[str, Any], write: bool) -> None:
    """Print the table; write it and the numbers to benchmarks/results/."""
    print(text)
    if write:
        env = result["environment"]
        stem = Path(__file__).resolve().parent / "results" / f"{name}-{env['slug']}-{env['date']}"
        stem.parent.mkdir(exist_ok=True)
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        stem.with_suffix(".md").write_text(text)
        print(f"written: {stem}.json and .md")


def thread_arguments(doc: str | None) -> argparse.ArgumentParser:
    """--threads and --no-write, described by the first line of a script's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--no-write", action="store_true", help="print only")
    return parser


def main() -> None:
    parser = thread_arguments(__doc__)
    parser.add_argument("--T", type=int, nargs="+", default=[1024, 2048])
    args = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(), "rows": [], "slopes": []}
    for threads in args.threads:
        torch.set_num_threads(threads)
        for gate in ("bounded", "softplus"):
            result["rows"] += [compare(gate, threads, T) for T in args.T]
    torch.set_num_threads(1)
    result["slopes"] = [slope(gate, (1024, 2048, 4096, 8192)) for gate in ("bounded", "softplus")]
    publish("cpu_kda", table(result), result, not args.no_write)


if __name__ == "__main__":
    main()

"""Forward and backward of KDA on a GPU beside its peers: gradients first, then times, memory, host time and the first step.

    python benchmarks/kda_training.py            everything, about three minutes; kept under benchmarks/results/
    python benchmarks/kda_training.py --quick    one minute; nothing is stored
    python benchmarks/kda_training.py --part times    or errors, or host (of the times, what the host takes): the others stay in
                                                      the stored result

Gate, l2norm and the sigmoid of beta are inside for ours and for fla-core. cudnn-frontend's Hopper engine has a backward of the
bare core only, so it is given unit q and k, log decays in float32 and sigmoids: less work than the others do. Slow gates are
raw gates shifted by -6. Gradient errors are against the chunk form in float64 on the same bfloat16 inputs; nothing is timed
where one of ours is above its limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from kda import BF16, D, Training, bandwidth, host_time, median
from kda_report import Row, show, versions

from openkda.ops.kda.api import BoundedGate
from openkda.ops.kda.call import KDAOutput
from openkda.testing.compare import rel_grad
from openkda.testing.inputs import make_inputs
from openkda.testing.runs import gradients

LIMITS = {
    "dq": 6e-3, "dk": 6e-3, "dv": 6e-3, "dinitial_state": 6e-3, "dg": 1.2e-2, "dbeta": 1.2e-2, "dA_log": 6e-3, "ddt_bias": 6e-3,
}  # fmt: skip
NEAR = 2.0
"""Keys of one direction with beta about 1, in the limits above: what float16 operands may be off by there."""
GATES = {"bounded": ("random", "slow", "fast"), "softplus": ("random", "slow", "fast")}


def fla_op(q: Any, k: Any, v: Any, g: Any, beta: Any, *, gate: Any, initial_state: Any, **_: Any) -> KDAOutput:
    from fla.ops.kda import chunk_kda

    bounded = isinstance(gate, BoundedGate)
    o, state = chunk_kda(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=bounded,
        lower_bound=gate.lower_bound if bounded else None, A_log=gate.A_log, dt_bias=gate.dt_bias.flatten(),
    )  # fmt: skip
    return KDAOutput(o, state)


def errors(quick: bool) -> list[Row]:
    """One row a gate, decay regime and kind of keys: relative errors of every gradient, ours and fla's."""
    table: list[Row] = []
    for gate, decays in GATES.items():
        for decay in decays[:1] if quick else decays:
            for near in (False, True):
                x = make_inputs(
                    0, T=512, H=96, K=D, gate=gate, decay=decay, near_equal_keys=near, unit_keys=False,
                    use_qk_l2norm=True, use_beta_sigmoid=True,
                ).to(dtype=BF16, device="cuda")  # fmt: skip
                want = gradients(x.to(dtype=torch.float64), impl="chunkwise")
                row: Row = {"case": f"{gate} gate, {decay} decay{', near-equal keys' if near else ''}"}
                for way, op in (("ours", {"impl": None}), ("fla", {"op": fla_op})):
                    try:
                        got = gradients(x, **op)  # type: ignore[arg-type]
                        row[way] = {n: rel_grad(got[n], want[n], want["dq"]) for n in LIMITS}
                    except Exception as e:
                        if way == "ours":
                            raise
                        row[way] = f"{type(e).__name__}: {str(e)[:60]}"
                limit = {n: most * (NEAR if near else 1.0) for n, most in LIMITS.items()}
                bad = {n: e for n, e in row["ours"].items() if not e <= limit[n]}
                if bad:
                    raise SystemExit(f"wrong gradients, nothing timed: {row['case']}: {bad}")
                table.append(row)
    return table


def ratios(table: list[Row]) -> dict[str, float]:
    """Geometric mean of our error over fla's by gradient and over all, and the worst of all rows."""
    found: dict[str, list[float]] = {n: [] for n in LIMITS}
    for row in table:
        if isinstance(row["fla"], dict):
            for n in LIMITS:
                found[n].append(max(row["ours"][n], 1e-7) / max(row["fla"][n], 1e-7))
    every = [r for rs in found.values() for r in rs]
    if not every:
        return {}
    mean = lambda rs: math.exp(sum(map(math.log, rs)) / len(rs))  # noqa: E731
    return {**{n: mean(rs) for n, rs in found.items()}, "all": mean(every), "worst": max(every)}


class Core(Training):
    """cudnn-frontend's Hopper core on what stands inside the others: unit rows, log decays, sigmoids."""

    def __init__(self, *case: Any) -> None:
        super().__init__(*case)
        if self.bound is not None:  # it has no softplus gate
            self.ways["cudnn"] = self.core(self.bound)

    def core(self, bound: float) -> Callable[[], Any]:
        from_rows = lambda t: torch.nn.functional.normalize(t.detach().float(), dim=-1).to(BF16)[0]  # noqa: E731
        q, k = from_rows(self.q), from_rows(self.k)
        v, T = self.v.detach()[0], self.q.shape[1]
        g = (bound * torch.sigmoid(self.g.detach().float() + self.dt_bias.detach()))[0]
        beta = self.beta.detach().float().sigmoid()[0]
        cu = (torch.tensor([0, T], device="cuda") if self.cu is None else self.cu).int()
        self.core_leaves = [t.requires_grad_() for t in (q, k, v, g, beta)]

        def run() -> Any:
            from cudnn.linear_attention.ops import kimi_delta_attention

            return kimi_delta_attention(*self.core_leaves, cu, plan_name="kda_hopper_cuda")

        return run

    def step(self, way: str) -> None:
        if way != "cudnn":
            super().step(way)
            return
        with torch.enable_grad():
            torch.autograd.grad(self.ways[way]()[0], self.core_leaves, self.do[0])


CASES = (
    ("H=96 1x8192, bounded gate", (96, (8192,), "bounded", 0.0), 6.5),
    ("H=96 1x8192, bounded gate, slow", (96, (8192,), "bounded", -6.0), 6.5),
    ("H=96 1x8192, softplus gate", (96, (8192,), "softplus", 0.0), 8.5),
    ("H=96 1x8192, softplus gate, slow", (96, (8192,), "softplus", -6.0), 8.5),
    ("H=64 1x8192, bounded gate", (64, (8192,), "bounded", 0.0), 4.5),
    ("H=64 1x8192, bounded gate, slow", (64, (8192,), "bounded", -6.0), 4.5),
    ("H=16 8x2048 packed, bounded gate", (16, (2048,) * 8, "bounded", 0.0), None),
    ("H=16 8x2048 packed, bounded gate, slow", (16, (2048,) * 8, "bounded", -6.0), None),
)


def rows(quick: bool, speed: float) -> Iterator[Row]:
    """Floor: the forward reads q, k, v, g and writes o, the backward reads those inputs and do and writes their gradients."""
    for i, (name, case, must) in enumerate(CASES[::2] if quick else CASES):
        x = Core(*case)
        floor = 14 * x.q.numel() * 2 / speed * 1e3
        row = x.row(f"forward+backward {name}", "ms", lambda w, x=x: median(lambda: x.step(w)), floor)
        row["must"] = must if must is not None or isinstance(row["fla"], str) else 0.6 * row["fla"]
        yield row
        if not i:
            yield {**x.row("peak memory above its inputs", "GiB", x.peak), "must": 3.5}
    for name, case, _ in CASES[0:4:2]:
        yield from kept_rows(name, case)
    yield from host_rows()


class Empty(torch.autograd.Function):
    """What torch takes by itself: inputs are saved, gradients that were made before handed back."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradients: list[torch.Tensor], *leaves: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*leaves)
        ctx.gradients = gradients
        return output

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:  # type: ignore[override]
        _ = ctx.saved_tensors
        return (None, None, *ctx.gradients)


LAYERS = 8


def host_rows() -> Iterator[Row]:
    """Host time of sizes that the GPU finishes sooner. Beside it as floor: a function that does nothing, on the same inputs.

    torch computes gradients on a GPU in a thread of its own. The caller changes to it and back once a backward, not once a
    layer: one row has eight calls in one backward, as layers have them, and both come once more without that thread.
    """
    xs = [Core(2, (64,), "bounded", 0.0) for _ in range(LAYERS)]
    for x in xs:
        made = [torch.zeros_like(t) for t in x.leaves]
        x.ways["floor"] = lambda x=x, made=made: (Empty.apply(torch.empty_like(x.v), made, *x.leaves),)

    def together(way: str) -> None:
        with torch.enable_grad():
            leaves = [t for x in xs for t in (x.core_leaves if way == "cudnn" else x.leaves)]
            outputs = [x.ways[way]()[0] for x in xs]
            torch.autograd.grad(outputs, leaves, [x.do[0] if way == "cudnn" else x.do for x in xs])

    measured: dict[str, Callable[[str], float]] = {
        "host time of forward+backward": lambda w: host_time(lambda: xs[0].step(w), inference=False),
        f"the same, of {LAYERS} in one backward": lambda w: host_time(lambda: together(w), False, calls=4) / LAYERS,
    }
    for threads in ("", ", in one thread"):
        with torch.autograd.set_multithreading_enabled(not threads):
            for name, measure in measured.items():
                yield {**xs[0].row(name + threads, "us", measure), "must": 150.0}


def kept_rows(name: str, case: Any) -> list[Row]:
    """A row above with `recompute=False`: what the forward keeps for the backward saves time and costs memory."""
    x = Training(*case)
    x.ways = {"ours": lambda: x.ours(None, False), "triton": lambda: x.ours("triton", False)}
    time = x.row(f"kept by the forward: {name}", "ms", lambda w: median(lambda: x.step(w)))
    return [time, x.row("its peak memory above its inputs", "GiB", x.peak)]


def first_step_row() -> Row:
    """A fresh process with an empty kernel cache: from the first forward to the last gradient."""
    code = (
        "import time, torch; from kda import Training\n"
        "x = Training(96, (8192,), 'bounded', 0.0); torch.cuda.synchronize(); t = time.perf_counter()\n"
        "x.step('ours'); torch.cuda.synchronize(); print(time.perf_counter() - t)"
    )
    row: Row = {"case": "first step, empty cache", "unit": "s", "floor": None, "must": 20.0}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
            env={**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )  # fmt: skip
    row["ours"] = float(done.stdout.split()[-1]) if done.returncode == 0 else done.stderr.strip().splitlines()[-1][:60]
    return row


def render_errors(table: list[Row]) -> str:
    lines = ["| relative error, ours / fla-core | " + " | ".join(LIMITS) + " |", "|---|" + "---:|" * len(LIMITS)]
    for row in table:
        fla = row["fla"] if isinstance(row["fla"], dict) else {}
        cells = [f"{row['ours'][n]:.1e} / {fla[n]:.1e}" if fla else f"{row['ours'][n]:.1e} / -" for n in LIMITS]
        lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
    if not any(isinstance(r["fla"], dict) for r in table):
        return "\n".join([*lines, f"| fla-core: {table[0]['fla']} |"])
    return "\n".join([*lines, "| ratio | " + ", ".join(f"{n} {r:.2f}" for n, r in ratios(table).items()) + " |"])


def render(table: list[Row]) -> str:
    columns = ("ours", "triton", "fla", "cudnn", "must", "floor")
    lines = ["| case | unit | ours | impl=triton | fla-core | cudnn core | must | floor |", "|---|---|" + "---:|" * 6]
    for row in table:
        lines.append(f"| {row['case']} | {row['unit']} | " + " | ".join(show(row.get(c)) for c in columns) + " |")
    return "\n".join(lines)


def store(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))
    parts = []
    if "errors" in found:
        parts += [", ".join(f"{k} {v}" for k, v in found["errors_about"].items()), render_errors(found["errors"])]
    if "rows" in found:
        parts += [", ".join(f"{k} {v}" for k, v in found["about"].items()), render(found["rows"])]
    path.with_suffix(".md").write_text("\n\n".join(parts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Forward and backward of KDA on a GPU beside its peers")
    parser.add_argument("--quick", action="store_true", help="one minute; nothing is stored")
    parser.add_argument("--part", choices=("errors", "times", "host"), default=None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    path = options.out / ("kda-training-" + torch.cuda.get_device_name().lower().replace(" ", "-") + ".json")
    found: dict[str, Any] = json.loads(path.read_text()) if options.part and path.exists() else {}
    if options.part in (None, "errors"):
        wrong = errors(options.quick)
        found.update(errors=wrong, ratios=ratios(wrong), errors_about=versions())
        print(render_errors(wrong), flush=True)
        if not options.quick:
            store(path, found)
    if options.part != "errors":
        torch.set_grad_enabled(False)
        speed = bandwidth()
        found["about"] = {**versions(), "copy": f"{speed / 1e12:.2f} TB/s"}
        print(found["about"], flush=True)
        table = {row["case"]: row for row in found.get("rows", [])}
        measured = host_rows() if options.part == "host" else rows(options.quick, speed)
        first = () if options.quick or options.part == "host" else (first_step_row,)  # which compiles everything
        for row in itertools.chain(measured, (f() for f in first)):
            table[row["case"]] = {**row, "commit": found["about"]["commit"]}
            print(render([row]).splitlines()[-1], flush=True)
            found["rows"] = list(table.values())
            if not options.quick:
                store(path, found)
        if options.part != "host":  # rows that there are no longer
            found["rows"] = [r for r in table.values() if r.get("commit") == found["about"]["commit"]]
            if not options.quick:
                store(path, found)
        print(render(found["rows"]))


if __name__ == "__main__":
    main()

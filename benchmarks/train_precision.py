"""What bfloat16 and the kernels cost in loss: the demo's model trained twice on a GPU, from the same seed on the same batches.

    python benchmarks/train_precision.py                 2,000 steps, both runs at once, a few minutes
    python benchmarks/train_precision.py --steps 100     a look

One run is what training does by itself: bfloat16 autocast and the Triton kernels. The other is float32 throughout, with the
chunk form in plain torch (`impl="chunkwise"`). Reported: mean training loss of the last tenth, and loss on held-out text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

from kda import versions

from openkda.lab.demo import demo_options
from openkda.layers.kda import KimiDeltaAttention
from openkda.training.progress import Progress, StepReport
from openkda.training.train import train

RUNS = {"bfloat16, kernels": "bfloat16", "float32, chunkwise": "float32"}
GOAL = 0.005


class Losses(Progress):
    def __init__(self) -> None:
        self.all: list[float] = []

    def step(self, report: StepReport) -> None:
        self.all.append(report.loss)


def run(dtype: str, steps: int, batch: int) -> dict[str, Any]:
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        options = demo_options(Path(folder) / "run", seconds=0.0, steps=steps, quick=False, seed=0)
        options = dataclasses.replace(
            options, device="cuda", dtype=dtype, batch_size=batch, val_every=10**9, val_tokens=1 << 17, log_every=10**9
        )
        plain = partial(KimiDeltaAttention, impl="chunkwise")
        with mock.patch("openkda.models.hybrid.KimiDeltaAttention", plain) if dtype == "float32" else nullcontext():
            result = train(options, progress=losses)
    return {"losses": losses.all, "validation": result.val_loss, "seconds": result.seconds}


def both(steps: int, batch: int) -> dict[str, dict[str, Any]]:
    """Two processes at once: both are bound by their own launches, not by the GPU."""
    command = [sys.executable, __file__, "--steps", str(steps), "--batch", str(batch), "--run"]
    running = {name: subprocess.Popen([*command, dtype], stdout=subprocess.PIPE) for name, dtype in RUNS.items()}
    found = {}
    for name, process in running.items():
        out, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{name}: ended with {process.returncode}")
        found[name] = json.loads(out.splitlines()[-1])
    return found


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Both curves, and how far apart they are, each a mean over 20 steps."""
    import matplotlib.pyplot as plt

    smooth = {name: [mean(r["losses"][i : i + 20]) for i in range(0, len(r["losses"]), 20)] for name, r in runs.items()}
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1))
    for name, values in smooth.items():
        top.plot(range(10, 20 * len(values), 20), values, label=name, linewidth=1.2)
    a, b = smooth.values()
    bottom.plot(range(10, 20 * len(a), 20), [100 * (x / y - 1) for x, y in zip(a, b, strict=True)], linewidth=1.0)
    bottom.axhline(0.0, color="grey", linewidth=0.6)
    top.set_ylabel("nats per byte")
    bottom.set_ylabel("difference, %")
    bottom.set_xlabel("step")
    top.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16, help="windows of 128 bytes a step")
    parser.add_argument("--run", choices=tuple(RUNS.values()), help="one of the two, its numbers as JSON")
    parser.add_argument("--out", type=Path, help="folder for train-precision-*.json and .png; default: print only")
    args = parser.parse_args()
    if args.run is not None:
        print(json.dumps(run(args.run, args.steps, args.batch)))
        return
    runs = both(args.steps, args.batch)
    ends = {name: mean(r["losses"][-max(1, args.steps // 10) :]) for name, r in runs.items()}
    for name, r in runs.items():
        print(f"{name}: training {ends[name]:.4f}, held out {r['validation']:.4f} nats per byte, {r['seconds']:.0f} s")
    first, second = runs
    difference = {
        "training": ends[first] / ends[second] - 1,
        "held out": runs[first]["validation"] / runs[second]["validation"] - 1,
    }
    print("difference: " + ", ".join(f"{k} {v:+.3%}" for k, v in difference.items()) + f" (goal: within {GOAL:.1%})")
    if args.out is not None:
        about = versions()
        args.out.mkdir(parents=True, exist_ok=True)
        stem = args.out / ("train-precision-" + about["device"].lower().replace(" ", "-"))
        result = {"about": about, "steps": args.steps, "bytes a step": 128 * args.batch, "last tenth": ends,
                  "difference %": {k: 100 * v for k, v in difference.items()}, "runs": runs}  # fmt: skip
        stem.with_suffix(".json").write_text(json.dumps(result) + "\n")
        try:
            draw(runs, stem.with_suffix(".png"))
        except ModuleNotFoundError as missing:
            print(f"no picture: {missing}")
    if args.steps >= 2000 and max(map(abs, difference.values())) > GOAL:
        raise SystemExit("the two runs end further apart than the goal")


if __name__ == "__main__":
    main()

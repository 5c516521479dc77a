"""What bfloat16 and the kernels cost in loss: the demo's model trained twice from the same seed on the same batches.

    python benchmarks/train_precision.py --run bfloat16 --device cuda --save runs/bfloat16.json
    python benchmarks/train_precision.py --run float32 --device cpu --save runs/float32.json
    python benchmarks/train_precision.py --compare runs/bfloat16.json runs/float32.json

The first is what training does by itself on a GPU: bfloat16 autocast, the kernels. The second is `impl="chunkwise"` in float32,
whose 18,000 torch calls a step take a GPU as long as a CPU. Both must read the same files (`--data`): the standard library
differs between Pythons.
Reported: the mean training loss of the last tenth of the steps, and the loss on held-out text. With `--keep FOLDER` the run
stays there, and the same command goes on with it where it was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch

from openkda import __version__
from openkda.lab.demo import demo_options
from openkda.layers.kda import KimiDeltaAttention
from openkda.training.progress import Progress, StepReport
from openkda.training.train import resume, train

GOAL = 0.005


class Losses(Progress):
    def step(self, report: StepReport) -> None:
        if report.step % 100 == 0:
            print(f"step {report.step}: {report.loss:.4f}, {report.seconds:.0f} s", flush=True)


def run(args: argparse.Namespace) -> dict[str, Any]:
    plain = partial(KimiDeltaAttention, impl="chunkwise")
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.run == "float32":
            stack.enter_context(mock.patch("openkda.models.hybrid.KimiDeltaAttention", plain))
        if (folder / "run" / "last").exists():
            result = resume(folder / "run", settings=[f"cuda_graph={not args.launched}"], progress=Losses())
        else:
            options = demo_options(folder / "run", seconds=0.0, steps=args.steps, quick=False, seed=0)
            options = dataclasses.replace(
                options, data=(args.data,), device=args.device, dtype=args.run, batch_size=args.batch, val_every=10**9,
                val_tokens=1 << 17, log_every=1, checkpoint_every=250, keep=1,
                cuda_graph=not args.launched,
            )  # fmt: skip
            result = train(options, progress=Losses())
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    about = {"device": device, "torch": torch.__version__, "openkda": __version__}
    return {
        "name": f"{args.run}, {'kernels' if args.run == 'bfloat16' else 'chunk form'}, {args.device}", "about": about,
        "bytes a step": 128 * args.batch, "losses": [line["loss"] for line in lines if "loss" in line],
        "held out": result.val_loss, "seconds": result.seconds,
    }  # fmt: skip


def last_tenth(losses: list[float]) -> float:
    return mean(losses[-max(1, len(losses) // 10) :])


def compare(first: dict[str, Any], second: dict[str, Any], out: Path | None) -> None:
    """Print how far apart two runs end; with `out`, keep numbers and picture there. Raises SystemExit beyond the goal.

    A run that was stopped is compared as far as it came, in training loss alone: both follow the schedule of --steps.
    """
    steps = min(len(first["losses"]), len(second["losses"]))
    ends = {r["name"]: last_tenth(r["losses"][:steps]) for r in (first, second)}
    for r in (first, second):
        print(
            f"{r['name']}: training {ends[r['name']]:.4f}, held out {r['held out']:.4f} nats per byte, {len(r['losses'])} steps"
        )
    apart = {"training": ends[first["name"]] / ends[second["name"]] - 1}
    if len(first["losses"]) == len(second["losses"]):
        apart["held out"] = first["held out"] / second["held out"] - 1
    print(
        f"after {steps} steps: " + ", ".join(f"{k} {v:+.3%}" for k, v in apart.items()) + f" (goal: within {GOAL:.1%})"
    )
    if out is not None:
        result = {
            "steps": steps, "bytes a step": first["bytes a step"], "last tenth": ends,
            "difference %": {k: 100 * v for k, v in apart.items()}, "runs": [first, second],
        }  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        (out / "train-precision.json").write_text(json.dumps(result) + "\n")
        draw(first, second, steps, out / "train-precision.png")
    if max(map(abs, apart.values())) > GOAL:
        raise SystemExit("the two runs end further apart than the goal")


def draw(first: dict[str, Any], second: dict[str, Any], steps: int, path: Path) -> None:
    """Both curves, and how far apart they are, each a mean over 20 steps."""
    import matplotlib.pyplot as plt

    a, b = ([mean(r["losses"][i : i + 20]) for i in range(0, steps - 19, 20)] for r in (first, second))
    places = range(10, 20 * len(a), 20)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1))
    for r, values in ((first, a), (second, b)):
        top.plot(places, values, label=r["name"], linewidth=1.2)
    bottom.plot(places, [100 * (x / y - 1) for x, y in zip(a, b, strict=True)], linewidth=1.0)
    bottom.axhline(0.0, color="grey", linewidth=0.6)
    top.set_ylabel("nats per byte")
    bottom.set_ylabel("difference, %")
    bottom.set_xlabel("step")
    top.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--run", choices=("bfloat16", "float32"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--data", default="python-stdlib")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8, help="windows of 128 bytes a step")
    parser.add_argument("--save", type=Path, help="file for the numbers of --run")
    parser.add_argument("--keep", type=Path, help="folder in which the run stays, to go on with")
    parser.add_argument("--launched", action="store_true", help="without CUDA graphs")
    parser.add_argument("--compare", type=Path, nargs=2, help="two files that --save wrote")
    parser.add_argument("--out", type=Path, help="folder for train-precision.json and .png; default: print only")
    args = parser.parse_args()
    if args.compare is not None:
        first, second = (json.loads(path.read_text()) for path in args.compare)
        compare(first, second, args.out)
        return
    if args.run is None:
        parser.error("expected --run or --compare")
    found = run(args)
    end = last_tenth(found["losses"])
    print(f"{found['name']}: training {end:.4f}, held out {found['held out']:.4f}, {found['seconds']:.0f} s")
    if args.save is not None:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

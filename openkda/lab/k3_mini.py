"""Kimi K3 in miniature beside the plain hybrid: same demo text, same active parameters, same tokens, several seeds.

    python -m openkda.lab.k3_mini --out runs/k3-mini --seeds 0 1 2      # as many steps as the demo takes; --jobs 6 at once
    python -m openkda.lab.k3_mini --overhead                            # what Attention Residuals and balancing cost a step

The K3 side is the preset "k3-mini": one block of Attention Residuals, Stable LatentMoE with Quantile Balancing and SiTU-GLU;
both have the bounded gate and full-rank output gates, and multiply a token with as many matrix weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from openkda.lab.demo import demo_options
from openkda.layers.balance import QuantileBalancer
from openkda.models.config import ModelConfig
from openkda.models.hybrid import HybridLM
from openkda.models.inspect import describe
from openkda.models.presets import PRESETS
from openkda.training.batches import Batch
from openkda.training.evaluate import token_loss
from openkda.training.metrics import read_metrics
from openkda.training.optim import Optimizer, group_parameters
from openkda.training.options import TrainOptions
from openkda.training.train import train

SIDES = {"plain": "demo", "k3": "k3-mini"}  # presets
STEPS = 240  # of 2,048 bytes: what the demo trains on in its minutes


@dataclass(frozen=True)
class Curve:
    """One run: training loss by step, validation loss by step, seconds of training."""

    side: str
    seed: int
    loss: list[tuple[int, float]]
    val_loss: list[tuple[int, float]]
    seconds: float


def compare(out: str | Path, *, steps: int = STEPS, seeds: Sequence[int] = (0, 1, 2), jobs: int = 1) -> list[Curve]:
    """Train every side with every seed; writes curves.json and curves.png to `out`, each run to `out`/SIDE-SEED.

    jobs: runs at a time, each in a process of its own with an equal share of the cores. A run that is already there is
    read, not repeated. Needs the extra `lab` for the picture.
    """
    out = Path(out)
    sizes = {side: describe(PRESETS[preset]).active_parameters for side, preset in SIDES.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"sides: expected equal active parameters, received {sizes}")
    runs = [(out / f"{side}-{seed}", side, seed, steps) for seed in seeds for side in SIDES]
    if jobs == 1:
        curves = list(itertools.starmap(_run, runs))
    else:
        threads = max(1, (os.cpu_count() or 1) // jobs)
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
            curves = list(pool.map(_run, *zip(*runs, strict=True)))
    (out / "curves.json").write_text(json.dumps([vars(c) for c in curves], indent=1) + "\n")
    _draw(curves, out / "curves.png")
    return curves


def summary(curves: Sequence[Curve]) -> str:
    """Final validation loss of each run, and the K3 side over the plain one, by seed and on average."""
    final = {(c.side, c.seed): c.val_loss[-1][1] for c in curves}
    seeds = sorted({c.seed for c in curves})
    lines = ["seed   plain      k3   k3 / plain"]
    for seed in seeds:
        plain, k3 = final["plain", seed], final["k3", seed]
        lines.append(f"{seed:4d}  {plain:.4f}  {k3:.4f}  {k3 / plain:.4f}")
    means = {side: sum(final[side, s] for s in seeds) / len(seeds) for side in SIDES}
    lines.append(f"mean  {means['plain']:.4f}  {means['k3']:.4f}  {means['k3'] / means['plain']:.4f}")
    return "\n".join(lines)


def overhead(rounds: int = 21) -> dict[str, float]:
    """A whole training step of the K3 side over the same step with one part left out, minus 1: median of rounds in each of
    which all take a turn. Processor time, which other programs' turns do not lengthen."""
    k3 = PRESETS[SIDES["k3"]]
    whole = _stepper(k3, balanced=True)
    without = {
        "Attention Residuals": _stepper(k3.replace(attn_res_block_size=None), balanced=True),
        "balancing": _stepper(k3, balanced=False),
    }
    ratios: dict[str, list[float]] = {name: [] for name in without}
    for _ in range(rounds + 1):
        base = _processor_time(whole)
        for name, step in without.items():
            ratios[name].append(base / _processor_time(step) - 1)
    return {name: statistics.median(values[1:]) for name, values in ratios.items()}  # the first round warms up


def _processor_time(call: Callable[[], None]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _stepper(config: ModelConfig, *, balanced: bool) -> Callable[[], None]:
    """One step of the demo's size on random bytes, as `openkda.training.trainer` takes it."""
    options = demo_options(Path("unused"), seconds=0.0, steps=1, quick=False, seed=0)
    model = HybridLM(config)
    model.init_weights(0)
    optimizer = Optimizer(
        group_parameters(model), lr=1e-4, weight_decay=options.weight_decay, momentum=options.momentum,
        betas=(options.beta1, options.beta2),
    )  # fmt: skip
    balancer = QuantileBalancer(model) if balanced else None
    count = options.batch_size * options.seq_len
    ids = torch.randint(256, (1, count + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.arange(0, count + 1, options.seq_len))

    def step() -> None:
        token_loss(model, batch, dtype=torch.float32).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if balancer is not None:
            balancer.step()

    return step


def _run(out: Path, side: str, seed: int, steps: int) -> Curve:
    if not (out / "done").is_file():
        options = demo_options(out, seconds=0.0, steps=steps, quick=False, seed=seed).to_dict()
        options |= {"preset": SIDES[side], "val_every": max(1, steps // 4), "val_tokens": 32768, "log_every": 5}
        result = train(TrainOptions.from_dict(options))
        if result.interrupted is not None:
            raise KeyboardInterrupt
        (out / "done").write_text(f"{result.seconds}\n")
    lines = read_metrics(out / "metrics.jsonl")
    losses, val = ([(m["step"], m[key]) for m in lines if key in m] for key in ("loss", "val_loss"))
    return Curve(side, seed, losses, val, float((out / "done").read_text()))


def _draw(curves: Sequence[Curve], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="validation loss, nats per byte")
    colours = {"plain": "tab:blue", "k3": "tab:orange"}
    for c in curves:
        first = c.seed == min(other.seed for other in curves)
        axes.plot(*zip(*c.val_loss, strict=True), color=colours[c.side], marker=".", label=c.side if first else None)
    axes.legend(title=f"{len({c.seed for c in curves})} seeds each")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", default="runs/k3-mini")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--overhead", action="store_true", help="time training steps instead")
    args = parser.parse_args()
    if args.overhead:
        for name, share in overhead().items():
            print(f"{name}: {share:+.1%} of a training step")
    else:
        print(summary(compare(args.out, steps=args.steps, seeds=args.seeds, jobs=args.jobs)))


if __name__ == "__main__":
    main()

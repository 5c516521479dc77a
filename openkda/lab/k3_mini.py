"""Kimi K3 in miniature beside the plain hybrid: same demo text, same active parameters, same tokens, several seeds.

    python -m openkda.lab.k3_mini --out runs/k3-mini --steps 300 --seeds 0 1 2

The K3 side has one block of Attention Residuals, Stable LatentMoE with Quantile Balancing and SiTU-GLU; both have the bounded
gate and full-rank output gates. A token is multiplied with as many matrix weights on either side: a dense layer of
3 * 128 * 288 equals latent projections, router, shared expert and four of sixteen experts of width 80.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openkda.lab.demo import demo_options
from openkda.models.inspect import describe
from openkda.models.presets import PRESETS
from openkda.training.metrics import read_metrics
from openkda.training.options import TrainOptions
from openkda.training.train import train

K3: dict[str, Any] = {
    "attn_res_block_size": PRESETS["demo"].num_hidden_layers, "num_experts": 16, "num_experts_per_token": 4,
    "num_shared_experts": 1, "moe_intermediate_size": 80, "routed_expert_hidden_size": 64, "latent_moe_use_norm": True,
    "first_k_dense_replace": 1, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
}  # fmt: skip
SIDES: dict[str, dict[str, Any]] = {"plain": {}, "k3": K3}


@dataclass(frozen=True)
class Curve:
    """One run: training loss by step, validation loss by step, seconds of training."""

    side: str
    seed: int
    loss: list[tuple[int, float]]
    val_loss: list[tuple[int, float]]
    seconds: float


def compare(out: str | Path, *, steps: int = 300, seeds: Sequence[int] = (0, 1, 2)) -> list[Curve]:
    """Train every side with every seed; writes curves.json and curves.png to `out`, each run to `out`/SIDE-SEED.

    A run that is already there is read, not repeated. Needs the extra `lab` for the picture.
    """
    out = Path(out)
    sizes = {side: describe(PRESETS["demo"].replace(**fields)).active_parameters for side, fields in SIDES.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"sides: expected equal active parameters, received {sizes}")
    curves = [_run(out / f"{side}-{seed}", side, seed, steps) for seed in seeds for side in SIDES]
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


def _run(out: Path, side: str, seed: int, steps: int) -> Curve:
    if not (out / "done").is_file():
        options = demo_options(out, seconds=0.0, steps=steps, quick=False, seed=seed).to_dict()
        options |= {"model": SIDES[side], "val_every": max(1, steps // 4), "val_tokens": 32768, "log_every": 5}
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
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    print(summary(compare(args.out, steps=args.steps, seeds=args.seeds)))


if __name__ == "__main__":
    main()

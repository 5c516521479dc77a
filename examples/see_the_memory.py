"""What four memories of one size remember of a stream that is longer than they are: pairs are written, then each key is asked.

python examples/see_the_memory.py [--out memory.png]        # numbers, and with --out a picture (matplotlib)

Every channel forgets at the same rate here; KDA learns a rate for each channel from each token.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from openkda import kda

PAIRS, CHANNELS, FADE = 40, 16, 0.93
METHODS = ("linear attention", "forgetting (GLA)", "correcting (DeltaNet)", "both (KDA)")


def story() -> tuple[Tensor, Tensor]:
    """Keys [T, K] of length 1, drawn at random, and values [T, V]: a bump that wanders, so that the eye knows each again."""
    gen = torch.Generator().manual_seed(3)
    keys = torch.nn.functional.normalize(torch.randn(PAIRS, CHANNELS, generator=gen, dtype=torch.float64), dim=-1)
    at = torch.linspace(1, CHANNELS - 2, PAIRS, dtype=torch.float64)
    return keys, torch.exp(-((torch.arange(CHANNELS) - at[:, None]) ** 2) / 1.5)


def remember(method: str, keys: Tensor, values: Tensor) -> Tensor:
    """What the memory answers for every key after all writes, [T, V]."""
    if "linear" in method or "GLA" in method:  # adds whatever comes, without asking what is there
        S = torch.zeros(CHANNELS, CHANNELS, dtype=torch.float64)
        for k, v in zip(keys, values, strict=True):
            S = S * (FADE if "GLA" in method else 1) + torch.outer(k, v)
    else:  # the library's op: one batch row, one head
        decay = torch.full_like(keys, FADE if "KDA" in method else 1).log()
        args = [x[None, :, None] for x in (keys, keys, values, decay)]
        done = kda(*args, torch.ones(1, len(keys), 1, dtype=torch.float64), output_final_state=True)
        assert done.final_state is not None
        S = done.final_state[0, 0]
    return keys @ S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write a picture to this file")
    options = parser.parse_args()
    keys, values = story()
    answers = {method: remember(method, keys, values) for method in METHODS}
    print(f"{PAIRS} pairs in a memory of {CHANNELS} x {CHANNELS} numbers\n")
    print(f"{'error of the answer for':24}  the newest pair  the last 4  the last 10  all {PAIRS}")
    for method, got in answers.items():
        error = (got - values).norm(dim=-1) / values.norm(dim=-1)
        means = (error[-n:].mean() for n in (1, 4, 10, PAIRS))
        print(f"{method:24}  {{:15.1%}}  {{:10.1%}}  {{:11.1%}}  {{:6.1%}}".format(*means))
    if options.out:
        draw(options.out, values, answers)


def draw(path: str, values: Tensor, answers: dict[str, Tensor]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = {"what was written": values, **answers}
    for axes, (title, rows) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axes.imshow(rows, vmin=-1, vmax=1, cmap="RdBu_r", aspect="auto")
        axes.set(title=title, xticks=[], yticks=[])
        axes.title.set_fontsize(10)
        if rows is values:
            axes.set_yticks([0, PAIRS - 1], ["oldest", "newest"])
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

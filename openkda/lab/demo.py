"""The demo: a small hybrid learns Python from the standard library's source, in minutes, on a laptop's processor.

text -> train -> checkpoint -> load it again -> loss beside a byte-trigram's -> memory -> samples, streamed
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from openkda.generation.console import memory_table, stream
from openkda.generation.sampling import SamplingOptions
from openkda.lab.ngram import NGram
from openkda.models.checkpoint import load_checkpoint
from openkda.models.hybrid import HybridLM
from openkda.models.inspect import describe
from openkda.models.tokenizer import load_tokenizer
from openkda.training.corpus import PYTHON_STDLIB
from openkda.training.evaluate import evaluate, window_begins
from openkda.training.options import TrainOptions
from openkda.training.progress import console_progress
from openkda.training.token_file import TokenFile
from openkda.training.train import TrainResult, train

if TYPE_CHECKING:
    from rich.console import Console

SECONDS = 230.0  # of training; reading the text, the comparison and the sample take about 20 more
PROMPTS = (  # inside code: a sample that begins with `def ` alone is a docstring more often than not
    "import os\n\n\ndef main(args):\n    if ",
    "class Parser:\n    def __init__(self, ",
    "def read(path):\n    with ",
)
# Without the rule on n-grams every second sample of 700 bytes ended in blanks only (docs/decisions.md).
SAMPLE = SamplingOptions(max_new_tokens=220, temperature=0.6, top_p=0.9, no_repeat_ngram=24, seed=1)
SCORED = 131072  # held-out bytes of the comparison, in windows spread over all held-out files


@dataclass(frozen=True)
class DemoResult:
    """loss, baseline: nats per byte of the loaded checkpoint and of the trigram model on the same held-out text (NaN if
    the run was interrupted). samples: the new text after each of PROMPTS."""

    out: Path
    checkpoint: Path
    loss: float
    baseline: float
    samples: tuple[str, ...]
    interrupted: bool

    @property
    def ratio(self) -> float:
        return self.loss / self.baseline


def run_demo(
    out: str | Path | None = None,
    *,
    seconds: float = SECONDS,
    steps: int | None = None,
    quick: bool = False,
    seed: int = 0,
    console: Console | None = None,
) -> DemoResult:
    """Train the `demo` preset on the standard library's source, and show what it has learned and what it weighs.

    out: a new directory; default runs/demo, or runs/demo-2 and so on where there is one already.
    seconds: of training; the learning rate follows the clock, so two runs differ. steps: train so many instead, whatever
        they take; such a run repeats to the bit on the same machine. quick: a few seconds, to see that everything works.
    Ctrl-C in training saves a checkpoint and ends the demo. Needs rich.
    """
    console = _console() if console is None else console
    options = demo_options(_free_directory(out), seconds=seconds, steps=steps, quick=quick, seed=seed)
    _say(
        console, "1. A small Kimi-K3-style model learns Python from the standard library's source, byte by byte", "bold"
    )
    result = train(options, progress=console_progress())
    if result.interrupted is not None:
        _say(console, f"Stopped at step {result.step}; saved as {result.checkpoint}. Go on with:")
        _say(console, f"  {_program()} train --resume {result.out}")
        return DemoResult(result.out, result.checkpoint, np.nan, np.nan, (), True)
    return _show(result, options, console, quick)


def demo_options(out: Path, *, seconds: float, steps: int | None, quick: bool, seed: int) -> TrainOptions:
    """The training run of the demo; docs/decisions.md has the measurements behind these numbers."""
    if quick:
        return TrainOptions(
            data=(PYTHON_STDLIB,), out=str(out), preset="tiny", seed=seed, device="cpu",
            seq_len=128, batch_size=4, steps=8 if steps is None else steps, warmup=0.1, lr=1e-2,
            log_every=1, val_every=4, val_tokens=1024, checkpoint_every=10**9,
        )  # fmt: skip
    return TrainOptions(
        data=(PYTHON_STDLIB,), out=str(out), preset="demo", seed=seed, device="cpu",
        seq_len=128, batch_size=16, steps=10**6 if steps is None else steps, max_seconds=seconds if steps is None else None,
        warmup=0.02, lr=7e-3, log_every=20, val_every=100, val_tokens=8192, checkpoint_every=10**9,
    )  # fmt: skip


def _show(result: TrainResult, options: TrainOptions, console: Console, quick: bool) -> DemoResult:
    """Everything after training, from the checkpoint alone."""
    _say(console, f"\n2. Saved as {result.checkpoint} and loaded again; loss on files that it has never seen", "bold")
    model, tokenizer = load_checkpoint(result.checkpoint), load_tokenizer(result.checkpoint)
    loss, baseline = compare(model, result.out / "data", options.seq_len, 4096 if quick else SCORED)
    _say(console, f"   this model             {loss:.3f} nats per byte")
    _say(console, f"   byte-trigram, add-one  {baseline:.3f}  (counted over all of the training text)")
    _say(console, f"   ratio                  {loss / baseline:.3f}")
    _say(console, "\n3. What it remembers: KDA layers hold a constant, Gated MLA layers a little a token", "bold")
    console.print(memory_table(describe(model.config, dtype=torch.float32)))
    _say(console, "\n4. What it writes after three beginnings", "bold")
    sampling = replace(SAMPLE, max_new_tokens=40 if quick else SAMPLE.max_new_tokens)
    samples = []
    for n, prompt in enumerate(PROMPTS):
        _say(console, "")
        drawing = replace(sampling, seed=sampling.seed + n)
        samples.append(stream(model, tokenizer, prompt, drawing, console=console))
    _close(result, console)
    return DemoResult(result.out, result.checkpoint, loss, baseline, tuple(samples), False)


def compare(model: HybridLM, data: Path, seq_len: int, scored: int) -> tuple[float, float]:
    """(loss of the model, loss of a byte-trigram model counted on data/train), nats per byte on the same windows of data/val.

    The model starts each window with an empty state; the trigram sees the two bytes before it.
    """
    training, held_out = TokenFile(data / "train"), TokenFile(data / "val")
    result = evaluate(model, held_out, seq_len=seq_len, device=torch.device("cpu"), pack_tokens=4096, max_tokens=scored)
    trigram = NGram(np.asarray(training.tokens), vocab_size=training.vocab_size)
    begins = window_begins(held_out, seq_len, scored)
    baseline = np.mean([trigram.loss(held_out.tokens[max(0, b - 1) : b + seq_len + 1]) for b in begins])
    return result.loss, float(baseline)


def _close(result: TrainResult, console: Console) -> None:
    checkpoint, program = result.out / "last", _program()
    _say(
        console,
        f"\nTrained on {result.tokens:,} bytes in {result.seconds:.0f} s; the loss curve is {result.out / 'loss.png'}",
    )
    _say(console, "\nWhat to type next", "bold")
    for line in (
        f"{program} generate --checkpoint {checkpoint} --prompt 'class Reader:' --temperature 0.6 --no-repeat-ngram 24",
        f"{program} inspect {checkpoint}",
        f"{program} train --data YOUR/FILES --out runs/mine --set max_seconds=300 seq_len=128",
        f"{program} eval --checkpoint {checkpoint} --data YOUR/FILES",
    ):
        _say(console, f"  {line}")


def _free_directory(out: str | Path | None) -> Path:
    if out is not None:
        return Path(out)
    path, n = Path("runs/demo"), 2
    while path.exists() and any(path.iterdir()):
        path, n = Path(f"runs/demo-{n}"), n + 1
    return path


def _program() -> str:
    """How the reader started this, or can start it: the command if it is on the path, else the module."""
    if shutil.which("openkda"):
        return "openkda"
    python = Path(sys.executable)
    here = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return f"{here} -m openkda"


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _console() -> Console:
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise ModuleNotFoundError("the demo needs rich: pip install 'openkda[cli]'") from None
    return Console()

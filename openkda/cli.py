"""The command line: argument parsing and nothing else. Each command is one call into the library.

A user's mistake is one line on standard error and a non-zero exit code; OPENKDA_DEBUG=1 shows its traceback.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError:  # this module is the program: without its parser there is nothing to run
    sys.exit("openkda: the command line needs typer and rich: pip install 'openkda[cli]'")

app = typer.Typer(
    help="Train, sample and inspect models with Kimi Delta Attention.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# Options that take several values, as in `--data a b c`, and what one looks like; the parser itself wants the name before each.
_SEVERAL: dict[str, Callable[[str], bool]] = dict.fromkeys(
    ("--data", "--val-data", "--set", "--stop"), lambda value: True
)
_SEVERAL["--length"] = str.isdigit  # a model may stand behind them

Data = Annotated[list[str], typer.Option("--data", help="Files or directories of text; python-stdlib for that.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
Checkpoint = Annotated[Path, typer.Option(help="A checkpoint directory, or a run (then its newest).")]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Any training option or model field.")]


@app.command()
def train(
    context: typer.Context,
    data: Data = [],  # noqa: B006 (typer copies it)
    preset: Annotated[str, typer.Option(help="A preset's name, or a config.json.")] = "demo",
    out: Annotated[
        Path | None, typer.Option(help="Directory of the run. Default: runs/PRESET or CHECKPOINT-tuned.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes (default), or a tokenizers JSON or tiktoken file.", show_default=False)
    ] = None,
    init_from: Annotated[
        str | None, typer.Option(help="Begin with this checkpoint: config, weights and tokenizer; step 0.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    val_data: Annotated[list[str], typer.Option(help="Held-out text. Default: 5 % of the files.")] = [],  # noqa: B006
    device: Device = "auto",
    resume: Annotated[str | None, typer.Option(help="Continue this run or checkpoint, to the bit.")] = None,
    settings: Settings = [],  # noqa: B006
) -> int:
    """Train a model on text."""
    from openkda.training import train as training
    from openkda.training.options import TrainOptions, with_settings
    from openkda.training.progress import console_progress

    if steps is not None:
        settings = [f"steps={steps}", *settings]
    if resume is None:
        name = Path(preset).stem if init_from is None else f"{Path(init_from).resolve().name}-tuned"
        fields: dict[str, Any] = {"preset": preset, "init_from": init_from, "tokenizer": tokenizer}
        fields["out"] = out or f"runs/{name}"
        options = TrainOptions(data=tuple(data), val_data=tuple(val_data), device=device, **fields)
        result = training.train(with_settings(options, settings), progress=console_progress())
    else:
        fixed = ("data", "val_data", "preset", "init_from", "out", "tokenizer")
        given = [f"--{k.replace('_', '-')}" for k in fixed if context.get_parameter_source(k).name == "COMMANDLINE"]  # type: ignore[union-attr]
        if given:
            raise ValueError(f"--resume takes them from the run: leave out {', '.join(given)}")
        settings = settings if device == "auto" else [f"device={device}", *settings]
        result = training.resume(resume, settings=settings, progress=console_progress())
    if result.interrupted is not None:
        print(f"stopped at step {result.step}; saved {result.checkpoint}", file=sys.stderr)
        print(f"continue with: openkda train --resume {result.out}", file=sys.stderr)
        return 128 + result.interrupted
    print(f"{result.checkpoint}: step {result.step}, validation loss {result.val_loss:.4f}, {result.seconds:.0f} s")
    return 0


@app.command("eval")
def evaluate(
    checkpoint: Checkpoint,
    data: Data,
    seq_len: Annotated[int, typer.Option(help="Tokens of context, from an empty state.")] = 1024,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> int:
    """Loss, perplexity and bits per byte of a checkpoint on text."""
    from openkda.training.evaluate import evaluate_paths
    from openkda.training.progress import scoring_lines
    from openkda.training.run_directory import find_checkpoint

    result = evaluate_paths(
        find_checkpoint(checkpoint), data, seq_len=seq_len, device=device, dtype=dtype, advance=scoring_lines()
    )
    print(f"loss           {result.loss:.4f} nats per token\nperplexity     {result.perplexity:.4f} per token")
    print(f"bits per byte  {result.bits_per_byte:.4f}\ntokens         {result.tokens}")
    return 0


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw among the fewest tokens with this probability.")] = 1.0,
    no_repeat_ngram: Annotated[
        int | None, typer.Option(help="Never make so many tokens in a row a second time.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    stop: Annotated[list[str], typer.Option(help="End before any of these strings.")] = [],  # noqa: B006
    device: Device = "auto",
) -> int:
    """Continue a text, token by token, showing what the state weighs."""
    from openkda.generation.console import stream
    from openkda.generation.sampling import SamplingOptions
    from openkda.models.checkpoint import load_checkpoint
    from openkda.models.tokenizer import load_tokenizer
    from openkda.training.options import choose_device
    from openkda.training.run_directory import find_checkpoint

    options = SamplingOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        no_repeat_ngram=no_repeat_ngram,
        seed=seed,
        stop_strings=tuple(stop),
    )
    where, found = choose_device(device), find_checkpoint(checkpoint)
    stream(load_checkpoint(found, device=where), load_tokenizer(found), prompt, options)
    return 0


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A checkpoint or run directory, a preset's name or a config.json.")],
    length: Annotated[list[int], typer.Option(help="Sequence lengths in tokens.")] = [1_000, 100_000, 1_000_000],  # noqa: B006
) -> int:
    """Layers, parameters by kind, bytes of state per token and per sequence; of a published model also its tensors."""
    from openkda.models.inspect import describe
    from openkda.models.inspect_text import render
    from openkda.models.official_text import inventory_of

    if any(n < 1 for n in length):
        raise ValueError(f"--length: expected positive integers, received {length}")
    tensors = inventory_of(model)
    if tensors is None:
        print(render(describe(_target(model)), length))
    else:
        print(render(describe(tensors.config), length), tensors.text, sep="\n\n")
    return 0


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Directory of the run. Default: runs/demo, or the next free name.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Of training. Default: so that all is done in five minutes.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Train so many steps instead.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, to see that everything works.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, data order and sample.")] = 0,
) -> int:
    """Train a small model on the Python standard library's source, then let it write."""
    from openkda.lab.demo import SECONDS, run_demo

    result = run_demo(out, seconds=SECONDS if seconds is None else seconds, steps=steps, quick=quick, seed=seed)
    return 130 if result.interrupted else 0


@app.command()
def warmup(
    model: Annotated[str, typer.Argument(help="A preset's name, a config.json, a checkpoint or run directory.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
) -> int:
    """Compile the GPU kernels of a model ahead of its first request."""
    import torch

    from openkda.models.inspect import describe
    from openkda.models.warmup import warmup as compile_kernels

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in dtypes:
        raise ValueError(f"--dtype: expected one of {', '.join(dtypes)}, received {dtype!r}")
    config = describe(_target(model), dtype=dtypes[dtype]).config
    for step, seconds in compile_kernels(config, dtype=dtypes[dtype]):
        print(f"{seconds:7.2f} s  {step}")
    return 0


@app.command("make-checkpoint")
def make_checkpoint(
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    like: Annotated[str, typer.Option(help="kimi-k3 (packed experts, vision tower) or kimi-linear-48b.")] = "kimi-k3",
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width, a multiple of 64.")] = 256,
    heads: int = 4,
    head_dim: int = 32,
    experts: Annotated[int, typer.Option(help="Routed experts a layer.")] = 8,
    experts_per_token: int = 2,
    vocab_size: int = 1024,
    vision_layers: int = 2,
    seed: int = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the directory.")] = False,
) -> int:
    """Write a random checkpoint in a published layout, in miniature."""
    from openkda.models.make_checkpoint import make_checkpoint as make

    make(
        out, like=like, layers=layers, hidden=hidden, heads=heads, head_dim=head_dim, experts=experts,
        experts_per_token=experts_per_token, vocab_size=vocab_size, vision_layers=vision_layers, seed=seed, overwrite=overwrite,
    )  # fmt: skip
    print(f"{out}: written; see it with: openkda inspect {out}")
    print(f"it has no tokenizer; to train it on text: openkda train --init-from {out} --tokenizer bytes --data FILES")
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    # The parser's own error class is not exported under a stable name; BadParameter, which is, derives from it.
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]
    # Before torch starts its threads: waiting ones sleep. Spinning, two threads that share their cores with another program
    # trained the demo model at 300 tokens/s, sleeping at 860 (x86, two cores, one of them busy).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for out in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows "?" instead of ending the program
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")
    arguments = _spread(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if threading.current_thread() is threading.main_thread():  # signals cannot be caught elsewhere
        signal.signal(signal.SIGTERM, _terminated)
    try:
        code = app(args=arguments, prog_name="openkda", standalone_mode=False)
    except usage_error as error:
        _fail(f"{error.format_message()} (received: openkda {shlex.join(arguments)})", 2)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except (ValueError, OSError, ModuleNotFoundError, NotImplementedError, FloatingPointError, MemoryError) as error:
        if os.environ.get("OPENKDA_DEBUG"):
            raise
        _fail(str(error) or type(error).__name__, 1)
    sys.exit(code or 0)


def _target(model: str) -> str | Path:
    """What `describe` reads: of a run's directory its newest checkpoint."""
    from openkda.models.presets import PRESETS
    from openkda.training.run_directory import find_checkpoint

    return find_checkpoint(model) if model not in PRESETS and Path(model).is_dir() else model


def _terminated(number: int, _frame: object) -> None:
    """SIGTERM as an exit, so that whoever has made half of a file takes it back on the way out."""
    sys.exit(128 + number)


def _fail(message: str, code: int) -> None:
    print("openkda:", " ".join(message.split()), file=sys.stderr)
    sys.exit(code)


def _spread(arguments: list[str]) -> list[str]:
    """`--data a b` as `--data a --data b`, for the options that take several values."""
    out: list[str] = []
    option, fresh = "", False
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            option, fresh = argument if argument in _SEVERAL else "", True
        elif option and not fresh and _SEVERAL[option](argument):
            out.append(option)
        else:
            fresh = False
        out.append(argument)
    return out

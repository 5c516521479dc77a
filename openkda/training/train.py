"""One training run, from options to result; `resume` continues one exactly where it stopped."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from openkda.models.checkpoint import load_checkpoint
from openkda.models.tokenizer import Tokenizer, load_tokenizer
from openkda.training.batches import need_tokens
from openkda.training.corpus import TextFile, find_files, hold_out
from openkda.training.evaluate import evaluate
from openkda.training.metrics import MetricsFile, draw_loss_curve
from openkda.training.options import (
    CHANGEABLE,
    TrainOptions,
    choose_device,
    choose_dtype,
    with_settings,
)
from openkda.training.progress import Progress, StepReport
from openkda.training.run_directory import alone, find_checkpoint, load, new_run
from openkda.training.start import first_config, first_model, first_tokenizer
from openkda.training.token_file import TokenFile, write_token_file
from openkda.training.trainer import Trainer


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. interrupted: the signal that stopped it, or None.

    checkpoint: the newest one; val_loss: nats per token at the end (NaN if interrupted); seconds of training.
    """

    out: Path
    checkpoint: Path
    step: int
    loss: float
    val_loss: float
    tokens: int
    seconds: float
    interrupted: signal.Signals | None


def train(options: TrainOptions, *, progress: Progress | None = None) -> TrainResult:
    """Run `options` from the start: of a fresh model, or with the weights of `options.init_from`.

    Raises ValueError or OSError for anything wrong with them, before anything is written; TrainingDiverged when a loss
    or gradient is not finite; MemoryError when a step does not fit. A run that fails before its first number or
    checkpoint is written leaves nothing behind.
    """
    progress = progress or Progress()
    device = choose_device(options.device)
    tokenizer = first_tokenizer(options)
    config = first_config(options, tokenizer)
    training, held_out = _split(options)
    with new_run(options.out) as out:
        model = first_model(config, options, device)
        sides = _write_tokens(out / "data", training, held_out, tokenizer, progress)
        need_tokens(sides[0], options.seq_len + 1, f"training on one window of seq_len = {options.seq_len}")
        need_tokens(sides[1], 2, "validation")
        trainer = Trainer(options, model, sides[0], choose_dtype(options.dtype, device))
        return _run(trainer, tokenizer, sides[1], progress)


def resume(path: str | Path, *, settings: Sequence[str] = (), progress: Progress | None = None) -> TrainResult:
    """Continue the run (or checkpoint) at `path`: bit-equal on the same CPU to a run that never stopped.

    settings: `key=value` changes, of CHANGEABLE options only.
    """
    progress = progress or Progress()
    checkpoint = find_checkpoint(path)
    state = load(checkpoint)
    moved = dataclasses.replace(state.options, out=str(checkpoint.parent))  # the run may have been moved since
    options = with_settings(moved, settings)
    changed = {f.name for f in dataclasses.fields(options) if getattr(options, f.name) != getattr(moved, f.name)}
    if changed - CHANGEABLE:
        raise ValueError(
            f"resume: expected changes of {', '.join(sorted(CHANGEABLE))} only, received {sorted(changed - CHANGEABLE)}"
        )
    if options.steps < state.step:
        raise ValueError(f"steps: expected at least {state.step}, where {checkpoint} stands, received {options.steps}")
    device = choose_device(options.device)
    tokenizer = load_tokenizer(checkpoint)
    sides = [TokenFile(checkpoint.parent / "data" / name) for name in ("train", "val")]
    model = load_checkpoint(checkpoint, device=device)
    trainer = Trainer(options, model, sides[0], choose_dtype(options.dtype, device))
    trainer.restore(state, checkpoint)
    if trainer.finished:
        spent = "" if trainer.step == options.steps else f", with max_seconds = {options.max_seconds:g} spent"
        progress.note(f"nothing to train: step {trainer.step} of {options.steps}{spent}; raise the limit to go on")
    with alone(checkpoint.parent):
        return _run(trainer, tokenizer, sides[1], progress)


def _split(options: TrainOptions) -> tuple[list[TextFile], list[TextFile]]:
    """(training text, held-out text). A text of fewer bytes than the tokens of one window is refused unread."""
    training = find_files(options.data)
    if options.val_data:
        held_out = find_files(options.val_data)
    else:
        training, held_out = hold_out(training, options.val_fraction)
    most = sum(f.size + 1 for f in training)
    if most < options.seq_len or not held_out:
        raise ValueError(
            f"data: expected more than seq_len = {options.seq_len} tokens to train on and some to hold out, received "
            f"{most} bytes and {sum(f.size for f in held_out)} bytes"
        )
    return training, held_out


def _write_tokens(
    folder: Path, training: list[TextFile], held_out: list[TextFile], tokenizer: Tokenizer, progress: Progress
) -> tuple[TokenFile, TokenFile]:
    total = sum(f.size for f in training + held_out)
    done = 0

    def advance(text_bytes: int) -> None:
        nonlocal done
        done += text_bytes
        progress.tokenizing(min(done, total), total)

    train_side = write_token_file(folder / "train", training, tokenizer, advance=advance)
    val_side = write_token_file(folder / "val", held_out, tokenizer, advance=advance)
    progress.tokenizing(total, total)
    return train_side, val_side


def _run(trainer: Trainer, tokenizer: Tokenizer, val_side: TokenFile, progress: Progress) -> TrainResult:
    """Step until done or told to stop; log, validate and save on the way."""
    options, out = trainer.options, Path(trainer.options.out)
    metrics = MetricsFile(out / "metrics.jsonl", resume_at=trainer.step)
    report = None
    validated, val_loss = metrics.last_validation
    progress.begin(trainer.step, options.steps)
    try:
        with _stop_signals() as stop:
            trainer.start_clock()
            while not trainer.finished and not stop:
                report = _advance(trainer)
                progress.step(report)
                if report.step % options.log_every == 0 or trainer.finished:
                    metrics.write({k: v for k, v in dataclasses.asdict(report).items() if v is not None})
                    progress.log(report)
                if report.step % options.val_every == 0:
                    validated, val_loss = report.step, _validate(trainer, val_side, metrics, progress)
                if report.step % options.checkpoint_every == 0:
                    trainer.save(tokenizer)
            if validated != trainer.step and not stop:
                val_loss = _validate(trainer, val_side, metrics, progress)
            checkpoint = trainer.save(tokenizer)
    finally:
        progress.close()
    _draw(out, progress)
    return TrainResult(
        out=out,
        checkpoint=checkpoint,
        step=trainer.step,
        loss=report.loss if report else math.nan,
        val_loss=math.nan if stop else val_loss,
        tokens=trainer.tokens,
        seconds=trainer.seconds,
        interrupted=stop[0] if stop else None,
    )


def _advance(trainer: Trainer) -> StepReport:
    """One step; MemoryError with the remedy when it does not fit."""
    try:
        return trainer.advance()
    except (RuntimeError, MemoryError) as error:
        # torch has a class for a GPU's memory only; a CPU's is "[enforce fail ...] DefaultCPUAllocator: can't allocate memory"
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        o = trainer.options
        raise MemoryError(
            f"memory: a part of batch_size / accumulate = {o.batch_size // o.accumulate} sequences of {o.seq_len} tokens does "
            f"not fit on {trainer.device}; raise accumulate, lower batch_size, or set recompute=true"
        ) from error


def _validate(trainer: Trainer, val_side: TokenFile, metrics: MetricsFile, progress: Progress) -> float:
    """Held-out loss, before the checkpoint of the same step: one that scores NaN is not saved."""
    options = trainer.options
    result = evaluate(
        trainer.model,
        val_side,
        seq_len=options.seq_len,
        device=trainer.device,
        dtype=trainer.dtype,
        pack_tokens=options.seq_len * options.batch_size // options.accumulate,
        max_tokens=options.val_tokens,
    )
    trainer.require_finite("validation loss", result.loss)
    numbers = {"val_loss": result.loss, "val_bits_per_byte": result.bits_per_byte, "val_tokens": result.tokens}
    metrics.write({"step": trainer.step, **numbers, "tokens": trainer.tokens, "seconds": trainer.seconds})
    progress.validated(trainer.step, result)
    return result.loss


def _draw(out: Path, progress: Progress) -> None:
    if not (out / "metrics.jsonl").exists():  # stopped before the first line
        return
    try:
        draw_loss_curve(out / "metrics.jsonl", out / "loss.png")
    except ModuleNotFoundError as missing:
        progress.note(str(missing))


@contextmanager
def _stop_signals() -> Iterator[list[signal.Signals]]:
    """Collects SIGINT and SIGTERM instead of dying of them; a second one interrupts at once."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # signals cannot be caught elsewhere
        yield received
        return

    def note(number: int, _frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

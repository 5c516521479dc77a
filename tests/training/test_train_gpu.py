"""Training runs on a GPU: they learn, they stop and resume, and the kernels learn what the exact path learns."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from openkda.cli import main
from openkda.models.checkpoint import load_checkpoint
from openkda.training.metrics import read_metrics
from openkda.training.options import TrainOptions
from openkda.training.progress import Progress, StepReport
from openkda.training.train import resume, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
Make = Callable[..., TrainOptions]


def test_bfloat16_kernels_learn_as_the_cpu_does(options: Make) -> None:
    """The same seed and batches: validation loss within 1 %, far below that of a model that has learned nothing."""
    on_gpu = train(options("gpu", device="cuda", steps=40))
    on_cpu = train(options("cpu", device="cpu", steps=40))
    assert on_gpu.val_loss < 5.0, "ln 260 = 5.56 is where every run begins"
    assert abs(on_gpu.val_loss - on_cpu.val_loss) < 0.01 * on_cpu.val_loss


def test_resume(options: Make) -> None:
    """Three steps, then the rest from the checkpoint, against a run that never stopped."""
    straight = train(options("straight", device="cuda", steps=6))
    train(options("broken", device="cuda", steps=6, checkpoint_every=3, keep=9))
    resumed = resume(straight.out.parent / "broken" / "step-3")
    assert resumed.step == 6
    assert (
        abs(resumed.val_loss - straight.val_loss) < 1e-3 * straight.val_loss
    )  # torch's embedding gradient adds atomically


def test_accumulation_gives_the_same_steps(options: Make) -> None:
    """One part of four sequences, and four of one: other sums, the same batch."""
    whole, parts = (train(options(f"parts{n}", device="cuda", accumulate=n, dtype="float32")) for n in (1, 4))
    a, b = ([line["loss"] for line in read_metrics(r.out / "metrics.jsonl") if "loss" in line] for r in (whole, parts))
    assert len(a) == 6 and all(abs(x - y) < 1e-3 * x for x, y in zip(a, b, strict=True))
    assert abs(whole.val_loss - parts.val_loss) < 1e-3 * whole.val_loss


def test_ctrl_c_saves_what_was_trained(options: Make) -> None:
    class Stop(Progress):
        def step(self, report: StepReport) -> None:
            if report.step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    stopped = train(options("stopped", device="cuda"), progress=Stop())
    assert (stopped.step, stopped.interrupted, stopped.checkpoint.name) == (3, signal.SIGINT, "step-3")
    straight, resumed = train(options("straight", device="cuda")), resume(stopped.out)
    assert resumed.step == 6 and abs(resumed.val_loss - straight.val_loss) < 1e-3 * straight.val_loss


def test_a_run_begins_with_a_checkpoint(options: Make) -> None:
    """Made on a CPU; float32 parameters on the card too."""
    first = train(options("first", device="cpu"))
    tuned = train(options("tuned", preset="demo", model={}, init_from=first.out, device="cuda", steps=2))
    assert all(p.dtype == torch.float32 for p in load_checkpoint(tuned.checkpoint).parameters())
    assert tuned.loss < read_metrics(first.out / "metrics.jsonl")[0]["loss"]


def test_the_command_trains_the_100m_preset(text: Path, tmp_path: Path) -> None:
    """`openkda train`, 104 M parameters in float32 under bfloat16 autocast; the loss falls from ln 32768 = 10.4."""
    command = ["train", "--data", str(text), "--preset", "100m", "--out", str(tmp_path / "run"), "--device", "cuda"]
    sizes = ["vocab_size=32768", "seq_len=512", "batch_size=4", "steps=8", "log_every=1", "val_tokens=512", "lr=2e-3"]
    with pytest.raises(SystemExit) as done:
        main([*command, "--set", *sizes])
    assert not done.value.code
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 8 and 10.0 < losses[0] < 11.0 and losses[-1] < losses[0] - 1.0
    model = load_checkpoint(tmp_path / "run" / "last")
    assert model.num_parameters() == 104_207_286 and all(p.dtype == torch.float32 for p in model.parameters())

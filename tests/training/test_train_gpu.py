"""Training runs on a GPU: they learn, they resume, and the kernels learn what the exact path learns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from openkda.training.options import TrainOptions
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

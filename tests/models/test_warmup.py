"""Compiling ahead: every kind of call is made, on the device asked for."""

from __future__ import annotations

import pytest
import torch

from openkda.models.presets import PRESETS
from openkda.models.warmup import warmup


def test_makes_every_kind_of_call() -> None:
    steps = [name for name, seconds in warmup(PRESETS["tiny"], device="cpu", dtype=torch.float32) if seconds >= 0]
    assert {"prefill", "continued prefill", "packed prefill", "decoding"} <= set(steps)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="CUDA"):
        warmup(PRESETS["tiny"])

"""Which implementation of a small op runs, and that one is told where it is a slow one."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from openkda.layers.kda import KimiDeltaAttention
from openkda.models.presets import PRESETS
from openkda.ops.device.api import choose_module, log_choice


def test_small_ops_say_once_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    """A line for each choice; on a GPU without kernels with every reason, at a level that is shown by default. By name there is
    nothing to say."""

    class Cuda(Tensor):
        is_cuda = True

    kernel = SimpleNamespace(refusals=lambda x: ["triton is not installed"])
    plain = SimpleNamespace(refusals=lambda x: [])
    modules = {"triton": kernel, "reference": plain}
    x = torch.zeros(3).as_subclass(Cuda)
    log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="openkda.ops"):
        for impl in (None, None, "reference"):
            assert choose_module("norm", ("triton", "reference"), impl, x, modules.__getitem__) is plain
        for _ in range(2):
            choose_module("norm", ("triton", "reference"), None, torch.zeros(3), modules.__getitem__)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "norm on cpu runs reference (not triton: triton is not installed)"),
        ("INFO", "norm on cpu runs reference"),
    ]


def test_a_layer_says_what_its_steps_run_on(caplog: pytest.LogCaptureFixture) -> None:
    layer = KimiDeltaAttention(PRESETS["tiny"], 0).eval()
    x = torch.randn(1, 3, PRESETS["tiny"].hidden_size)
    log_choice.cache_clear()
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="openkda.ops"):
        _, state = layer(x, return_state=True)
        for _ in range(2):
            _, state = layer(x[:, :1], state=state, return_state=True)
    lines = [r.getMessage() for r in caplog.records]
    assert lines.count("kda_block on cpu runs reference") == lines.count("short_conv on cpu runs reference") == 1

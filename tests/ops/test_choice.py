"""Which implementation of a small op runs, and that one is told where it is a slow one."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from openkda.ops.device.api import choose_module, warn_slow


def test_small_ops_on_a_gpu_without_kernels_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    """Their choice names every reason, at a level that is shown by default; by name and on a CPU there is nothing to say."""

    class Cuda(Tensor):
        is_cuda = True

    kernel = SimpleNamespace(refusals=lambda x: ["triton is not installed"])
    plain = SimpleNamespace(refusals=lambda x: [])
    modules = {"triton": kernel, "reference": plain}
    x = torch.zeros(3).as_subclass(Cuda)
    warn_slow.cache_clear()
    with caplog.at_level(logging.WARNING, logger="openkda.ops"):
        for impl in (None, None, "reference"):
            assert choose_module("norm", ("triton", "reference"), impl, x, modules.__getitem__) is plain
        choose_module("norm", ("triton", "reference"), None, torch.zeros(3), modules.__getitem__)
    assert [r.getMessage() for r in caplog.records] == [
        "norm on cpu runs reference (not triton: triton is not installed)"
    ]

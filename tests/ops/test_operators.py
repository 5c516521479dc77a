"""Operators under torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.exc import OperatorIssue

from openkda.ops.device import operators


class Deep:
    def __str__(self) -> str:
        raise AssertionError("written out")


def test_old_inductors_do_not_write_out_what_an_operator_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperatorIssue, "operator_str", staticmethod(OperatorIssue.operator_str))  # put back afterwards
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    operators._name_shortly.__wrapped__()
    told = OperatorIssue.operator_str("kda", [Deep(), 1], {"scale": Deep()})
    assert all(word in told for word in ("kda", "Deep", "int", "scale"))


def test_newer_ones_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = OperatorIssue.operator_str
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    operators._name_shortly.__wrapped__()
    assert OperatorIssue.operator_str is before

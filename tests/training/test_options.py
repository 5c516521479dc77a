"""Settings typed against the fields they set."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from openkda.training.options import TrainOptions, choose_device, choose_dtype, model_config, with_settings

BASE = TrainOptions(data=("x",), out="y")


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("steps=12", "steps", 12),
        ("lr=3e-4", "lr", 3e-4),
        ("max_seconds=20", "max_seconds", 20.0),
        ("max_seconds=none", "max_seconds", None),
        ("data=a,b", "data", ("a", "b")),
        ("out=a=b", "out", "a=b"),
    ],
)
def test_run_settings(setting: str, name: str, value: Any) -> None:
    got = getattr(with_settings(BASE, [setting]), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("hidden_size=64", "hidden_size", 64),
        ("use_full_rank_gate=false", "use_full_rank_gate", False),
        ("gate_lower_bound=null", "gate_lower_bound", None),
        ("gate_lower_bound=-4", "gate_lower_bound", -4.0),
        ("kda_layers=1,2,3,5,6,7", "kda_layers", (1, 2, 3, 5, 6, 7)),
        ("hidden_act=silu", "hidden_act", "silu"),
    ],
)
def test_model_settings(setting: str, name: str, value: Any) -> None:
    options = with_settings(BASE, ["num_hidden_layers=8", setting])
    assert options.model["num_hidden_layers"] == 8 and options.model[name] == value
    assert getattr(model_config(options, 257), name) == value


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            ["stepz=1", "lrr=2"],
            r"unknown keys \['lrr', 'stepz'\] \(did you mean lr, steps\?\); a run has .*steps.*; a model has .*hidden_size",
        ),
        (["model=1"], r"unknown keys \['model'\]"),
        (["steps"], r"expected key=value, received \['steps'\]"),
        (["steps=1.5"], "steps: expected an integer, received 1.5"),
        (["lr=fast"], "lr: expected a number, received fast"),
        (["use_full_rank_gate=1"], "use_full_rank_gate: expected true or false, received 1"),
        (["kda_layers=1,x"], "kda_layers: expected an integer, received x"),
        (["expert_quantization=up"], "expert_quantization: expected 'ceil' or 'floor' or 'even', received 'up'"),
        (["vision=x"], "vision: expected its own section of a config.json"),
        ([f"batch_size={10**12}"], "fewer than 2.40 tokens a step"),
    ],
)
def test_bad_settings(settings: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        with_settings(BASE, settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0), ("steps", True), ("seq_len", -1), ("batch_size", 1.5), ("accumulate", 3), ("warmup", 1.0),
        ("lr", 0.0), ("lr", float("nan")), ("grad_clip", float("inf")), ("weight_decay", -1.0), ("val_fraction", 0.0),
        ("max_seconds", 0.0), ("seed", -1), ("dtype", "int8"), ("data", ()), ("out", ""), ("beta2", 1.0), ("keep", 0),
    ],
)  # fmt: skip
def test_impossible_options(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"expected .*received"):
        TrainOptions(**({"data": ("x",), "out": "y"} | {field: value}))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("lr", "1e-2", "a finite number"), ("lr", True, "a finite number"), ("lr_end", None, "a finite number"),
        ("max_seconds", "60", "a finite number or null"), ("max_seconds", float("inf"), "a finite number or null"),
        ("steps", "12", "an integer below 2^63"), ("seed", 1.0, "an integer below 2^63"), ("steps", 1 << 63, "below 2^63"),
        ("recompute", 1, "true or false"), ("per_head_muon", "no", "true or false"), ("device", None, "a string"),
        ("device", torch.device("cpu"), "a string"), ("dtype", torch.bfloat16, "a string"), ("preset", {}, "a string"),
        ("tokenizer", 5, "a string or null"), ("init_from", 5, "a string or null"),
        ("out", None, "a string"), ("out", b"runs", "a string"),
        ("data", None, "a list, each a string"), ("data", 5, "a list, each a string"), ("data", (b"x",), "each a string"),
        ("data", {"x": 1}, "a list, each a string"), ("val_data", ("x", 1), "a list, each a string"),
        ("model", None, "a mapping"), ("model", [("hidden_size", 64)], "a mapping"), ("qk_clip", "off", "number or null"),
    ],
)  # fmt: skip
def test_values_of_another_type_are_refused(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"training options: {field}: expected .*{re.escape(expected)}, received "):
        TrainOptions(**({"data": ("x",), "out": "y"} | {field: value}))


def test_paths_become_strings() -> None:
    got = TrainOptions(data=Path("a"), val_data=[Path("b"), "c"], out=Path("y"), preset=Path("p.json"), lr=1)  # type: ignore[arg-type]
    assert (got.data, got.val_data, got.out, got.preset) == (("a",), ("b", "c"), "y", "p.json")
    assert json.loads(json.dumps(got.to_dict()))["lr"] == 1


def test_options_go_round() -> None:
    options = with_settings(BASE, ["steps=3", "hidden_size=64", "kda_layers=1,2", "max_seconds=1"])
    assert TrainOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    with pytest.raises(ValueError, match=r"unknown keys \['colour'\]"):
        TrainOptions.from_dict({"data": ["x"], "out": "y", "colour": 1})


def test_vocabulary_follows_the_tokenizer() -> None:
    assert model_config(BASE, 300).vocab_size == 300
    assert model_config(with_settings(BASE, ["vocab_size=512"]), 300).vocab_size == 512


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("gpu", "cuda:99", "cpu:x", "meta"):
        with pytest.raises(ValueError, match=f"device: expected .* received '{name}'"):
            choose_device(name)
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16

"""The inventory as text, and the two commands around published layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from openkda.models.checkpoint import load_checkpoint, load_config, save_checkpoint
from openkda.models.inspect import describe
from openkda.models.make_checkpoint import make_checkpoint
from openkda.models.official import is_published, load_official
from openkda.models.official_config import to_published
from openkda.models.official_names import official
from openkda.models.official_text import inventory_of

SIZES = {"layers": 4, "hidden": 64, "heads": 2, "head_dim": 16, "experts": 4, "vocab_size": 96}


def test_inventory_of_a_published_model() -> None:
    got = inventory_of("kimi-k3")
    assert got is not None
    lines = got.text.splitlines()
    assert lines[-1].startswith("497,220 tensors in 96 shards, 1,560,860,324,864 bytes;")
    assert len(lines) == 2 + 60, "a header, the 60 kinds of tensors, the totals"
    row = next(line for line in lines if "experts.E.w2.weight_scale" in line)
    assert row.split() == [
        "language_model.model.layers.L.block_sparse_moe.experts.E.w2.weight_scale", "82,432", "[3584,", "96]", "U8",
        "28,361,883,648",
    ]  # fmt: skip


def test_of_a_directory_and_of_something_else(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "k3", **SIZES)
    got = inventory_of(tmp_path / "k3")
    assert got is not None and got.config.num_hidden_layers == 4
    files = [f for f in (tmp_path / "k3").glob("*.safetensors")]
    assert f"in {len(files)} shards" in got.text
    assert inventory_of("demo") is None and inventory_of(tmp_path) is None
    (tmp_path / "config.json").write_text('{"kda_num_heads": 2}')
    assert not is_published(tmp_path)


def test_of_a_published_config_alone(tmp_path: Path) -> None:
    """A config.json from the hub says what the model weighs before anything is downloaded."""
    path = tmp_path / "config.json"
    for name in ("kimi-k3", "kimi-linear-48b"):
        path.write_text(json.dumps(to_published(official(name))))
        got, want = inventory_of(path), inventory_of(name)
        assert got is not None and want is not None and got.text == want.text
        told, known = describe(path), describe(name)
        assert (told.parameters, told.active_parameters) == (known.parameters, known.active_parameters)
    path.write_text(json.dumps({**to_published(official("kimi-k3")), "zoom": 2}))
    with pytest.raises(ValueError, match="unknown: zoom"):
        describe(path)


def test_published_directories_load_like_our_own(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "k3", **SIZES)
    model = load_checkpoint(tmp_path / "k3")
    assert model.config == load_config(tmp_path / "k3") and model.config.vision is None and model.config.packed_experts
    save_checkpoint(model, tmp_path / "own")
    again = load_checkpoint(tmp_path / "own")
    ids = torch.arange(9).unsqueeze(0)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    from openkda.cli import main

    out = tmp_path / "mini"
    options = [
        "--out",
        str(out),
        "--layers",
        "4",
        "--hidden",
        "64",
        "--heads",
        "2",
        "--head-dim",
        "16",
        "--experts",
        "4",
    ]

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as done:
            main(list(arguments))
        return int(done.value.code or 0)

    assert run("make-checkpoint", "--like", "kimi-k3", *options) == 0
    assert load_official(out).num_parameters() > 0
    capsys.readouterr()
    assert run("inspect", str(out)) == 0
    assert "language_model.model.layers.L.self_attn.A_log" in capsys.readouterr().out
    (out / "openkda_tokenizer.json").write_text('{"kind": "bytes"}')
    assert run("generate", "--checkpoint", str(out), "--prompt", "def", "--max-new-tokens", "3") == 0
    capsys.readouterr()
    assert run("make-checkpoint", *options) != 0
    assert "(--overwrite) replaces it" in capsys.readouterr().err
    assert run("make-checkpoint", "--out", str(tmp_path / "other"), "--hidden", "100") != 0
    assert "a multiple of 64" in capsys.readouterr().err and not (tmp_path / "other").exists()

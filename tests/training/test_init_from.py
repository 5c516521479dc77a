"""Runs that begin with the weights of a checkpoint: ours, a run, or one in a published layout."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from openkda.layers.moe import Experts, SparseMoE
from openkda.models.checkpoint import load_checkpoint, save_checkpoint
from openkda.models.make_checkpoint import make_checkpoint
from openkda.training.options import TrainOptions
from openkda.training.start import first_config, first_model, first_tokenizer, load_weights
from openkda.training.train import resume, train

Make = Callable[..., TrainOptions]
FRESH: dict[str, Any] = {"preset": "demo", "model": {}}  # nothing of the fixture's: the checkpoint brings it


@pytest.fixture
def first(options: Make) -> Path:
    """A run of six steps."""
    return train(options("first")).out


def test_weights_config_and_tokenizer_are_those_of_the_checkpoint(options: Make, first: Path) -> None:
    """The first step's loss is that of the trained weights on the same batch; optimizer, clock and step begin anew."""
    before = load_checkpoint(first / "last")
    tuned = train(options("tuned", **FRESH, init_from=first, steps=1, lr=1e-9, weight_decay=0.0))
    after = load_checkpoint(tuned.checkpoint)
    assert after.config == before.config and tuned.step == 1
    for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name
    fresh = train(options("fresh", steps=1))
    assert tuned.loss < fresh.loss - 0.1  # 5.6 where a run begins, ln 260


def test_it_resumes_to_the_bit(options: Make, first: Path, tmp_path: Path) -> None:
    """Without the checkpoint that it began with, which may be gone by then."""
    straight = train(options("straight", **FRESH, init_from=str(first)))
    broken = train(options("broken", **FRESH, init_from=first / "last", checkpoint_every=3))
    shutil.rmtree(first)
    again = resume(broken.out / "step-3")
    assert again.step == 6 and again.val_loss == straight.val_loss
    a, b = (load_file(r.checkpoint / "model.safetensors") for r in (straight, again))
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("like", ["kimi-linear-48b", "kimi-k3"])
def test_published_layouts(options: Make, tmp_path: Path, like: str) -> None:
    """bfloat16 and 4-bit experts become float32 that trains; of Kimi K3 the text model."""
    directory = tmp_path / "published"
    make_checkpoint(
        directory, like=like, layers=4, hidden=64, heads=2, head_dim=32, experts=4, experts_per_token=2, vocab_size=300,
        vision_layers=1, seed=0, overwrite=False,
    )  # fmt: skip
    made = options("tuned", **FRESH, init_from=directory, tokenizer="bytes", steps=2)
    model = first_model(load_weights(directory).config, made, torch.device("cpu"))
    moe = [m for m in model.modules() if isinstance(m, SparseMoE)]
    assert moe and all(isinstance(m.experts, Experts) for m in moe) and model.training
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    with torch.no_grad():
        ids = torch.randint(300, (1, 7))
        want = load_checkpoint(directory, dtype=torch.float32)(ids).logits
        assert torch.allclose(model.eval()(ids).logits, want, atol=1e-4)
    result = train(made)
    assert result.step == 2 and load_checkpoint(result.checkpoint).config.vocab_size == 300


def test_settings_on_top_may_change_what_fits(options: Make, first: Path) -> None:
    result = train(options("tuned", preset="demo", init_from=first, model={"gate_lower_bound": -4.0}, steps=1))
    assert load_checkpoint(result.checkpoint).config.gate_lower_bound == -4.0


def _without(file: str) -> Callable[[Path], None]:
    return lambda d: (d / file).unlink()


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return edit


def _other_tokenizer(directory: Path) -> None:
    """One id more than the model has rows for, as its last token."""
    (directory / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "model": {"type": "WordLevel", "vocab": {str(i): i for i in range(300)}, "unk_token": "0"},
            }
        )
    )
    (directory / "openkda_tokenizer.json").write_text(json.dumps({"kind": "tokenizers", "file": "tokenizer.json"}))


@pytest.mark.parametrize(
    ("damage", "changes", "error"),
    [
        (_without("model.safetensors"), {}, r"model.safetensors: not found"),
        (_without("config.json"), {}, r"config.json: not found"),
        (_tensors(lambda t: t.pop("model.norm.weight")), {}, r"do not fit the config. missing: model.norm.weight"),
        (_tensors(lambda t: t.update({"model.norm.weight": torch.ones(5)})), {}, r"norm.weight: expected \[32\], found \[5\]"),
        (lambda d: (d / "model.safetensors").write_bytes(b"x" * 99), {}, "not a whole safetensors file"),
        (lambda d: os.truncate(d / "model.safetensors", 9999), {}, "not a whole safetensors file"),
        (_tensors(lambda t: t["model.norm.weight"][3:4].fill_(math.nan)), {}, "NaN or infinity in model.norm.weight$"),
        (_tensors(lambda t: t["lm_head.weight"][5].fill_(-math.inf)), {}, "NaN or infinity in lm_head.weight$"),
        (None, {"init_from": ""}, "init_from: expected a directory, received ''"),
        (None, {"model": {"hidden_size": 64}}, r"tensors do not fit the settings .*model.norm.weight: \[64\], \[32\]"),
        (None, {"model": {"vocab_size": 300}}, r"model.embed_tokens.weight: \[300, 32\], \[257, 32\]"),
        (None, {"model": {"vocab_size": 100}}, r"tokenizer: expected at most 100 ids, the vocabulary of .*, received 257"),
        (None, {"model": {"packed_experts": True}}, "packed experts do not train"),
        (None, {"init_from": "/nowhere"}, "init_from: expected a checkpoint or run directory, received '/nowhere'"),
        (None, {"preset": "tiny"}, "preset: expected none beside init_from, which brings its own config, received 'tiny'"),
        (_other_tokenizer, {}, r"tokenizer: expected at most \d+ ids, the vocabulary of .*, received 30"),
        (_other_tokenizer, {"tokenizer": "bytes"}, r"tokenizer: expected the 30\d ids of .*, received bytes with 257"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_before_anything_is_written(
    options: Make, first: Path, tmp_path: Path, damage: Any, changes: dict[str, Any], error: str
) -> None:
    if damage is not None:
        damage(first / "last")
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        train(options("deep/run", **({"preset": "demo", "model": {}, "init_from": first / "last"} | changes)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first"]


def test_a_checkpoint_without_a_tokenizer_wants_one_by_name(options: Make, first: Path, tmp_path: Path) -> None:
    save_checkpoint(load_checkpoint(first / "last"), tmp_path / "bare")
    with pytest.raises(ValueError, match="tokenizer: expected one, as the checkpoint brings none"):
        train(options("tuned", **FRESH, init_from=tmp_path / "bare"))
    assert first_tokenizer(options("tuned", **FRESH, init_from=tmp_path / "bare", tokenizer="bytes")).vocab_size == 257


def test_a_run_whose_newest_checkpoint_lies_elsewhere(options: Make, first: Path, tmp_path: Path) -> None:
    """Links to runs, checkpoints and out of runs are followed."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "last").symlink_to((first / "last").resolve())
    (tmp_path / "run").symlink_to(first)
    want = load_checkpoint(first / "last").state_dict()
    for i, link in enumerate(("other", "run", "other/last")):
        made = options(f"tuned{i}", **FRESH, init_from=tmp_path / link)
        model = first_model(first_config(made, first_tokenizer(made)), made, torch.device("cpu"))
        assert all(torch.equal(t, want[n]) for n, t in model.state_dict().items())

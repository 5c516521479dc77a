"""A whole model of fla in our classes: the same logits, checkpoints that come back, training that begins with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_fla_weights import FlaLayer
from torch import Tensor, nn

from openkda.compat.fla.models import fla_config, load_fla_model
from openkda.models.checkpoint import load_checkpoint, save_checkpoint
from openkda.training.start import load_weights

FIELDS: dict[str, Any] = {
    "model_type": "kda", "hidden_size": 32, "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "num_hidden_layers": 2,
    "intermediate_size": 48, "vocab_size": 60, "norm_eps": 1e-5, "lower_bound": -5.0, "safe_gate": True, "attn": None,
    "fuse_norm": True, "expand_v": 1.0,
}  # fmt: skip


class FlaModel(nn.Module):
    """`KDAForCausalLM` in plain torch, with fla's names."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(60, 32)
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.model.layers:
            layer.attn_norm, layer.mlp_norm = nn.RMSNorm(32, 1e-5), nn.RMSNorm(32, 1e-5)
            layer.attn = FlaLayer(32, 2, 4, 8, -5.0, 1e-5)
            layer.mlp = nn.Module()
            layer.mlp.gate_proj, layer.mlp.up_proj = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
            layer.mlp.down_proj = nn.Linear(48, 32, bias=False)
        self.model.norm = nn.RMSNorm(32, 1e-5)
        self.lm_head = nn.Linear(32, 60, bias=False)
        if tied:
            self.lm_head.weight = self.model.embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embeddings(ids)
        for layer in self.model.layers:
            x = x + layer.attn(layer.attn_norm(x))
            h = layer.mlp_norm(x)
            x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
        return self.lm_head(self.model.norm(x))


def saved(directory: Path, model: FlaModel | None = None, **changes: Any) -> FlaModel:
    torch.manual_seed(0)
    model = model or FlaModel()
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(FIELDS | changes))
    tensors = {n: t.contiguous() for n, t in model.state_dict().items()}
    if changes.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_same_logits_saved_and_trained_again(tmp_path: Path, tied: bool) -> None:
    theirs = saved(tmp_path / "fla", FlaModel(tied), tie_word_embeddings=tied)
    ours = load_fla_model(tmp_path / "fla")
    ids = torch.randint(60, (2, 23))
    want = theirs(ids)
    assert torch.allclose(ours(ids).logits, want, atol=1e-4)
    save_checkpoint(ours, tmp_path / "ours")
    again, model = load_checkpoint(tmp_path / "ours"), load_weights(tmp_path / "ours")
    assert again.config == ours.config and torch.equal(again(ids).logits, ours(ids).logits)
    assert model.training and all(p.dtype == torch.float32 for p in model.parameters())
    assert sum(n.endswith("g_b_proj.bias") for n, _ in model.named_parameters()) == 2


def test_stored_dtypes(tmp_path: Path) -> None:
    saved(tmp_path / "fla", FlaModel().bfloat16())
    model = load_fla_model(tmp_path / "fla")
    kinds = {n.rpartition(".")[0].rpartition(".")[2] or n: p.dtype for n, p in model.named_parameters()}
    assert kinds["q_proj"] == torch.bfloat16 and kinds["o_norm"] == kinds["q_conv1d"] == torch.float32
    assert load_fla_model(tmp_path / "fla", dtype=torch.float32).model.norm.weight.dtype == torch.float32


def test_defaults_are_those_of_fla() -> None:
    config = fla_config({"model_type": "kda"})
    assert (config.hidden_size, config.intermediate_size, config.kda_num_heads, config.kda_head_dim) == (
        2048,
        5632,
        16,
        128,
    )
    assert config.kda_layers == tuple(range(1, 25)) and config.gate_lower_bound is None and config.rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gla"}, "model_type: expected 'kda', received 'gla'"),
        ({"attn": {"layers": [1]}}, "attn: expected None"),
        ({"attnres_block_size": 4}, "attnres_block_size: expected None"),
        ({"use_short_conv": False}, "use_short_conv: expected True"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval: expected False"),
        ({"hidden_act": "powlu"}, "hidden_act: expected 'swish' or 'silu', received 'powlu'"),
        ({"expand_v": 2.0}, "expand_v: expected 1"),
        ({"lower_bound": -9.0}, r"gate_lower_bound: expected a value in \[-5, 0\)"),
        ({"hidden_size": "wide"}, "config.json: hidden_size: expected an integer"),
        ({"head_dim": None}, "config.json: head_dim: expected an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer from 1 to 1048576, received 1000000000"),
        ({"hidden_size": 64}, r"tensors do not fit .*model.norm.weight: expected \[64\], found \[32\]"),
        ({"num_hidden_layers": 3}, r"missing: model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, r"unexpected: model.layers.1"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    saved(tmp_path / "fla", **changes)
    with pytest.raises(ValueError, match=message):
        load_fla_model(tmp_path / "fla")


def test_missing_files_and_tensors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config.json: not found"):
        load_fla_model(tmp_path)
    saved(tmp_path / "fla")
    tensors = load_file(tmp_path / "fla" / "model.safetensors")
    del tensors["model.layers.1.attn.f_proj.1.weight"]
    save_file(tensors, tmp_path / "fla" / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing f_proj.1.weight"):
        load_fla_model(tmp_path / "fla")
    saved(tmp_path / "numbers")
    tensors["model.layers.1.attn.f_proj.1.weight"] = load_file(tmp_path / "numbers" / "model.safetensors")[
        "model.layers.1.attn.f_proj.1.weight"
    ].int()
    save_file(tensors, tmp_path / "numbers" / "model.safetensors")
    with pytest.raises(ValueError, match=r"f_b_proj.weight: expected floats, found torch.int32"):
        load_fla_model(tmp_path / "numbers")
    (tmp_path / "fla" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_fla_model(tmp_path / "fla")

"""Whole models of fla (fla-core 0.6.0, `KDAForCausalLM`) as ours: config.json and safetensors as transformers saves them.

    model = load_fla_model("a/directory")
    save_checkpoint(model, "ours")                 # openkda.models.checkpoint; then: openkda train --init-from ours

    fla                                   ours
    model.embeddings                      model.embed_tokens
    model.layers.N.attn_norm, mlp_norm    model.layers.N.input_layernorm, post_attention_layernorm
    model.layers.N.attn.*                 model.layers.N.self_attn.*, by the key map of `weights.py`
    model.layers.N.mlp.*, model.norm, lm_head   the same names

Refused by name, because we have nothing that computes it: layers of softmax attention (fla's rotate their keys), Attention
Residuals in fla's blocks of sublayers, no short convolution, `allow_neg_eigval`, another activation than swish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openkda.compat.fla.weights import from_fla
from openkda.models.config import ModelConfig
from openkda.models.field_types import parse_json
from openkda.models.hybrid import HybridLM
from openkda.models.official_shards import Shards, opened

__all__ = ["fla_config", "load_fla_model"]

_REFUSED = {"attn": (None,), "attnres_block_size": (None,), "use_short_conv": (True,), "allow_neg_eigval": (False,),
            "hidden_act": ("swish", "silu"), "quantization_config": (None,)}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "attn": None, "attnres_block_size": None, "use_short_conv": True, "allow_neg_eigval": False, "hidden_act": "swish",
    "quantization_config": None, "hidden_size": 2048, "expand_v": 1.0, "lower_bound": None, "conv_size": 4, "head_dim": 128,
    "num_heads": 16, "num_v_heads": None, "hidden_ratio": 4, "intermediate_size": None, "num_hidden_layers": 24,
    "norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02, "vocab_size": 32000,
}  # fmt: skip
_MOST = 1 << 20
_LAYER = re.compile(r"model\.layers\.(\d+)\.(attn_norm|mlp_norm|attn|mlp)\.(.+)")
_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def fla_config(fields: Mapping[str, Any], *, gate_bias: bool = True) -> ModelConfig:
    """fla's config.json as ours. What it leaves out has fla's default. Raises: ValueError for what we cannot compute."""
    if fields.get("model_type") != "kda":
        raise ValueError(f"model_type: expected 'kda', received {fields.get('model_type')!r}")
    c = {name: fields.get(name, default) for name, default in _DEFAULTS.items()}
    for name, allowed in _REFUSED.items():
        if c[name] not in allowed:
            raise ValueError(f"{name}: expected {' or '.join(map(repr, allowed))}, received {c[name]!r}")
    for name in ("head_dim", "hidden_size", "num_hidden_layers"):
        if type(c[name]) is not int or not 0 < c[name] <= _MOST:  # a list of as many layers is made of one
            raise ValueError(f"{name}: expected an integer from 1 to {_MOST}, received {c[name]!r}")
    v_dim = c["head_dim"] * c["expand_v"]
    if v_dim != c["head_dim"]:
        raise ValueError(
            f"expand_v: expected 1 (fla's bottlenecks are the value's size, ours the key's), received {c['expand_v']}"
        )
    inner = c["intermediate_size"]
    if inner is None:  # fla: two thirds of hidden_ratio widths, rounded up to a multiple of 256
        inner = -(-int(c["hidden_size"] * (c["hidden_ratio"] or 4) * 2 / 3) // 256) * 256
    return ModelConfig(
        vocab_size=c["vocab_size"], hidden_size=c["hidden_size"], num_hidden_layers=c["num_hidden_layers"],
        intermediate_size=inner, kda_layers=tuple(range(1, c["num_hidden_layers"] + 1)), full_attn_layers=(),
        kda_num_heads=c["num_heads"], kda_num_v_heads=c["num_v_heads"], kda_head_dim=c["head_dim"],
        short_conv_kernel_size=c["conv_size"], gate_lower_bound=c["lower_bound"], output_gate_bias=gate_bias,
        num_attention_heads=c["num_heads"], rms_norm_eps=c["norm_eps"], initializer_range=c["initializer_range"],
        tie_word_embeddings=c["tie_word_embeddings"],
    )  # fmt: skip


def load_fla_model(
    directory: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> HybridLM:
    """The model of a directory that fla's `save_pretrained` wrote, in eval mode; dtype None keeps every stored dtype, but that
    A_log, dt_bias, convolutions and o_norm are float32 in any case.

    Raises: FileNotFoundError or ValueError naming file, key or tensor: missing, unexpected, of another shape.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found")
    try:
        config = fla_config(parse_json(path.read_bytes()))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    state = _renamed(_read(Shards(directory)), config)
    with torch.device("meta"):
        model = HybridLM(config)
    wanted = model.state_dict()
    faults = {
        "missing": sorted(wanted.keys() - state.keys()),
        "unexpected": sorted(state.keys() - wanted.keys()),
        "shape": [
            f"{n}: expected {list(wanted[n].shape)}, found {list(state[n].shape)}"
            for n in sorted(wanted.keys() & state.keys())
            if wanted[n].shape != state[n].shape
        ],
        "dtype": [f"{n}: expected floats, found {t.dtype}" for n, t in state.items() if not t.is_floating_point()],
    }
    listed = [f"{what}: {', '.join(names)}" for what, names in faults.items() if names]
    if listed:
        raise ValueError(f"{directory}: tensors do not fit the config (by our names). {'; '.join(listed)}")
    model.load_state_dict(state, strict=True, assign=True)
    return model.to(device=device, dtype=dtype).eval()  # also widens what must be float32 and was stored narrower


def _read(shards: Shards) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file_name in sorted(set(shards.files.values())):
        with opened(shards.directory / file_name) as file:
            tensors |= {
                name: file.get_tensor(name).clone() for name, where in shards.files.items() if where == file_name
            }
    return tensors


def _renamed(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """By our names; a gate bias of zeros that a file leaves out is there again."""
    state: dict[str, Tensor] = {}
    attention: dict[str, dict[str, Tensor]] = {}
    for name, t in tensors.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            if not (name == "lm_head.weight" and config.tie_word_embeddings):
                state[name.replace("model.embeddings.", "model.embed_tokens.")] = t
            continue
        layer, part, rest = found.groups()
        if part == "attn":
            attention.setdefault(layer, {})[rest] = t
        else:
            state[f"model.layers.{layer}.{_NORMS.get(part, part)}.{rest}"] = t
    for layer, weights in attention.items():
        ours = from_fla(weights)
        matrix = ours["g_b_proj.weight"]
        ours.setdefault("g_b_proj.bias", matrix.new_zeros(matrix.shape[0]))
        state |= {f"model.layers.{layer}.self_attn.{name}": t for name, t in ours.items()}
    return state

"""What a run begins with: tokenizer, config and model, fresh or those of a checkpoint (`init_from`).

A checkpoint is a directory that training saved, a run (then its newest), or one in a published layout (of Kimi K3 its text
model). Everything in it is compared with the config before a weight is read; experts packed in 4 bits are unpacked.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import torch

from openkda.layers.moe import unpack_experts
from openkda.models.checkpoint import load_checkpoint, load_config
from openkda.models.config import ModelConfig
from openkda.models.hybrid import HybridLM
from openkda.models.inspect import count_parameters
from openkda.models.tokenizer import Tokenizer, load_tokenizer
from openkda.training.options import TrainOptions, choose_dtype, model_config, total_memory
from openkda.training.run_directory import find_checkpoint


def first_tokenizer(options: TrainOptions) -> Tokenizer:
    """The one that is named, else the checkpoint's own, else bytes. ValueError if a named one has other ids than the
    checkpoint's."""
    named = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    if options.init_from is None:
        return named or load_tokenizer("bytes")
    checkpoint = _checkpoint(options)
    try:
        own = load_tokenizer(checkpoint)
    except FileNotFoundError as missing:
        if named is None:
            raise ValueError(f"tokenizer: expected one, as the checkpoint brings none ({missing})") from None
        return named
    if named is not None and named.vocab_size != own.vocab_size:
        _bad("tokenizer", f"the {own.vocab_size} ids of {checkpoint}", f"{options.tokenizer} with {named.vocab_size}")
    return named or own


def first_config(options: TrainOptions, tokenizer: Tokenizer) -> ModelConfig:
    """The preset's or the checkpoint's, with `options.model` on top."""
    if options.init_from is None:
        return model_config(options, tokenizer.vocab_size)
    checkpoint = _checkpoint(options)
    config = load_config(checkpoint).replace(packed_experts=False).replace(**options.model)
    if config.packed_experts:
        _bad("packed_experts", "false: packed experts do not train", True)
    if config.vocab_size < tokenizer.vocab_size:
        _bad("tokenizer", f"at most {config.vocab_size} ids, the vocabulary of {checkpoint}", tokenizer.vocab_size)
    return config


def first_model(config: ModelConfig, options: TrainOptions, device: torch.device) -> HybridLM:
    """The model in float32 on `device`, shown to run: what is missing or refused in it raises here, before any data is read."""
    _check_memory(config, options, device)
    torch.manual_seed(options.seed)
    if options.init_from is None:
        model = HybridLM(config)
        model.init_weights(options.seed)
    else:
        model = load_weights(_checkpoint(options), config)
    model.to(device)
    dtype = choose_dtype(options.dtype, device)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        model(torch.zeros(1, 2, dtype=torch.int64, device=device))
    return model


def load_weights(directory: str | Path, config: ModelConfig | None = None) -> HybridLM:
    """A model to train with the weights of a checkpoint directory: float32, no packed experts, in training mode, on the CPU.

    config: one that the same weights fit; None = the checkpoint's own. For FSDP2, `shard` the result
    (openkda/training/sharding.py).
    Raises: what `load_checkpoint` raises; ValueError naming every tensor that is not finite or does not fit `config`.
    """
    model = load_checkpoint(directory, dtype=torch.float32)
    unpack_experts(model)
    broken = [n for n, p in model.state_dict().items() if p.is_floating_point() and not bool(torch.isfinite(p).all())]
    if broken:  # the first loss would be NaN, or the first save refused
        raise ValueError(
            f"{directory}: expected finite float32 weights, received NaN or infinity in {', '.join(broken)}"
        )
    if config is not None and config != model.config:
        found = model.state_dict()
        with torch.device("meta"):
            model = HybridLM(config)
        wanted = model.state_dict()
        fit = {n: t.shape for n, t in wanted.items()} == {n: t.shape for n, t in found.items()}
        if not fit:
            both = sorted(wanted.keys() | found.keys())
            shown = [
                f"{n}: {_shape(wanted, n)}, {_shape(found, n)}" for n in both if _shape(wanted, n) != _shape(found, n)
            ]
            raise ValueError(f"{directory}: tensors do not fit the settings (expected, found): {'; '.join(shown)}")
        model.load_state_dict(found, strict=True, assign=True)
    return model.train()


def _shape(tensors: dict[str, torch.Tensor], name: str) -> list[int] | str:
    return list(tensors[name].shape) if name in tensors else "none"


def _checkpoint(options: TrainOptions) -> Path:
    assert options.init_from is not None  # the callers looked
    try:
        return find_checkpoint(options.init_from)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"init_from: {error}") from None


def _check_memory(config: ModelConfig, options: TrainOptions, device: torch.device) -> None:
    parameters = 16 * sum(count_parameters(config).values())  # float32: weights, gradients, two moments at most
    # Of what a step keeps of each token only what every model has: four rows a layer (one, where layers are computed again),
    # and its logits, of which a GPU holds a part (openkda/ops/head_loss).
    tokens = options.batch_size // options.accumulate * options.seq_len
    rows = (1 if options.recompute else 4) * config.num_hidden_layers
    batch = 4 * tokens * (config.hidden_size * rows + (config.vocab_size if device.type == "cpu" else 0))
    there = total_memory(device)
    if there is not None and parameters + batch > there:
        raise ValueError(
            f"memory: expected at most {there / 1e9:.1f} GB on {device}, received {parameters / 1e9:.1f} GB of weights, "
            f"gradients and optimizer, and at least {batch / 1e9:.1f} GB for {tokens} tokens at a time "
            "(batch_size * seq_len / accumulate)"
        )


def _bad(name: str, expected: object, received: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, received {received}")

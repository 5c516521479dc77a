"""The published tensors of a model: name, shape, dtype and shard of each, and where it stands in our own model.

Our module tree carries the published names already, with two differences: expert matrices are stacked, one tensor a layer, and
A_log is stored with its published padding. Nothing here touches weights: on the meta device the inventory of Kimi K3 (497,220
tensors, 1.56 TB) takes seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from openkda.models.config import ModelConfig
from openkda.models.hybrid import HybridLM
from openkda.models.multimodal import MultimodalLM
from openkda.models.official_config import Kind, OfficialConfig
from openkda.models.presets import PRESETS
from openkda.models.vision_config import VisionConfig

ALogForm = Literal["padded", "broadcast", "heads"]
"""How A_log of H heads is stored: zeros up to a multiple of 128 (Kimi K3), [1, 1, H, 1] (Kimi Linear 48B), or [H]."""

A_LOG_FORM: dict[Kind, ALogForm] = {"kimi_k3": "padded", "kimi_linear": "broadcast"}

_STACKED = re.compile(r"(?P<at>.*\.experts\.)(?P<matrix>w[123])(?P<part>_packed|_scale)?")


class PublishedTensor(NamedTuple):
    """One tensor of a published checkpoint.

    key: of our state dict; row: its row there (an expert), None = the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str
    row: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def parameters(self) -> int:
        """Weights that it holds: two in a byte of packed codes, none in scales."""
        if self.name.endswith(".weight_scale"):
            return 0
        return math.prod(self.shape) * (2 if self.name.endswith(".weight_packed") else 1)


def plain_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the names that torch.compile puts around a model or its layers."""
    return {name.replace("_orig_mod.", ""): t for name, t in state.items()}


def official(name: str) -> OfficialConfig:
    """The published model of a preset: "kimi-k3" (packed experts, vision tower) or "kimi-linear-48b"."""
    if name == "kimi-k3":
        return OfficialConfig(PRESETS[name].replace(packed_experts=True, vision=VisionConfig()), "kimi_k3")
    if name == "kimi-linear-48b":
        return OfficialConfig(PRESETS[name], "kimi_linear")
    raise ValueError(f"expected a published model (kimi-k3, kimi-linear-48b), received {name!r}")


def build(config: ModelConfig, *, vision: bool, dtype: torch.dtype | None = None) -> HybridLM | MultimodalLM:
    """The model on the meta device, without memory; `dtype` of all that need not be float32."""
    with torch.device("meta"):
        model = MultimodalLM(config) if vision else HybridLM(config)
    return model.to(dtype) if dtype is not None else model


def inventory(official: OfficialConfig, *, dtype: torch.dtype = torch.bfloat16) -> list[PublishedTensor]:
    """All tensors of the published checkpoint, in the order of their shards."""
    model = build(official.model, vision=official.kind == "kimi_k3", dtype=dtype)
    tensors = list(published(model.state_dict(), "", A_LOG_FORM[official.kind]))
    return sorted(tensors, key=lambda t: shard_of(t.name, official.model.num_hidden_layers))


def published(state: dict[str, Tensor], prefix: str, a_log: ALogForm) -> Iterator[PublishedTensor]:
    """The published tensors of a state dict (values are not read); prefix: before every name."""
    for key, t in state.items():
        stacked = _STACKED.fullmatch(key)
        if stacked is None:
            shape = _a_log_shape(t.numel(), a_log) if key.endswith(".A_log") else tuple(t.shape)
            yield PublishedTensor(prefix + key, shape, t.dtype, key)
            continue
        head, tail = prefix + stacked["at"], f".{stacked['matrix']}.weight{stacked['part'] or ''}"
        shape, dtype = tuple(t.shape[1:]), t.dtype
        for e in range(t.shape[0]):
            yield PublishedTensor(f"{head}{e}{tail}", shape, dtype, key, e)


def _a_log_shape(heads: int, form: ALogForm) -> tuple[int, ...]:
    if form == "heads":
        return (heads,)
    return (1, 1, heads, 1) if form == "broadcast" else (-(-heads // 128) * 128,)


def a_log_form(shape: Iterable[int], heads: int) -> ALogForm | None:
    """The form in which A_log of `heads` heads is stored in a tensor of this shape; None if it cannot be.

    128 heads look the same padded and not.
    """
    forms: tuple[ALogForm, ...] = ("heads", "padded", "broadcast")
    return next((form for form in forms if _a_log_shape(heads, form) == tuple(shape)), None)


def shard_of(name: str, layers: int) -> int:
    """1-based shard of a tensor: one a layer, then embedding, head and norms, then the projector, then the tower."""
    layer = re.search(r"\bmodel\.layers\.(\d+)\.", name)
    if layer:
        return int(layer[1]) + 1
    return layers + (2 if name.startswith("mm_projector.") else 3 if name.startswith("vision_tower.") else 1)


def shard_file(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:06d}.safetensors"


def shard_count(official: OfficialConfig) -> int:
    return official.model.num_hidden_layers + (3 if official.kind == "kimi_k3" else 1)

"""The published config.json as transformers config classes: every published key is an attribute, and is written back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig

from openkda.models.official_config import OfficialConfig, from_published, to_published
from openkda.models.official_names import official

# What transformers itself hands a config beside the file's keys.
_OWN = ("attn_implementation", "experts_implementation", "name_or_path")


class _PublishedConfig(PreTrainedConfig):
    """Keeps the published dictionary; setting an attribute that is one of its keys changes it there too."""

    has_no_defaults_at_init = False
    _default = "kimi-linear-48b"

    def __init__(self, **keys: Any) -> None:
        own = {k: v for k, v in keys.items() if k.startswith("_") or k in _OWN}
        published = {k: v for k, v in keys.items() if k not in own}
        if "linear_attn_config" not in published and "text_config" not in published:
            published = {**to_published(official(self._default)), **published}
        object.__setattr__(self, "published", copy.deepcopy(published))
        super().__init__(**copy.deepcopy(published), **own)
        for key, value in published.items():  # transformers 5.24 keeps `use_cache` for itself
            if not hasattr(self, key):
                object.__setattr__(self, key, copy.deepcopy(value))

    def __setattr__(self, key: str, value: Any) -> None:
        super().__setattr__(key, value)
        if key in self.__dict__.get("published", {}):
            self.published[key] = value.to_dict() if isinstance(value, PreTrainedConfig) else _plain(value)

    def official(self) -> OfficialConfig:
        """The translated config. Raises: ValueError listing missing, unknown and contradictory keys."""
        return from_published(self.published)

    def to_dict(self) -> dict[str, Any]:
        out = copy.deepcopy(self.published)
        for key in ("architectures", "dtype"):
            value = getattr(self, key, None)
            if value is not None:
                out[key] = _plain(value)
        return {**out, "model_type": self.model_type}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class KimiLinearConfig(_PublishedConfig):
    """config.json of Kimi-Linear-48B, or of the text model of Kimi K3 alone: the same keys, every feature its own."""

    model_type = "kimi_linear"

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)


class KimiK3Config(_PublishedConfig):
    """config.json of Kimi K3: `text_config` (a `KimiLinearConfig`) and `vision_config` (a dictionary)."""

    model_type = "kimi_k3"
    _default = "kimi-k3"
    text_config: Any

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        if isinstance(self.text_config, dict):
            self.text_config = KimiLinearConfig(**self.text_config)

    def official(self) -> OfficialConfig:
        self.published["text_config"] = self.text_config.to_dict()
        return super().official()

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "text_config": self.text_config.to_dict()}


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value

"""Options of `from_pretrained`: which have a meaning for a published checkpoint, and which are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

_HUB = ("cache_dir", "revision", "token", "local_files_only", "force_download")
# Without effect here: loading is always strict, from safetensors, and without remote code.
_IGNORED = (
    "_from_auto", "adapter_kwargs", "attn_implementation", "code_revision", "experts_implementation", "from_auto_class",
    "low_cpu_mem_usage", "proxies", "subfolder", "trust_remote_code", "use_safetensors", "weights_only", "_commit_hash",
    "use_kernels", "quantization_config", "tp_plan", "ignore_mismatched_sizes", "state_dict", "offload_folder", "max_memory",
)  # fmt: skip
_HARMLESS = {
    "ignore_mismatched_sizes": (False,), "attn_implementation": ("sdpa", "eager"), "use_kernels": (False,),
    "trust_remote_code": (False, True), "use_safetensors": (True,), "low_cpu_mem_usage": (True, False),
    "weights_only": (True,), "_from_auto": (True, False), "subfolder": ("",),
}  # fmt: skip


@dataclass(frozen=True)
class LoadOptions:
    config: Any
    dtype: torch.dtype | None
    device: torch.device
    output_loading_info: bool
    generation: Any
    hub: dict[str, Any]

    def generation_config(self, directory: Path, default: GenerationConfig) -> GenerationConfig:
        """The one passed, the checkpoint's own, or the model's default."""
        if self.generation is not None:
            return self.generation
        if (directory / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(directory)
        return default

    @staticmethod
    def loading_info() -> dict[str, Any]:
        """Empty: anything missing, unexpected or misshapen would have been an error."""
        return {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}


def load_options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoadOptions:
    """Raises: ValueError that names every option without a meaning here."""
    known = (
        "config",
        "dtype",
        "torch_dtype",
        "device_map",
        "output_loading_info",
        "generation_config",
        *_HUB,
        *_IGNORED,
    )
    unknown = sorted(k for k in kwargs if k not in known)
    unmet = sorted(
        k for k in _IGNORED if kwargs.get(k) is not None and kwargs[k] not in _HARMLESS.get(k, ()) and kwargs[k] != {}
    )
    if args or unknown or unmet:
        raise ValueError(f"from_pretrained: no meaning for {[*map(repr, args), *unknown, *unmet]} in this model")
    return LoadOptions(
        kwargs.get("config"),
        _dtype(kwargs.get("dtype", kwargs.get("torch_dtype"))),
        _device(kwargs.get("device_map")),
        bool(kwargs.get("output_loading_info")),
        kwargs.get("generation_config"),
        {k: kwargs[k] for k in _HUB if kwargs.get(k) is not None},
    )


def _dtype(dtype: Any) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype: expected a float torch.dtype, its name or 'auto', received {dtype!r}")
    return found


def _device(device_map: Any) -> torch.device:
    if device_map is None:
        return torch.device("cpu")
    if isinstance(device_map, dict) and set(device_map) == {""}:
        device_map = device_map[""]
    if device_map == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(device_map, int):
        return torch.device("cuda", device_map)
    if isinstance(device_map, str | torch.device):
        try:
            return torch.device(device_map)
        except RuntimeError:
            pass
    raise ValueError(f"device_map: expected one device for the whole model, received {device_map!r}")


def checkpoint_directory(name: Any, options: LoadOptions) -> Path:
    """A local directory, or the snapshot of a repository. Raises: FileNotFoundError for what is neither."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hub = {k: v for k, v in options.hub.items() if v is not False}
    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors"], **hub))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(f"{name}: no such directory, and no repository that can be read ({error})") from None

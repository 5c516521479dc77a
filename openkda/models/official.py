"""Loading and saving the published checkpoints of Kimi-Linear-48B and Kimi-K3, tensor for tensor.

    model = load_official("Kimi-Linear-48B-A3B-Instruct")
    model = load_official("Kimi-K3", layers=range(4), vision=False)      # the first four layers of the text model
    save_official(model, "out", kind="kimi_k3")

Every header is compared with the config before a weight is read, so a load is all or nothing and names everything that is
wrong at once. Then weights stream in shard by shard: memory above the model is one tensor (its shard is mapped, not read
whole). Nothing is initialised afterwards. Saving holds one shard beside the model.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from openkda.models.config import ModelConfig
from openkda.models.field_types import parse_json
from openkda.models.hybrid import HybridLM
from openkda.models.multimodal import MultimodalLM
from openkda.models.official_config import Kind, OfficialConfig, from_published, to_published
from openkda.models.official_names import (
    A_LOG_FORM,
    ALogForm,
    PublishedTensor,
    a_log_form,
    build,
    plain_names,
    published,
    shard_count,
    shard_file,
    shard_of,
)
from openkda.models.official_shards import INDEX, Shards, identity, opened, some
from openkda.models.whole_directory import whole_directory
from openkda.ops.mx.api import check_scales

CONFIG = "config.json"


def load_official(
    directory: str | Path,
    *,
    layers: Sequence[int] | None = None,
    vision: bool = True,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> HybridLM | MultimodalLM:
    """The model of a published checkpoint directory, in eval mode.

    Args:
        layers: 0-based decoder layers to load, ascending; they become layers 0, 1, ... of a smaller model. None = all.
        vision: with False the vision tower and projector of a Kimi K3 are left out, and a `HybridLM` comes back.
        device, dtype: where to, and as what. dtype None keeps every stored dtype. What must be float32 (A_log, dt_bias,
            convolutions, o_norm, router biases) is float32 in any case; packed experts stay packed.
    Returns: `MultimodalLM` for a checkpoint with a vision tower, else `HybridLM`.
    Raises: FileNotFoundError or ValueError naming file and tensor: missing, unexpected, of another shape or dtype, index and
        files that contradict each other, A_log with a tail that is not zero, NaN scales, matrices of several dtypes (without
        `dtype`), keys of the config, files that somebody replaced meanwhile.
    """
    directory = Path(directory)
    _check_target(device, dtype)
    config_file = identity(directory / CONFIG)
    config = read_config(directory)
    shards = Shards(directory)
    shards.seen[CONFIG] = config_file
    official = _as_stored(config, shards)
    chosen = _check_layers(layers, official.model)
    with_vision = vision and official.kind == "kimi_k3"
    smaller = _subset(official.model, chosen)
    model = build(smaller if with_vision else smaller.replace(vision=None), vision=with_vision)
    prefix = "" if with_vision else official.prefix
    wanted = [_renumbered(t, chosen) for t in published(model.state_dict(), prefix, _stored_a_log(official, shards))]
    left_out = _left_out(shards, chosen, official, with_vision)
    shards.check(wanted, left_out)
    if dtype is None:
        shards.check_matrices(wanted)
    state = _read(shards, wanted, model.state_dict(), device)
    shards.check_unchanged()
    model.load_state_dict(state, strict=True, assign=True)
    return model.to(device=device, dtype=dtype).eval()  # also widens what must be float32 and was stored narrower


def load_text_model(
    directory: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> HybridLM:
    """`load_official` without the vision tower of a Kimi K3; its config says so too."""
    model = load_official(directory, vision=False, device=device, dtype=dtype)
    assert isinstance(model, HybridLM)  # vision=False
    return model


def is_published(directory: str | Path) -> bool:
    """Whether a directory has a config.json in a published layout (another may be our own), or is such a file."""
    try:
        config = json.loads(_config_file(directory).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and ("text_config" in config or "linear_attn_config" in config)


def _config_file(directory: str | Path) -> Path:
    path = Path(directory)
    return path if path.is_file() else path / CONFIG


def read_config(directory: str | Path) -> OfficialConfig:
    """The translated config.json of a published checkpoint, or that file. Raises: FileNotFoundError or ValueError naming it."""
    path = _config_file(directory)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found")
    try:
        return from_published(parse_json(path.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def save_official(
    model: HybridLM | MultimodalLM,
    directory: str | Path,
    *,
    kind: Kind | None = None,
    config: OfficialConfig | None = None,
    a_log: ALogForm | None = None,
    overwrite: bool = False,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write `model` in the published layout: shards, index and config.json. A new directory appears complete or not at all; in
    an existing one the files are replaced when all are written, and others are left alone.

    Args:
        kind: layout; default "kimi_k3" for a `MultimodalLM`, else "kimi_linear". "kimi_k3" needs a vision tower.
        config: as read from another checkpoint, whose inert keys (token ids and the like) are then written again.
        a_log: how A_log is stored; default as published for that kind.
        overwrite: write into an existing directory, replacing a checkpoint there.
        state: the model's state dict, where it comes from elsewhere (gathered from shards); default its own.
    Every tensor keeps its dtype: loading and saving again gives the same bytes.
    Raises: ValueError for a feature that the format cannot say, NaN scales and a state that does not fit; FileExistsError (also
        where another save is at work); OSError with the path.
    """
    directory = Path(directory)
    multimodal = isinstance(model, MultimodalLM)
    kind = kind or ("kimi_k3" if multimodal else "kimi_linear")
    a_log = a_log or A_LOG_FORM.get(kind, "heads")
    for name, value, allowed in (("kind", kind, get_args(Kind)), ("a_log", a_log, get_args(ALogForm))):
        if value not in allowed:
            raise ValueError(f"{name}: expected {' or '.join(map(repr, allowed))}, received {value!r}")
    if (kind == "kimi_k3") != multimodal:
        raise ValueError(
            f"kind {kind!r}: expected a {'MultimodalLM' if kind == 'kimi_k3' else 'HybridLM'}, received the other"
        )
    model_config = model.config if multimodal else model.config.replace(vision=None)
    official = (
        OfficialConfig(model_config, kind)
        if config is None
        else dataclasses.replace(config, model=model_config, kind=kind)
    )
    text = json.dumps(_with_dtype(to_published(official), model), indent=2, sort_keys=True) + "\n"
    values = _complete(model, state)
    if directory.exists() and not overwrite:
        raise FileExistsError(f"{directory}: exists; overwrite=True (--overwrite) replaces it")
    with whole_directory(directory, _is_checkpoint_file) as partial:
        _write_shards(values, partial, official, a_log)
        (partial / CONFIG).write_text(text)


def _is_checkpoint_file(name: str) -> bool:
    return name in (INDEX, CONFIG) or (name.startswith("model") and name.endswith(".safetensors"))


def _complete(model: HybridLM | MultimodalLM, state: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """The tensors to save, by the model's own names; ValueError lists what a state from elsewhere lacks or has too much."""
    own = plain_names(model.state_dict())
    if state is None:
        return own
    given = plain_names(state)
    faults = {
        "missing": sorted(own.keys() - given.keys()),
        "unexpected": sorted(given.keys() - own.keys()),
        "shape": sorted(n for n in own.keys() & given.keys() if own[n].shape != given[n].shape),
    }
    listed = [f"{what}: {some(names)}" for what, names in faults.items() if names]
    if listed:
        raise ValueError(f"state: tensors do not fit the model. {'; '.join(listed)}")
    return given


def _as_stored(config: OfficialConfig, shards: Shards) -> OfficialConfig:
    """The config with packed or plain experts as the tensors are, whatever the quantisation entry says."""
    packed = any(name.endswith(".weight_packed") for name in shards.files)
    if packed and any(".experts." in name and name.endswith(".weight") for name in shards.files):
        raise ValueError(
            f"{shards.directory}: routed experts are stored both plain (.weight) and packed (.weight_packed)"
        )
    return dataclasses.replace(config, model=config.model.replace(packed_experts=packed))


def _stored_a_log(official: OfficialConfig, shards: Shards) -> ALogForm:
    """The form of the first A_log whose file is there; a shape that is none of them is reported with all other misshapen
    tensors."""
    for name in shards.files:
        shape = shards.shape(name) if name.endswith(".A_log") else None
        if shape is not None:
            return a_log_form(shape, official.model.kda_v_heads) or A_LOG_FORM[official.kind]
    return A_LOG_FORM[official.kind]


def _check_target(device: str | torch.device, dtype: torch.dtype | None) -> None:
    """Before anything is read: a device of this machine, a dtype that weights can have."""
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise ValueError(f"dtype: expected a float torch.dtype or None, received {dtype!r}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"device: expected a device of this machine, received {device!r} ({reason})") from None


def _check_layers(layers: Sequence[int] | None, config: ModelConfig) -> list[int]:
    try:
        chosen = list(range(config.num_hidden_layers) if layers is None else map(operator.index, layers))
    except TypeError:
        raise ValueError(
            f"layers: expected indices in 0..{config.num_hidden_layers - 1}, received {layers!r}"
        ) from None
    if not chosen or chosen != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= config.num_hidden_layers:
        raise ValueError(f"layers: expected ascending indices in 0..{config.num_hidden_layers - 1}, received {chosen}")
    return chosen


def _subset(config: ModelConfig, chosen: list[int]) -> ModelConfig:
    """The config of those layers alone, renumbered."""
    return config.replace(
        num_hidden_layers=len(chosen),
        kda_layers=tuple(i + 1 for i, layer in enumerate(chosen) if config.is_kda(layer)),
        full_attn_layers=tuple(i + 1 for i, layer in enumerate(chosen) if not config.is_kda(layer)),
        first_k_dense_replace=sum(layer < config.first_k_dense_replace for layer in chosen),
    )


def _renumbered(t: PublishedTensor, chosen: list[int]) -> PublishedTensor:
    """A tensor of the smaller model under the name that it has in the whole one."""
    head, at, tail = t.name.partition("model.layers.")
    if not at:
        return t
    number, _, rest = tail.partition(".")
    return t._replace(name=f"{head}{at}{chosen[int(number)]}.{rest}")


def _left_out(shards: Shards, chosen: list[int], official: OfficialConfig, vision: bool) -> set[str]:
    """Names that this load does not want and that are no fault: other layers of the config, and the eyes of a text model."""
    others = set(range(official.model.num_hidden_layers)) - set(chosen)
    eyes = ("vision_tower.", "mm_projector.") if official.kind == "kimi_k3" and not vision else ()
    out = set()
    for name in shards.files:
        number = name.partition(f"{official.prefix}model.layers.")[2].partition(".")[0]
        if name.startswith(eyes) or (number.isdigit() and int(number) in others):
            out.add(name)
    return out


def _read(
    shards: Shards, wanted: list[PublishedTensor], ours: dict[str, Tensor], device: str | torch.device
) -> dict[str, Tensor]:
    """Our state dict, filled shard by shard."""
    state: dict[str, Tensor] = {}
    by_file: dict[str, list[PublishedTensor]] = {}
    for t in wanted:
        by_file.setdefault(shards.files[t.name], []).append(t)
    for name, tensors in by_file.items():
        path = shards.directory / name
        with opened(path) as file:
            for t in tensors:
                where = f"{path}: {t.name}"
                try:
                    value = _checked(file.get_tensor(t.name), t, where, ours[t.key])
                except (SafetensorError, RuntimeError) as error:
                    raise ValueError(f"{where}: cannot be read ({error})") from None
                if t.row is None:
                    state[t.key] = value.to(device=device, copy=True)  # a copy: the value is a view of the mapped file
                    continue
                if t.key not in state:
                    state[t.key] = torch.empty(ours[t.key].shape, dtype=value.dtype, device=device)
                if value.dtype != state[t.key].dtype:
                    want = f"{state[t.key].dtype} as its first expert's"
                    raise ValueError(f"{where}: expected {want}, found {value.dtype}")
                state[t.key][t.row] = value
    return state


def from_published_state(
    state: dict[str, Tensor], ours: dict[str, Tensor], prefix: str = "", root: str = ""
) -> dict[str, Tensor]:
    """The tensors of `state` with published names (behind `prefix`), taken out of it, under our own names (behind `root`).

    An expert stack needs all its experts. What is under neither name stays in `state`.
    """
    wanted: dict[str, list[PublishedTensor]] = {}
    for t in published(ours, "", "heads"):
        wanted.setdefault(t.key, []).append(t)
    moved: dict[str, Tensor] = {}
    for key, tensors in wanted.items():
        if root + key in state or not all(prefix + t.name in state for t in tensors):
            continue
        values = [state.pop(prefix + t.name) for t in tensors]
        if key.endswith(".A_log") and a_log_form(values[0].shape, ours[key].numel()) is not None:
            values = [_checked(values[0], tensors[0], key, ours[key])]
        moved[root + key] = values[0] if tensors[0].row is None else torch.stack(values)
    return moved


def _checked(value: Tensor, t: PublishedTensor, where: str, ours: Tensor) -> Tensor:
    if t.name.endswith(".weight_scale"):
        check_scales(where, value)
    if t.name.endswith(".A_log"):
        flat = value.flatten()
        if bool(flat[ours.numel() :].any()):
            raise ValueError(
                f"{where}: expected zeros behind its {ours.numel()} heads, found {flat[ours.numel() :].tolist()}"
            )
        return flat[: ours.numel()]
    return value


def _write_shards(state: dict[str, Tensor], directory: Path, official: OfficialConfig, a_log: ALogForm) -> None:
    layers, count = official.model.num_hidden_layers, shard_count(official)
    shards: dict[int, list[PublishedTensor]] = {}
    for t in published(state, "", a_log):
        shards.setdefault(shard_of(t.name, layers), []).append(t)
    for number, tensors in sorted(shards.items()):
        values = {t.name: _stored(state[t.key] if t.row is None else state[t.key][t.row], t) for t in tensors}
        path = directory / shard_file(number, count)
        try:
            save_file(values, str(path), metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path}: could not be written ({error})") from None
    index: dict[str, Any] = {
        "metadata": {"total_size": sum(t.nbytes for tensors in shards.values() for t in tensors)},
        "weight_map": {t.name: shard_file(n, count) for n, tensors in sorted(shards.items()) for t in tensors},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _stored(value: Tensor, t: PublishedTensor) -> Tensor:
    value = value.detach().cpu().contiguous()
    if t.name.endswith(".weight_scale"):
        check_scales(t.name, value)
    if t.name.endswith(".A_log"):
        padding = torch.Size(t.shape).numel() - value.numel()
        value = torch.cat([value, value.new_zeros(padding)]).view(t.shape)
    # A row of a stack is a view of the whole stack, which the file format refuses to write.
    return value.clone() if t.row is not None else value


def _with_dtype(config: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """config.json with the dtype that the matrices have."""
    name = str(next(p.dtype for p in model.parameters() if p.dim() == 2)).removeprefix("torch.")
    for part in (config, config.get("text_config", {})):
        if part.get("dtype") is not None:
            part["dtype"] = name
    return config

"""Everything a training run can be told, in one frozen dataclass, and `key=value` settings typed against it."""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from openkda.models.config import ModelConfig
from openkda.models.field_types import check_types
from openkda.models.presets import named_config

# What may change when a run is continued: nothing that decides which numbers a step computes, except its length.
CHANGEABLE = frozenset({
    "steps", "max_seconds", "device", "recompute", "cuda_graph", "log_every", "val_every", "val_tokens", "checkpoint_every",
    "keep",
})  # fmt: skip

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """A training run. Raises ValueError for values of another type than their field's and for impossible ones, showing expected
    and received. Paths may be `pathlib` ones, too.

    One step trains on `batch_size` sequences of `seq_len` tokens, in `accumulate` equal parts whose gradients add up.
    A run ends after `steps`, or after `max_seconds` (validation and checkpoints on the way included) if that comes
    first; the learning rate follows whichever is nearer its end, so such a run repeats only as well as the clock does.
    """

    data: tuple[str, ...]  # files, directories, or "python-stdlib"
    out: str  # directory of the run: step-N/, last, metrics.jsonl, loss.png, data/
    preset: str = "demo"  # a name in PRESETS, or a config.json
    init_from: str | None = None  # a checkpoint or run whose config, weights and tokenizer the run begins with
    model: Mapping[str, Any] = field(default_factory=dict)  # ModelConfig fields set on top of that
    tokenizer: str | None = None  # "bytes", a tokenizers JSON or tiktoken rank file; None: init_from's own, else bytes
    val_data: tuple[str, ...] = ()  # held-out text; none: val_fraction of `data`, chosen by a hash of each path
    val_fraction: float = 0.05

    seq_len: int = 512
    batch_size: int = 16
    accumulate: int = 1
    steps: int = 1000
    max_seconds: float | None = None

    # Of Muon and AdamW alike: Muon's update is scaled to AdamW's size. Best of 4e-3, 1e-2, 2e-2 for the demo preset
    # (validation loss 1.96, 1.73, 1.79 after 100 steps of 2,048 bytes); larger models want less (1.1e-3 at 48 B).
    lr: float = 1e-2
    lr_end: float = 0.0  # where the cosine ends, as a fraction of lr
    warmup: float = 0.01  # of the run
    weight_decay: float = 0.1
    qk_clip: float | None = None  # largest attention score of a Gated MLA head; beyond it its weights are scaled back
    momentum: float = 0.95  # Muon
    per_head_muon: bool = False  # a matrix a head of the query, key and value projections (Kimi K3 report, section 2.5)
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95
    grad_clip: float = 1.0  # largest norm of the whole gradient

    seed: int = 0
    device: str = "auto"  # "auto": cuda if there is one, else cpu
    recompute: bool = False  # layers run again in the backward pass instead of keeping activations: the same bits
    cuda_graph: bool = True  # on a GPU: forward and backward of a step replayed, where nothing speaks against it
    dtype: str = "auto"  # of the matmuls: "float32", "bfloat16" (autocast); "auto": bfloat16 on cuda, else float32

    log_every: int = 10
    val_every: int = 100
    val_tokens: int = 65536
    checkpoint_every: int = 200
    keep: int = 2  # newest checkpoints that stay

    def __post_init__(self) -> None:
        for name in ("data", "val_data"):
            value = _text(getattr(self, name))
            paths = (value,) if isinstance(value, str) else value
            if isinstance(paths, list | tuple):
                object.__setattr__(self, name, tuple(map(_text, paths)))
        for name in ("out", "preset", "tokenizer", "init_from"):
            object.__setattr__(self, name, _text(getattr(self, name)))
        check_types(self, "training options", largest=1 << 63)
        model = {k: tuple(v) if isinstance(v, list) else v for k, v in self.model.items()}  # as JSON gives it back
        object.__setattr__(self, "model", model)
        _check(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` inverts it."""
        fields = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainOptions:
        unknown = sorted(set(fields) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"training options: unknown keys {unknown}")
        return cls(**fields)


def with_settings(options: TrainOptions, settings: Sequence[str]) -> TrainOptions:
    """`options` with `key=value` settings; a key is a field of TrainOptions or of ModelConfig.

    Unknown keys raise ValueError, all of them named; so does a value that is not of the field's type.
    """
    run_hints = {name: hint for name, hint in typing.get_type_hints(TrainOptions).items() if name != "model"}
    model_hints = typing.get_type_hints(ModelConfig)
    pairs = [setting.partition("=") for setting in settings]
    malformed = [key for key, sign, _ in pairs if not sign]
    if malformed:
        raise ValueError(f"settings: expected key=value, received {malformed}")
    unknown = sorted({key for key, _, _ in pairs} - set(run_hints) - set(model_hints))
    if unknown:
        run_keys, model_keys = ", ".join(sorted(run_hints)), ", ".join(sorted(model_hints))
        close = [m[0] for key in unknown if (m := difflib.get_close_matches(key, [*run_hints, *model_hints], 1))]
        meant = f" (did you mean {', '.join(close)}?)" if close else ""
        raise ValueError(f"settings: unknown keys {unknown}{meant}; a run has {run_keys}; a model has {model_keys}")
    run = {key: parse_value(key, text, run_hints[key]) for key, _, text in pairs if key in run_hints}
    model = {key: parse_value(key, text, model_hints[key]) for key, _, text in pairs if key not in run_hints}
    return dataclasses.replace(options, **run, model={**options.model, **model})


def parse_value(name: str, text: str, hint: Any) -> Any:
    """`text` as the type `hint`: int, float, bool, str, a tuple of one of these (comma-separated), or one | None."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        if text.lower() in ("none", "null"):
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        return tuple(parse_value(name, part, typing.get_args(hint)[0]) for part in text.split(",") if part)
    if hint is str:
        return text
    if typing.get_origin(hint) is typing.Literal:
        if text not in typing.get_args(hint):
            _bad(name, " or ".join(map(repr, typing.get_args(hint))), repr(text))
        return text
    if hint is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        _bad(name, "true or false", text)
    if hint not in (int, float):
        _bad(name, "its own section of a config.json, not a setting", repr(text))
    try:
        return hint(text)
    except ValueError:
        _bad(name, {int: "an integer", float: "a number"}.get(hint, str(hint)), text)


def model_config(options: TrainOptions, vocab_size: int) -> ModelConfig:
    """The preset with `options.model` on top. The vocabulary is the tokenizer's unless it is set, and never smaller."""
    config = named_config(options.preset).replace(**{"vocab_size": vocab_size, **options.model})
    if config.vocab_size < vocab_size:
        _bad("vocab_size", f"at least {vocab_size}, the tokenizer's", config.vocab_size)
    return config


def choose_device(name: str) -> torch.device:
    """The device of that name ("auto": cuda if there is one, else cpu). ValueError if this machine has none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # shows that it holds numbers: meta does not
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"device: expected auto, cpu or a device of this machine, received {name!r} ({reason})"
        ) from None
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Autocast dtype: float32 means no autocast."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        _bad("dtype", f"auto, {' or '.join(DTYPES)}", repr(name))
    return DTYPES[name]


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory of that device (of this machine for cpu); None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _text(value: Any) -> Any:
    """A path as the string that JSON can hold; anything else as it is, for the check of types."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _bad(name: str, expected: object, received: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, received {received}")


def _check(o: TrainOptions) -> None:
    for name in ("seq_len", "batch_size", "accumulate", "steps", "log_every", "val_every", "val_tokens",
                 "checkpoint_every", "keep"):  # fmt: skip
        if getattr(o, name) < 1:
            _bad(name, "a positive integer", getattr(o, name))
    if o.batch_size * o.seq_len >= 1 << 40:  # 2^40 token ids are 8 TB: a slip of the keyboard, not a batch
        _bad("batch_size * seq_len", "fewer than 2^40 tokens a step", o.batch_size * o.seq_len)
    if o.batch_size % o.accumulate:
        _bad("batch_size", f"a multiple of accumulate = {o.accumulate}", o.batch_size)
    for name in ("warmup", "lr_end", "val_fraction", "momentum", "beta1", "beta2"):
        if not 0.0 <= getattr(o, name) < 1.0:
            _bad(name, "a value in [0, 1)", getattr(o, name))
    if not o.val_data and o.val_fraction == 0.0:
        _bad("val_fraction", "a value in (0, 1), or val_data", 0.0)
    for name in ("lr", "grad_clip"):
        if not getattr(o, name) > 0.0:
            _bad(name, "a positive number", getattr(o, name))
    if o.weight_decay < 0.0:
        _bad("weight_decay", "0 or more", o.weight_decay)
    if o.qk_clip is not None and not o.qk_clip > 0.0:
        _bad("qk_clip", "a positive number or none", o.qk_clip)
    if o.max_seconds is not None and not o.max_seconds > 0:
        _bad("max_seconds", "a positive number or none", o.max_seconds)
    if not 0 <= o.seed < 1 << 63:
        _bad("seed", "0 to 2^63 - 1", o.seed)
    choose_dtype(o.dtype, torch.device("cpu"))
    if o.init_from is not None and o.preset != "demo":
        _bad("preset", "none beside init_from, which brings its own config", repr(o.preset))
    if not o.data:
        _bad("data", "at least one path", "none")
    for name in ("out", "init_from"):
        if getattr(o, name) == "":  # a shell variable that is not set, not the directory that one stands in
            _bad(name, "a directory", repr(""))

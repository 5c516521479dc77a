"""The published config.json of Kimi-Linear-48B and Kimi-K3, translated both ways.

Two kinds of file: "kimi_linear" (a text model, its keys at the top) and "kimi_k3" (the same keys under `text_config`,
beside `vision_config`). The kind says where keys and tensors stand and nothing else: both text models carry the same
`model_type`, so every feature is read from its own key. Published keys that choose nothing (generation defaults and the
like) are kept as they came and written back.

Source: config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct (revision e1df551a) and moonshotai/Kimi-K3 (9f62e4e9).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

from openkda.models.config import ModelConfig
from openkda.models.official_keys import (
    FIXED,
    FRESH_TEXT,
    FRESH_TOP,
    INERT,
    INERT_PREFIXES,
    INERT_TOP,
    QUANTIZATION,
    RENAMED,
    SAME,
    VISION,
    VISION_FIXED,
)
from openkda.models.vision_config import VisionConfig

Kind = Literal["kimi_linear", "kimi_k3"]


@dataclass(frozen=True)
class OfficialConfig:
    """A model, the kind of its files, and the published keys that choose nothing in it (written back as they came)."""

    model: ModelConfig
    kind: Kind
    inert_text: dict[str, Any] = field(default_factory=lambda: dict(FRESH_TEXT))
    inert_top: dict[str, Any] = field(default_factory=lambda: dict(FRESH_TOP))
    inert_vision: dict[str, Any] = field(default_factory=lambda: dict(VISION_FIXED))

    @property
    def prefix(self) -> str:
        """Before the text model's tensor names."""
        return "language_model." if self.kind == "kimi_k3" else ""


def from_published(config: dict[str, Any]) -> OfficialConfig:
    """Translate a published config.json.

    Whether experts are packed is not read here: the quantisation entry of the published file names layers that the
    checkpoint stores plain, so the loader decides from the tensors. `packed_experts` follows the entry's presence.
    Raises: ValueError listing every missing, unknown and contradictory key.
    """
    kind: Kind = "kimi_k3" if "text_config" in config else "kimi_linear"
    text = config["text_config"] if kind == "kimi_k3" else config
    faults = _Faults()
    if not isinstance(text, dict) or not isinstance(text.get("linear_attn_config"), dict):
        why = "not a Kimi Linear or Kimi K3 model?"
        if isinstance(text, dict) and "linear_num_heads" in text:
            why = "saved by transformers' own kimi_linear, whose keys and tensor names differ from the published ones"
        raise ValueError(f"config.json: expected a JSON object with `linear_attn_config` ({why})")
    fields = _text_fields(text, faults)
    inert_top: dict[str, Any] = {}
    inert_vision: dict[str, Any] = {}
    if kind == "kimi_k3":
        inert_top = _top(config, text, faults)
        fields["vision"], inert_vision = _vision(config, text, faults)
    known = {*SAME, "num_key_value_heads", "linear_attn_config", "vision_config"}
    # An optional feature written as off stays written as off.
    inert = {k: v for k, v in text.items() if k not in known or (SAME.get(k) == "" and (v is None or v is False))}
    expected = {*SAME, *FIXED, "quantization_config"}
    faults.unknown += [k for k in inert if k not in expected and not _is_inert(k)]
    faults.check()
    return OfficialConfig(ModelConfig(**fields), kind, inert, inert_top, inert_vision)


def to_published(official: OfficialConfig) -> dict[str, Any]:
    """The config.json of `official`; inverse of `from_published`.

    Switches of training alone (`mla_fp32_output`, `expert_quantization`) are left out.
    Raises: ValueError listing the features that the published format cannot say.
    """
    c = official.model
    unsayable = {
        "kda_num_v_heads": c.kda_v_heads != c.kda_num_heads,
        "kda_v_head_dim": c.kda_v_dim != c.kda_head_dim,
        "output_gate_bias": c.output_gate_bias,
        "mla_norm_eps": c.mla_norm_eps != 1e-6,
        "vision": (c.vision is not None) != (official.kind == "kimi_k3"),
    }
    if any(unsayable.values()):
        raise ValueError(
            f"the published format {official.kind} cannot say: {[k for k, bad in unsayable.items() if bad]}"
        )
    text = {**official.inert_text, "num_key_value_heads": c.num_attention_heads}
    for key, need in SAME.items():
        value = getattr(c, key)
        if need == "always" or (need == "moe" and c.num_experts is not None) or not (value is None or value is False):
            text[key] = value
    linear = {
        "full_attn_layers": list(c.full_attn_layers),
        "kda_layers": list(c.kda_layers),
        "head_dim": c.kda_head_dim,
        "num_heads": c.kda_num_heads,
        "short_conv_kernel_size": c.short_conv_kernel_size,
    }
    if c.gate_lower_bound is not None:
        linear["gate_lower_bound"] = c.gate_lower_bound
    if c.use_full_rank_gate:
        linear["use_full_rank_gate"] = True
    text["linear_attn_config"] = linear
    entry = text.pop("quantization_config", None)
    if c.packed_experts:
        text["quantization_config"] = copy.deepcopy(QUANTIZATION if entry is None else entry)
    if official.kind == "kimi_linear":
        return text
    assert c.vision is not None
    vision = {**official.inert_vision, "mm_hidden_size": c.vision.hidden_size, "text_hidden_size": c.hidden_size}
    for published, ours in VISION.items():
        value = getattr(c.vision, ours)
        vision[published] = list(value) if isinstance(value, tuple) else value
    top = {**official.inert_top, "media_placeholder_token_id": c.vision.placeholder_id}
    if "tie_word_embeddings" in top:  # it repeats the text model's
        top["tie_word_embeddings"] = c.tie_word_embeddings
    return {**top, "text_config": text, "vision_config": vision}


def _is_inert(key: str) -> bool:
    """Whether a key chooses nothing in whichever part of the file it stands: transformers writes most of them into each."""
    return key in INERT or key.startswith(INERT_PREFIXES)


class _Faults:
    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unknown: list[str] = []
        self.contradictory: list[str] = []

    def check(self) -> None:
        listed = [f"{kind}: {', '.join(keys)}" for kind, keys in vars(self).items() if keys]
        if listed:
            raise ValueError(f"config.json: {'; '.join(listed)}")

    def need(self, where: dict[str, Any], key: str, name: str) -> Any:
        if key not in where:
            self.missing.append(name)
        return where.get(key)


def _text_fields(text: dict[str, Any], faults: _Faults) -> dict[str, Any]:
    """ModelConfig fields of the text model. Never a default of ours for an architecture key that is not optional."""
    fields: dict[str, Any] = {}
    moe = text.get("num_experts") is not None
    for key, need in SAME.items():
        if need == "always" or (need == "moe" and moe):
            fields[key] = faults.need(text, key, key)
        elif text.get(key) is not None:
            fields[key] = text[key]
    linear = text["linear_attn_config"]
    for published, ours in RENAMED.items():
        if published in ("gate_lower_bound", "use_full_rank_gate"):
            fields[ours] = linear.get(published, False if published == "use_full_rank_gate" else None)
        else:
            fields[ours] = faults.need(linear, published, f"linear_attn_config.{published}")
    faults.unknown += [f"linear_attn_config.{k}" for k in linear if k not in RENAMED]
    faults.need(text, "mla_use_nope", "mla_use_nope")  # without it the published code would rotate
    for key, values in {**FIXED, "num_key_value_heads": (text.get("num_attention_heads"),)}.items():
        if key in text and text[key] not in values:
            faults.contradictory.append(f"{key}: expected {' or '.join(map(repr, values))}, found {text[key]!r}")
    if fields.get("hidden_act") == "silu" and text.get("activation_situ_beta") is not None:
        faults.contradictory.append("hidden_act 'silu' beside activation_situ_beta")
    quantization = text.get("quantization_config")
    fields["packed_experts"] = quantization is not None and moe
    if quantization is not None:
        faults.contradictory += _differences(quantization, QUANTIZATION, "quantization_config")
    if "vision_config" in text:
        faults.contradictory.append("vision_config beside the text model's keys: expected text_config")
    return fields


def _differences(found: Any, wanted: Any, at: str) -> list[str]:
    """Where `found` says something else than `wanted`; which layers to leave out and who observed them says nothing here."""
    if not isinstance(wanted, dict) or not isinstance(found, dict):
        return [] if found == wanted else [f"{at}: expected {wanted!r}, found {found!r}"]
    keys = [k for k in {**wanted, **found} if k not in ("ignore", "observer", "observer_kwargs")]
    return [line for k in keys for line in _differences(found.get(k), wanted.get(k), f"{at}.{k}")]


def _top(config: dict[str, Any], text: dict[str, Any], faults: _Faults) -> dict[str, Any]:
    """Keys beside text_config and vision_config that choose nothing; those that repeat a text key must agree with it."""
    known = ("text_config", "vision_config", "media_placeholder_token_id")
    for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        if key in config and key in text and config[key] != text[key]:
            faults.contradictory.append(f"{key}: {config[key]!r} at the top, {text[key]!r} in text_config")
    if config.get("model_type", "kimi_k3") != "kimi_k3":
        faults.contradictory.append(f"model_type: expected 'kimi_k3', found {config['model_type']!r}")
    inert = {k: v for k, v in config.items() if k not in known}
    faults.unknown += [k for k in inert if k not in INERT_TOP and not _is_inert(k)]
    return inert


def _vision(
    config: dict[str, Any], text: dict[str, Any], faults: _Faults
) -> tuple[VisionConfig | None, dict[str, Any]]:
    """The tower's config (None with faults), and its keys that choose nothing."""
    vision = faults.need(config, "vision_config", "vision_config")
    if not isinstance(vision, dict):
        if "vision_config" in config:
            faults.contradictory.append(
                f"vision_config: expected a JSON object beside text_config, found {vision!r:.80}"
            )
        return None, {}
    fields = {ours: faults.need(vision, key, f"vision_config.{key}") for key, ours in VISION.items()}
    fields["placeholder_id"] = faults.need(config, "media_placeholder_token_id", "media_placeholder_token_id")
    sizes = {"mm_hidden_size": vision.get("vt_hidden_size"), "text_hidden_size": text.get("hidden_size")}
    for key, value in {**VISION_FIXED, **sizes}.items():
        if key in vision and vision[key] != value and key != "_attn_implementation":
            faults.contradictory.append(f"vision_config.{key}: expected {value!r}, found {vision[key]!r}")
    inert = {k: v for k, v in vision.items() if k not in VISION and k not in sizes}
    known = {*VISION_FIXED, "model_type"}
    faults.unknown += [f"vision_config.{k}" for k in inert if k not in known and not _is_inert(k)]
    return None if faults.missing else VisionConfig(**fields), inert

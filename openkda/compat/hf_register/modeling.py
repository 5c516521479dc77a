"""Our models as transformers models: loading, saving, generation, training."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from openkda.compat.hf_register.cache import KimiCache, own_cache
from openkda.compat.hf_register.config import KimiK3Config, KimiLinearConfig
from openkda.compat.hf_register.inputs import (
    check_images,
    check_mask,
    check_options,
    documents,
    expand_images,
    packed,
    real_tokens,
)
from openkda.compat.hf_register.loading import checkpoint_directory, load_options
from openkda.compat.hf_register.versions import CACHE
from openkda.layers.packing import unpack
from openkda.models.hybrid import HybridLM
from openkda.models.multimodal import MultimodalLM
from openkda.models.official import from_published_state, load_official, read_config, save_official

# loss (where labels were given), logits [B, T, vocab] (zeros at padding), and the cache under its version's name.
_FIELDS = [(name, Any, field(default=None)) for name in ("loss", "logits", CACHE)]
KimiOutput = make_dataclass("KimiOutput", _FIELDS, bases=(ModelOutput,))


class _KimiModel(PreTrainedModel, GenerationMixin):
    """What both classes share. `self.model` is our own model."""

    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 (transformers compares it with a list)
    _supports_sdpa = True
    _is_stateful = True  # so that assisted generation, which must go back to earlier tokens, is refused
    vision = False
    published_config: type[KimiLinearConfig | KimiK3Config]
    model: HybridLM | MultimodalLM

    def __init__(self, config: Any, model: HybridLM | MultimodalLM | None = None) -> None:
        super().__init__(config)
        architecture = config.official().model
        if model is None:
            model = MultimodalLM(architecture) if self.vision else HybridLM(architecture)
        self.model = model
        self._register_load_state_dict_pre_hook(self._accept_published)
        self.post_init()

    def _accept_published(self, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        """Let `load_state_dict` take tensors under their published names, as a Trainer's checkpoint has them."""
        state.update(from_published_state(state, self.model.state_dict(), prefix, f"{prefix}model."))

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: our modules start themselves, and what was loaded stays as it was."""

    def tie_weights(self, *_: Any, **__: Any) -> None:
        """Nothing: with tied embeddings our model reads its one matrix twice."""

    @property
    def text_model(self) -> HybridLM:
        return self.model.language_model if isinstance(self.model, MultimodalLM) else self.model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.text_model.model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:  # type: ignore[override]
        self.text_model.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.text_model.lm_head

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> nn.Embedding:
        size = self.text_model.config.vocab_size
        if new_num_tokens not in (None, size):
            raise NotImplementedError(f"resizing the vocabulary: expected {size} tokens, received {new_num_tokens}")
        return self.get_input_embeddings()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Our model of a published checkpoint directory (or a repository in the hub's cache), in eval mode.

        dtype: None or "auto" keeps every stored dtype. device_map: one device. Raises: ValueError naming options that have no
        meaning here, and everything that `openkda.models.official.load_official` raises.
        """
        options = load_options(args, kwargs)
        directory = checkpoint_directory(pretrained_model_name_or_path, options)
        config = options.config or cls.published_config.from_pretrained(directory)
        stored = read_config(directory).model
        if config.official().model.replace(packed_experts=stored.packed_experts) != stored:
            raise ValueError(f"{directory}: the config passed differs from the checkpoint's own in its architecture")
        loaded = load_official(directory, vision=cls.vision, dtype=options.dtype, device=options.device)
        model = cls(config, loaded).eval()
        model.name_or_path = str(pretrained_model_name_or_path)
        model.generation_config = options.generation_config(directory, model.generation_config)
        return (model, options.loading_info()) if options.output_loading_info else model

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the published layout to a directory, beside what else is there."""
        refused = sorted(k for k in kwargs if k not in ("safe_serialization", "max_shard_size", "save_peft_format"))
        if refused or kwargs.get("safe_serialization") is False:
            raise ValueError(
                f"save_pretrained: no meaning for {refused or 'safe_serialization=False'} in the published layout"
            )
        if not is_main_process:
            return
        state = None
        if state_dict is not None:
            state = {name.removeprefix("model."): t for name, t in state_dict.items()}
        save_official(self.model, save_directory, config=self.config.official(), overwrite=True, state=state)
        if self.can_generate():
            self.generation_config.save_pretrained(save_directory)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KimiCache | None = None,
        past_key_values: KimiCache | None = None,
        cache_params: KimiCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        generating: bool = False,
        **options: Any,
    ) -> Any:
        """input_ids [B, T] (or inputs_embeds [B, T, D]) -> `KimiOutput`.

        attention_mask: [B, T'] 0/1, padding anywhere; of a T' beyond T the last T columns count. position_ids: there are no
        positions; each 0 within a row starts a new document, as cu_seqlens [N + 1] of a flattened batch says outright.
        pixel_values, grid_thws: patches [L, 3, P, P] and their (t, h, w) [n, 3], one placeholder token an image.
        generating: placeholders without an image may stand there, the model wrote them itself.
        labels: [B, T], -100 = none; shifted inside. logits_to_keep: only the last so many (0: all), or a tensor of positions.
        """
        if output_attentions or output_hidden_states:
            raise ValueError("output_attentions, output_hidden_states: expected False (this model keeps neither)")
        cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        loss_options = check_options(options, position_ids is not None or cu_seqlens is not None)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: expected exactly one of the two")
        positions = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        last = 0 if isinstance(logits_to_keep, Tensor) else int(logits_to_keep)
        if last < 0:
            raise ValueError(f"logits_to_keep: expected 0 or more, or a tensor of positions, received {last}")
        if labels is not None and (last or positions is not None):
            raise ValueError("logits_to_keep: expected 0 with labels, the loss reads all logits")
        cache = own_cache(next((c for c in (cache, past_key_values, cache_params) if c is not None), None))
        tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
        if use_cache is None and cache is None:
            use_cache = not self.training and bool(getattr(self.config, "use_cache", True))
        keep = use_cache is None or bool(use_cache)
        seen = tokens.shape[1]
        if attention_mask is not None:
            check_mask(attention_mask, tokens)
        if pixel_values is None and not generating and (cache is None or cache.seen == 0):
            check_images(input_ids, attention_mask, grid_thws, self.model.config.vision)
        real = real_tokens(attention_mask, tokens)
        bounds = documents(position_ids, tokens, real) if cu_seqlens is None else cu_seqlens
        if pixel_values is not None:
            if bounds is not None:
                raise ValueError(
                    "position_ids, cu_seqlens: expected one document a row beside images, received several"
                )
            tokens, real, labels = self._insert(tokens, attention_mask, labels, pixel_values, grid_thws)
            real = real_tokens(real, tokens)
        logits, state = self._logits(tokens, real, bounds, cache, keep, last)
        if positions is not None:
            logits = logits[:, positions]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **loss_options)
        if keep:
            cache = KimiCache() if cache is None else cache
            cache.state, cache.seen = state, cache.seen + seen
        out = KimiOutput(loss=loss, logits=logits, **{CACHE: cache if keep else None})
        return out.to_tuple() if return_dict is False else out

    def _insert(
        self, ids: Tensor, mask: Tensor | None, labels: Tensor | None, pixels: Tensor, grids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not isinstance(self.model, MultimodalLM):
            raise ValueError("pixel_values: expected a model with a vision tower, this one reads text only")
        if grids is None:
            raise ValueError("grid_thws: expected the (t, h, w) of every image beside pixel_values, received None")
        whole = self.model.insert(
            ids,
            pixels,
            [tuple(g) for g in (grids.tolist() if isinstance(grids, Tensor) else grids)],
            attention_mask=None if mask is None else mask[:, -ids.shape[1] :],
        )
        return whole.embeddings, whole.mask, None if labels is None else whole.labels(labels)

    def _logits(
        self,
        tokens: Tensor,
        real: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: KimiCache | None,
        keep: bool,
        last: int,
    ) -> tuple[Tensor, Any]:
        """real: [B, T], None = all. cu_seqlens: documents of the real tokens laid end to end, None = every row is one."""
        state = None if cache is None else cache.state
        if real is None and (cu_seqlens is None or tokens.shape[0] == 1):
            out = self.text_model(tokens, state=state, cu_seqlens=cu_seqlens, return_state=keep, last_only=last == 1)
            return out.logits[:, -last:], out.state
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if real is None else real
        flat, rows = packed(tokens, mask)
        cu = rows if cu_seqlens is None else cu_seqlens
        out = self.text_model(flat, state=state, cu_seqlens=cu, return_state=keep)
        return unpack(out.logits, mask)[:, -last:], out.state

    def generate(self, *args: Any, **options: Any) -> Any:
        """As every transformers model; what this one does not keep is refused before it starts."""
        config = options.get("generation_config") or self.generation_config
        for name in ("output_attentions", "output_hidden_states"):
            if options.get(name, getattr(config, name, None)):
                raise ValueError(f"{name}: expected False (this model keeps neither)")
        prompt = next((v for v in (*args[:1], options.get("inputs"), options.get("input_ids")) if v is not None), None)
        if options.get("pixel_values") is None and options.get(CACHE) is None:
            check_images(prompt, options.get("attention_mask"), options.get("grid_thws"), self.model.config.vision)
        return super().generate(*args, **options)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that the state has not seen, and images only beside the placeholders that they replace."""
        cache = own_cache(kwargs.get(CACHE))
        seen = 0 if cache is None else cache.seen
        out: dict[str, Any] = {
            CACHE: cache,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "generating": True,
        }
        if inputs_embeds is not None and seen == 0 and input_ids.shape[1] == 0:
            out["inputs_embeds"] = inputs_embeds
        elif inputs_embeds is not None and seen == 0:
            raise ValueError("generate: expected input_ids or inputs_embeds, received both")
        else:
            new = input_ids.shape[1] - seen if inputs_embeds is None else 1
            out["input_ids"] = input_ids[:, -new:] if 0 < new < input_ids.shape[1] else input_ids
        if pixel_values is not None and seen == 0:
            out |= {"pixel_values": pixel_values, "grid_thws": grid_thws}
        if "logits_to_keep" in kwargs:
            out["logits_to_keep"] = kwargs["logits_to_keep"]
        return out

    def _reorder_cache(self, cache: KimiCache, beam_idx: Tensor) -> KimiCache:
        cache.reorder_cache(beam_idx)
        return cache

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes its own

    def _expand_inputs_for_generation(self, expand_size: int = 1, **kwargs: Any) -> Any:  # type: ignore[override]
        """Rows repeated for beams; images go with their rows."""
        pixels, grids = kwargs.pop("pixel_values", None), kwargs.pop("grid_thws", None)
        if pixels is not None and expand_size > 1:
            ids, mask, vision = kwargs["input_ids"], kwargs.get("attention_mask"), self.model.config.vision
            pixels, grids = expand_images(ids, mask, pixels, grids, vision, expand_size)
        ids, out = super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)  # type: ignore[misc]
        if pixels is not None:
            out |= {"pixel_values": pixels, "grid_thws": grids}
        return ids, out


class KimiLinearForCausalLM(_KimiModel):
    """A text model in the layout of Kimi-Linear-48B."""

    config_class = published_config = KimiLinearConfig


class KimiK3ForConditionalGeneration(_KimiModel):
    """Kimi K3: text, images and frame groups."""

    config_class = published_config = KimiK3Config
    vision = True

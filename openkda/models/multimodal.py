"""Kimi K3 with eyes: vision tower, projector, and the text model, image features standing where the placeholder token stood.

    from openkda.models.image import preprocess
    batch = preprocess([picture])
    out = model([[1, 2, placeholder, 3]], batch.patches, batch.grids)

One placeholder token stands for one image and is replaced by all its features, so a row grows by (tokens of its images - their
number). Module names mirror the published checkpoint: `language_model`, `vision_tower`, `mm_projector`.
Source: Kimi K3 report, section 2.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openkda.layers.packing import check_mask
from openkda.layers.parameters import init_weights
from openkda.layers.state import ModelState
from openkda.layers.vision import Grid, Projector, VisionTower
from openkda.models.config import ModelConfig
from openkda.models.hybrid import HybridLM, LMOutput

IGNORE = -100
"""Label of a position without a target."""


@dataclass(frozen=True)
class Inserted:
    """A batch with its images in place: embeddings [B, T', D] (left-padded), mask [B, T'] True = real, and source [B, T']: the
    position in the original row that an entry came from, -1 for image features and padding."""

    embeddings: Tensor
    mask: Tensor
    source: Tensor

    def labels(self, labels: Tensor) -> Tensor:
        """Labels [B, T] of the original rows moved to their new places; -100 at image features and padding."""
        moved = labels.gather(1, self.source.clamp(min=0))
        return torch.where(self.source >= 0, moved, IGNORE)


def insert_features(
    input_ids: Tensor, embeddings: Tensor, features: Sequence[Tensor], placeholder: int, mask: Tensor | None
) -> Inserted:
    """Replace the n-th placeholder token of the batch (row after row) by the n-th image's features.

    Args:
        input_ids: [B, T]. embeddings: [B, T, D] of those ids. features: one [n_i, D] an image. placeholder: its token id.
        mask: [B, T] bool, True = real token, padding anywhere (it comes back on the left); None = all real. A placeholder
            in the padding is none.
    Raises: ValueError where placeholders and images do not match in number.
    """
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    places = (input_ids == placeholder) & real
    if int(places.sum()) != len(features):
        raise ValueError(
            f"placeholder tokens (id {placeholder}): expected {len(features)}, one an image, "
            f"received {int(places.sum())} ({places.sum(1).tolist()} in the rows)"
        )
    waiting = list(features)
    rows, sources = [], []
    for b in range(input_ids.shape[0]):
        kept = real[b].nonzero().flatten()  # the row without its padding
        parts, source, at = [], [], 0
        for place in places[b][kept].nonzero().flatten().tolist():
            image = waiting.pop(0).to(embeddings.dtype)
            parts += [embeddings[b, kept[at:place]], image]
            source += [kept[at:place], kept.new_full((image.shape[0],), -1)]
            at = place + 1
        parts.append(embeddings[b, kept[at:]])
        source.append(kept[at:])
        rows.append(torch.cat(parts))
        sources.append(torch.cat(source))
    width = max(row.shape[0] for row in rows)
    new_mask = torch.stack([torch.arange(width, device=input_ids.device) >= width - row.shape[0] for row in rows])
    padded = [torch.cat([row.new_zeros(width - row.shape[0], row.shape[1]), row]) for row in rows]
    where = [torch.cat([s.new_full((width - s.shape[0],), -1), s]) for s in sources]
    return Inserted(torch.stack(padded), new_mask, torch.stack(where))


class MultimodalLM(nn.Module):
    """The language model with images. `language_model` alone is a complete `HybridLM`; decoding continues on it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vision is None:
            raise ValueError("MultimodalLM: expected a config with `vision`, received one without")
        self.config = config
        self.vision_tower = VisionTower(config.vision)
        self.mm_projector = Projector(config.vision, config.hidden_size)
        self.language_model = HybridLM(config)

    def init_weights(self, seed: int) -> None:
        """Every parameter anew, the same on every device; see `HybridLM.init_weights`."""
        assert self.config.vision is not None
        generator = torch.Generator().manual_seed(seed)
        for part, std in (
            (self.vision_tower, self.config.vision.initializer_range),
            (self.mm_projector, self.config.vision.initializer_range),
            (self.language_model, self.config.initializer_range),
        ):
            init_weights(part, std, generator)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def image_features(self, patches: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """patches [L, 3, P, P] of all items, (t, h, w) of each -> features [(h/2)(w/2), D] of each, in the model's dtype."""
        if not isinstance(patches, Tensor) or not patches.is_floating_point():  # pixels from 0 to 255 would be no error
            got = patches.dtype if isinstance(patches, Tensor) else type(patches).__name__
            raise TypeError(f"patches: expected a float tensor (openkda.models.image.preprocess), received {got}")
        patches = patches.to(self.vision_tower.patch_embed.proj.weight)
        features = self.mm_projector(self.vision_tower(patches, grids))
        area = self.vision_tower.config.merge_kernel[0] * self.vision_tower.config.merge_kernel[1]
        return list(features.split([h * w // area for _, h, w in grids]))

    def insert(
        self,
        input_ids: Tensor,
        patches: Tensor | None,
        grids: Sequence[Grid] = (),
        *,
        attention_mask: Tensor | None = None,
    ) -> Inserted:
        """Embeddings of a batch with its images in place. Arguments as in `forward`."""
        assert self.config.vision is not None
        placeholder, known = self.config.vision.placeholder_id, input_ids
        if placeholder >= self.config.vocab_size and isinstance(input_ids, Tensor):
            known = input_ids.masked_fill(input_ids == placeholder, 0)  # the placeholder has no row of its own
        self.language_model.check_ids(known)
        check_mask(attention_mask, (input_ids.shape[0], input_ids.shape[1]))
        grids = grids.tolist() if isinstance(grids, Tensor) else grids
        features = [] if patches is None else self.image_features(patches, grids)
        embeddings = self.language_model.model.embed_tokens(known)
        return insert_features(input_ids, embeddings, features, placeholder, attention_mask)

    def forward(
        self,
        input_ids: Tensor,
        patches: Tensor | None = None,
        grids: Sequence[Grid] = (),
        *,
        state: ModelState | None = None,
        attention_mask: Tensor | None = None,
        return_state: bool = False,
        last_only: bool = False,
    ) -> LMOutput:
        """input_ids [B, T] with one placeholder an image -> logits [B, T', vocab] over text and image positions.

        patches, grids: of all images in the order of their placeholders, row after row (`openkda.models.image.preprocess`).
        Rows that grow differently are padded on the left (logits 0 there); beside images attention_mask may have padding
        anywhere. The rest as in `HybridLM.forward`.
        Raises: ValueError or TypeError for malformed input, before the text model runs.
        """
        assert self.config.vision is not None
        if patches is None and not len(grids) and not self._has_placeholder(input_ids):
            return self.language_model(
                input_ids, state=state, attention_mask=attention_mask, return_state=return_state, last_only=last_only
            )
        whole = self.insert(input_ids, patches, grids, attention_mask=attention_mask)
        return self.language_model(
            whole.embeddings, state=state, attention_mask=whole.mask, return_state=return_state, last_only=last_only
        )

    def _has_placeholder(self, input_ids: Tensor) -> bool:
        """Of what is no tensor of ids the language model says what is wrong."""
        assert self.config.vision is not None
        if not isinstance(input_ids, Tensor) or input_ids.is_floating_point():
            return False
        return bool((input_ids == self.config.vision.placeholder_id).any())

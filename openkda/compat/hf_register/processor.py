"""Kimi K3's processor: conversations with pictures become input_ids, pixel_values and grid_thws, as the model takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, BatchFeature

from openkda.models.chat import IMAGE_PARTS, Message, image_segments
from openkda.models.image import preprocess


class KimiK3Processor:
    """Tokenizer and image preprocessing of Kimi K3 together; loads and saves with its tokenizer.

    A picture in a conversation is a part {"type": "image", "image": picture}: a Pillow image, or uint8 pixels
    [H, W, 3 or 4] (openkda/models/image.py). This library fetches nothing: a URL or a path is refused.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, directory: str | Path, **options: Any) -> KimiK3Processor:
        options.pop("trust_remote_code", None)
        return cls(AutoTokenizer.from_pretrained(directory, **options))

    def save_pretrained(self, directory: str | Path, **options: Any) -> tuple[str, ...]:
        return self.tokenizer.save_pretrained(directory, **options)

    def __call__(self, images: Sequence[Any] | None = None, text: Any = None, **options: Any) -> BatchFeature:
        """Prompts that contain their placeholder ids already, or plain text; and pictures, in the order of the prompts.

        images: pictures, or lists of up to 4 frames. text: what the tokenizer takes; it gets `options`.
        Text cannot spell a placeholder: prompts with pictures come from `apply_chat_template`.
        """
        if images is None and text is None:
            raise ValueError("processor: expected images, text or both, received neither")
        out = dict(self.tokenizer(text, **options)) if text is not None else {}
        return BatchFeature({**out, **_pixels(images or ())})

    def image_prompt(self, width: int, height: int) -> list[int]:
        """Ids that stand for one picture of that size."""
        return self.tokenizer.ours.encode_segments(image_segments((width, height)))

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool = True, return_dict: bool = True, **options: Any
    ) -> Any:
        """XTML of one conversation or several with their pictures; options as `TikTokenTokenizer.apply_chat_template`."""
        batched = bool(conversation) and not isinstance(conversation[0], dict)
        chats = conversation if batched else [conversation]
        pictures = [_pictures(chat) for chat in chats]
        sizes = [preprocess(p).sizes for p in pictures]
        if not tokenize or not return_dict:
            return self._rendered(chats, sizes, batched, tokenize=tokenize, return_dict=return_dict, **options)
        out = dict(self._rendered(chats, sizes, batched, **options))
        return BatchFeature({**out, **_pixels([p for row in pictures for p in row])})

    def _rendered(self, chats: Any, sizes: list[Any], batched: bool, **options: Any) -> Any:
        if not batched:
            return self.tokenizer.apply_chat_template(chats[0], image_sizes=sizes[0], **options)
        return self.tokenizer.apply_chat_template(chats, image_sizes=sizes, **options)

    def decode(self, *args: Any, **options: Any) -> str:
        return self.tokenizer.decode(*args, **options)

    def batch_decode(self, *args: Any, **options: Any) -> list[str]:
        return self.tokenizer.batch_decode(*args, **options)


def _pictures(chat: Sequence[Message]) -> list[Any]:
    parts = [p for m in chat if not isinstance(m.get("content"), str) for p in m.get("content") or ()]
    found = []
    for part in parts:
        if part.get("type") in IMAGE_PARTS:
            if "image" not in part:
                raise ValueError(f"image part: expected the picture under 'image', received the keys {sorted(part)}")
            found.append(part["image"])
    return found


def _pixels(images: Sequence[Any]) -> dict[str, torch.Tensor]:
    if not images:
        return {}
    batch = preprocess(images)
    return {"pixel_values": batch.patches, "grid_thws": torch.tensor(batch.grids)}

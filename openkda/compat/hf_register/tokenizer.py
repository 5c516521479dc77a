"""The published tokenizer as a transformers tokenizer, with XTML as its chat template.

Text never becomes a special token, in a prompt as little as in a message: only `apply_chat_template` writes special ids.
(The published code does so for chats; in plain text it reads special tokens out of the text.)
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import BatchEncoding, PreTrainedTokenizer
from transformers.utils import get_json_schema

from openkda.models.chat import Message, chat_segments
from openkda.models.tiktoken_file import RANK_FILE, TiktokenTokenizer, load_tiktoken

_NAMED = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}

# What transformers hands to any chat template, mostly as None.
_WITHOUT_MEANING = (
    "chat_template",
    "documents",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "processor_kwargs",
)


class TikTokenTokenizer(PreTrainedTokenizer):
    """Of a directory with `tiktoken.model`; the class has the name that published tokenizer_config.json files give.

    A token is shown as its bytes read as Latin-1, so that every one has a text of its own.
    """

    vocab_files_names = {"vocab_file": RANK_FILE}  # noqa: RUF012 (transformers' own convention)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "left"

    def __init__(self, vocab_file: str | None = None, **options: Any) -> None:
        if vocab_file is None:
            where = options.get("name_or_path") or "the directory"
            raise ValueError(f"tokenizer: expected {RANK_FILE} in {where}, found none")
        self.vocab_file = vocab_file
        self.ours: TiktokenTokenizer = load_tiktoken(vocab_file)
        names = self.ours.special_names()
        self._added_tokens_decoder = {i: AddedToken(name, special=True) for i, name in names.items()}
        for option, name in _NAMED.items():
            if name in names.values():
                options.setdefault(option, name)
        # Without it transformers 5 takes its own class for any saved kimi_linear directory.
        self._auto_map = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
        options.pop("auto_map", None)
        super().__init__(special_tokens_pattern="none", **options)

    @property
    def vocab_size(self) -> int:
        """Without the special tokens, as transformers counts."""
        return self.ours.vocab_size - len(self._added_tokens_decoder)

    def get_vocab(self) -> dict[str, int]:
        return {**self.ours.token_texts(), **self._added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.convert_ids_to_tokens(self.ours.encode(text))

    def tokenize(self, text: str, *args: Any, **kwargs: Any) -> list[str]:
        """Tokens as `TiktokenTokenizer.token_text` shows them; `convert_tokens_to_ids` gives their ids back."""
        return self._tokenize(text)

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.ours.token_texts().get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.ours.token_text(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._decode(self.convert_tokens_to_ids(tokens))

    def _encode_plus(self, text: Any, text_pair: Any = None, *args: Any, **kwargs: Any) -> BatchEncoding:
        if kwargs.get("is_split_into_words"):
            raise ValueError("is_split_into_words: expected False, this tokenizer splits texts itself; received True")
        return super()._encode_plus(self._ids(text), self._ids(text_pair), *args, **kwargs)

    def _ids(self, text: Any) -> Any:
        """Texts replaced by their ids (an empty one stays: transformers takes no empty list)."""
        if isinstance(text, str):
            return self.ours.encode(text) or text
        if isinstance(text, list | tuple):
            return type(text)(self._ids(part) for part in text)
        return text

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, *args: Any, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.ours.decode(ids, special=not skip_special_tokens)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        target = Path(save_directory) / (f"{filename_prefix}-{RANK_FILE}" if filename_prefix else RANK_FILE)
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)

    def apply_chat_template(  # type: ignore[override]
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_tensors: str | None = None,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        thinking_effort: str | None = "max",
        image_sizes: Sequence[Any] | None = None,
        **options: Any,
    ) -> Any:
        """XTML of one conversation or several; see `openkda.models.chat.chat_segments` for messages and `options`.

        tools: dictionaries, or functions with type hints and a docstring. thinking_effort: "max" unless given, as published.
        image_sizes: (width, height) of each picture; of several conversations, one such list each.
        tokenize: False gives text for the eye; encoding that text again would not give these ids.
        """
        for name in _WITHOUT_MEANING:
            if options.pop(name, None):
                raise ValueError(f"apply_chat_template: {name} has no meaning in XTML")
        batched = bool(conversation) and not isinstance(conversation[0], dict)
        conversations: Any = conversation if batched else [conversation]
        declared = [get_json_schema(tool) if callable(tool) else tool for tool in tools or ()]
        options |= {
            "tools": declared,
            "thinking_effort": thinking_effort,
            "add_generation_prompt": add_generation_prompt,
        }
        sizes = image_sizes or [()] * len(conversations) if batched else [image_sizes or ()]
        chats = [
            chat_segments(chat, image_sizes=own, **options) for chat, own in zip(conversations, sizes, strict=True)
        ]
        if not tokenize:
            texts = ["".join(segment.text for segment in chat) for chat in chats]
            return texts if batched else texts[0]
        ids = [self.ours.encode_segments(chat) for chat in chats]
        out = self(
            ids if batched else ids[0],
            add_special_tokens=False,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
        )
        return out if return_dict else out["input_ids"]

"""Loss of a model on text: nats per token, perplexity, bits per byte."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from openkda.models.checkpoint import load_checkpoint
from openkda.models.tokenizer import load_tokenizer
from openkda.training.batches import Batch, need_tokens, pack
from openkda.training.corpus import find_files
from openkda.training.options import choose_device, choose_dtype
from openkda.training.token_file import TokenFile, write_token_file


@dataclass(frozen=True)
class Evaluation:
    """tokens: predictions scored (each document's end counts as one). text_bytes: UTF-8 bytes they stand for."""

    nats: float
    tokens: int
    text_bytes: float

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), per token; inf where float64 ends."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The measure that different tokenizers share."""
        return self.nats / math.log(2) / self.text_bytes


def token_loss(model: nn.Module, batch: Batch, *, dtype: torch.dtype, reduction: str = "mean") -> Tensor:
    """Cross-entropy in float32 of one pack, the model under autocast to `dtype` (none for float32)."""
    device = batch.input_ids.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        nats: Tensor = model(batch.input_ids, cu_seqlens=batch.cu_seqlens, targets=batch.targets).loss
    return nats / batch.targets.numel() if reduction == "mean" else nats


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokens: TokenFile,
    *,
    seq_len: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    pack_tokens: int = 8192,
    max_tokens: int | None = None,
    advance: Callable[[int], None] = lambda scored: None,
) -> Evaluation:
    """Score `tokens` in windows of `seq_len`, each beginning with an empty state.

    max_tokens: score about so many, in windows spread evenly; None scores every token once. `advance` is told the
    number scored so far. The model is left in the mode (training or not) that it came in.
    """
    was_training = model.training
    model.eval()
    nats, scored = 0.0, 0
    try:
        for batch in _windows(tokens, seq_len, pack_tokens, max_tokens):
            nats += float(token_loss(model, batch.to(device), dtype=dtype, reduction="sum"))
            scored += batch.targets.numel()
            advance(scored)
    finally:
        model.train(was_training)
    return Evaluation(nats, scored, tokens.text_bytes * scored / (len(tokens) - 1))


def window_begins(tokens: TokenFile, seq_len: int, max_tokens: int | None) -> NDArray[np.int64]:
    """Where the whole windows begin that `evaluate` scores: all of them, or about max_tokens of text spread evenly."""
    whole = (len(tokens) - 1) // seq_len
    begins = np.arange(whole, dtype=np.int64) * seq_len
    if max_tokens is not None and max_tokens < len(tokens) - 1 and whole:
        count = min(whole, max(1, max_tokens // seq_len))
        begins = begins[np.arange(count, dtype=np.int64) * whole // count]
    return begins


def _windows(tokens: TokenFile, seq_len: int, pack_tokens: int, max_tokens: int | None) -> Iterator[Batch]:
    targets = len(tokens) - 1
    need_tokens(tokens, 2, "one prediction")
    whole = targets // seq_len
    begins = window_begins(tokens, seq_len, max_tokens)
    per_pack = max(1, pack_tokens // seq_len)
    for first in range(0, len(begins), per_pack):
        yield pack(tokens, begins[first : first + per_pack], seq_len)
    rest = targets - whole * seq_len
    if rest and (max_tokens is None or max_tokens >= targets or not whole):
        yield pack(tokens, np.array([whole * seq_len]), rest)


def evaluate_paths(
    checkpoint: str | Path,
    paths: Sequence[str | Path],
    *,
    seq_len: int = 1024,
    device: str = "auto",
    dtype: str = "auto",
    advance: Callable[[int, int], None] = lambda scored, total: None,
) -> Evaluation:
    """Score every token of the text at `paths` with the model and tokenizer of a checkpoint directory.

    Raises what `load_checkpoint`, `load_tokenizer` and `find_files` raise, before any work.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len: expected a positive integer, received {seq_len}")
    where = choose_device(device)
    width = choose_dtype(dtype, where)
    files = find_files(paths)
    tokenizer = load_tokenizer(checkpoint)
    model = load_checkpoint(checkpoint, device=where)
    with tempfile.TemporaryDirectory(prefix="openkda-eval-") as folder:
        tokens = write_token_file(Path(folder) / "text", files, tokenizer)
        return evaluate(
            model,
            tokens,
            seq_len=seq_len,
            device=where,
            dtype=width,
            advance=lambda scored: advance(scored, len(tokens) - 1),
        )

"""The check of `cu_seqlens` [N + 1], the offsets at which packed sequences begin: 0 = first <= ... <= last = T."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from openkda.ops.device.api import has_values


def check_cu_seqlens(cu_seqlens: Tensor | None, batch: int, tokens: int) -> int:
    """Number of sequences N in a [batch, tokens] input: that of the pack, or the batch where `cu_seqlens` is None.

    Empty and one-token sequences are fine. Values are read on the CPU only (on a GPU that would stall the
    stream), and not while torch.compile traces or the tensors are fake.
    Raises: ValueError or TypeError, showing expected and received, where `cu_seqlens` does not fit the input.
    """
    if cu_seqlens is None:
        return batch
    if not isinstance(cu_seqlens, Tensor):
        _bad("", "a torch.Tensor", type(cu_seqlens).__name__, TypeError)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        _bad(".dtype", "int32 or int64", cu_seqlens.dtype, TypeError)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        _bad(".shape", "[N + 1] with N >= 1", list(cu_seqlens.shape))
    if batch != 1:
        _bad(" with a batch", "B = 1 (the pack lies along T)", f"B = {batch}")
    if cu_seqlens.device.type == "cpu" and has_values(cu_seqlens):
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != tokens:
            _bad("", f"first value 0 and last value T = {tokens}", f"{first} and {last}")
        drops = (cu_seqlens.diff() < 0).nonzero()
        if drops.numel():
            i = int(drops[0])
            _bad("", "values that never decrease", f"{int(cu_seqlens[i])} then {int(cu_seqlens[i + 1])} at index {i}")
    return cu_seqlens.numel() - 1


def _bad(what: str, expected: object, received: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"cu_seqlens{what}: expected {expected}, received {received}")

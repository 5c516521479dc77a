"""`cu_seqlens` [N + 1], the offsets at which packed sequences begin, 0 = first <= ... <= last = T: their check, and the longest
sequence of a pack on a GPU, known to the host without waiting for the GPU more often than it must.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

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


_LONGEST = WeakTensorKeyDictionary()
"""(version, longest sequence, whether that was declared) of offsets that were read or came from the host."""


def longest_sequence(cu_seqlens: Tensor, bound: int) -> int:
    """The longest sequence; read once from each tensor, because every reading waits for the GPU, and all layers of a training
    step are given the same one.

    bound: what no sequence can exceed. In the capture of a CUDA graph that is the answer, unless another one was declared: the
    graph would keep today's number, known from an earlier reading, for tomorrow's offsets.
    """
    version, longest, declared = _LONGEST.get(cu_seqlens, (-1, 0, False))
    if declared:
        return longest
    if _is_captured(cu_seqlens):
        return bound
    if cu_seqlens.is_inference():  # whose changes are not counted
        return _read(cu_seqlens)
    if version != cu_seqlens._version:
        longest = _read(cu_seqlens)
        _LONGEST[cu_seqlens] = cu_seqlens._version, longest, False
    return longest


def _is_captured(t: Tensor) -> bool:
    return t.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def declare_longest(cu_seqlens: Tensor, longest: int) -> None:
    """No sequence is longer, whatever its offsets come to be: for those of a CUDA graph, which are asked for in its capture."""
    _LONGEST[cu_seqlens] = -1, longest, True


def move_offsets(cu_seqlens: Tensor, device: torch.device) -> Tensor:
    """Offsets of the host on `device`; `longest_sequence` of them is read here, where it waits for nothing."""
    moved = move(cu_seqlens, device)
    if moved.is_cuda and not moved.is_inference():
        _LONGEST[moved] = moved._version, _read(cu_seqlens), False
    return moved


def move(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`. From memory that is not pinned the copy would wait for all that the GPU has to do."""
    if device.type == "cuda" and t.device.type == "cpu":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


def _read(cu_seqlens: Tensor) -> int:
    longest: list[int] = cu_seqlens.diff().max().view(1).tolist()
    return longest[0]


def _bad(what: str, expected: object, received: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"cu_seqlens{what}: expected {expected}, received {received}")

"""TMA descriptors of repeated launches: encoded once an address, not once a call.

Triton encodes every descriptor of a launch anew, in Python; a Hopper forward has nine to sixteen. The 128 bytes follow from
address, shape, strides and block alone, and allocators give the same addresses again and again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_MOST = 256


class Encoded(dict[int, tuple[Any, ...]]):
    """Address -> what a bare launcher takes in place of one descriptor. about: Triton's metadata of it."""

    def __init__(self, descriptor: Any, about: Any) -> None:
        super().__init__()
        self._shape, self._strides, self._padding = descriptor.shape, descriptor.strides, descriptor.padding
        self._about = about

    def __missing__(self, address: int) -> tuple[Any, ...]:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        base = SimpleNamespace(data_ptr=lambda: address)
        whole = SimpleNamespace(base=base, shape=self._shape, strides=self._strides, padding=self._padding)
        if len(self) >= _MOST:
            self.clear()
        found = self[address] = tuple(make_tensordesc_arg(whole, self._about))
        return found


def about_descriptors(ready: Any) -> tuple[Any, ...]:
    """Triton's metadata of a compiled kernel's descriptors."""
    return tuple(getattr(ready.metadata, "tensordesc_meta", None) or ())


def bare_launcher(ready: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """(the compiled launcher behind the function that encodes descriptors, its flags between function and metadata); None where
    this Triton has none, or where the kernel needs scratch memory of Triton's own."""
    run = ready.run
    inside = getattr(getattr(run, "launch", None), "__closure__", None)
    if inside is None or run.global_scratch_size or run.profile_scratch_size:
        return None
    cells = dict(zip(run.launch.__code__.co_freevars, inside, strict=True))
    if "launcher" not in cells:
        return None
    return cells["launcher"].cell_contents, (run.launch_cooperative_grid, run.launch_pdl, None, None)

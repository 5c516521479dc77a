"""Compiling ahead: the first call of a kind compiles, in threads, what calls of the kind will need at other sizes.

Sizes decide between kernels: token by token or in chunks, Hopper's schedules. Nobody should meet the compiler at the
thousandth request. While planning, host code only notes what it would launch; what is compiled is the same for every size.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton.runtime import driver

from openkda.ops.device.api import on_device

log = logging.getLogger("openkda.ops.triton")

ENABLED = os.environ.get("OPENKDA_COMPILE_AHEAD", "1") != "0"
"""Off, every kernel is compiled when first launched: for tests, which make few calls of many kinds."""
ANY_DEVICE = False
"""For tests of the host side on a CPU."""


class _Planning(threading.local):
    jobs: dict[Hashable, Callable[[], Any]] | None = None


planning = _Planning()
_seen: set[Hashable] = set()
_lock = threading.Lock()


def first_of_kind(kind: Hashable, device: torch.device) -> bool:
    """Whether this is the first call of its kind, and what others of the kind need is to be compiled now."""
    if kind in _seen or planning.jobs is not None or not ENABLED or not (device.type == "cuda" or ANY_DEVICE):
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # loading a binary would break the capture
        return False
    with _lock:
        fresh = kind not in _seen
        _seen.add(kind)
    return fresh


def compile_ahead(device: torch.device, *plans: Callable[[], object]) -> None:
    """Compiles every kernel that the plans would launch. A compilation is half Python, half code outside of the interpreter's
    lock. What fails here is not needed yet: it is logged, and raises when it is launched."""
    jobs: dict[Hashable, Callable[[], Any]] = {}
    planning.jobs = jobs
    try:
        with on_device(device):
            for plan in plans:
                plan()
    finally:
        planning.jobs = None

    def run(job: Callable[[], Any]) -> None:
        with on_device(device):
            job()

    with ThreadPoolExecutor(max(1, min(len(jobs), os.cpu_count() or 1))) as threads:
        for done in [threads.submit(run, job) for job in jobs.values()]:
            if (failed := done.exception()) is not None:
                log.warning("a kernel for other sizes does not compile: %s", failed)


def plan(key: Hashable, kernel: Any, arguments: tuple[Any, ...], **options: int) -> None:
    """Inside `compile_ahead`, in place of a launch of `kernel` with these arguments. key: one for each specialisation."""
    assert planning.jobs is not None
    kernel.device_caches[driver.active.get_current_device()], kernel.cache_key

    def job() -> None:  # the two above are made before there are threads
        made = kernel.warmup(*arguments, grid=(1,), **options)
        if made is not None:
            made.run  # noqa: B018 (compiles the launcher, a C file, and loads the binary)

    planning.jobs.setdefault(key, job)

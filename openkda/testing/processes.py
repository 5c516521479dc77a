"""Test workers in processes of their own, with an end: a collective that waits for ever fails its test, not the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def run_processes(worker: Callable[..., None], world: int, *arguments: Any, seconds: float = 90.0) -> None:
    """worker(rank, world, *arguments) in `world` spawned processes. Raises what one of them raises, or AssertionError
    after `seconds`, when all are killed."""
    context = mp.start_processes(worker, (world, *arguments), nprocs=world, join=False, start_method="spawn")
    assert context is not None  # for the type checker: it is None with join=True only
    end = time.monotonic() + seconds
    while not context.join(timeout=1.0):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            raise AssertionError(f"{worker.__name__}: still running after {seconds:.0f} s")

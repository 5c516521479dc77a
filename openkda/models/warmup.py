"""Compiling a model's GPU kernels before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from openkda.layers.kda import KimiDeltaAttention
from openkda.layers.norm import RMSNorm
from openkda.layers.state import KDAState
from openkda.models.config import ModelConfig

TOKENS = 24  # more than one chunk; no kernel is specialised on a length


def warmup(
    config: ModelConfig, *, device: str | torch.device = "cuda", dtype: torch.dtype = torch.bfloat16
) -> list[tuple[str, float]]:
    """Compile every kernel that inference with `config` in `dtype` can ask for: prefill, continued, packed, decoding.

    Runs one KDA layer of the config's head sizes with a hidden size of 64, so it costs memory for one layer's state only.
    Compiled kernels land in Triton's cache folder (TRITON_CACHE_DIR) and serve later processes too.
    Returns: (step, seconds) in order. Raises: ValueError without a CUDA device.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError("warmup: expected a CUDA device, found none (a CPU compiles nothing)")
    small = replace(config, hidden_size=64)
    layer = KimiDeltaAttention(small, 0).to(device=device, dtype=dtype).eval()
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps).to(device=device, dtype=dtype)
    x = torch.randn(1, TOKENS, 64, device=device, dtype=dtype)
    cu = torch.tensor([0, 5, TOKENS], device=device)
    states: dict[str, KDAState] = {}

    def prefill(name: str, state: str | None, packed: bool, keep: bool) -> None:
        old = None if state is None else states[state]
        _, new = layer(x, state=old, cu_seqlens=cu if packed else None, return_state=keep)
        if new is not None:
            states[name] = new

    steps: list[tuple[str, Callable[[], object]]] = [
        ("prefill", lambda: prefill("one", None, False, True)),
        ("prefill without a state out", lambda: prefill("", None, False, False)),
        ("continued prefill", lambda: prefill("", "one", False, True)),
        ("packed prefill", lambda: prefill("two", None, True, True)),
        ("continued packed prefill", lambda: prefill("", "two", True, True)),
        ("decoding", lambda: layer(x[:, :1], state=states["one"], return_state=True)),
        ("norms", lambda: norm(torch.randn(1, TOKENS, config.hidden_size, device=device, dtype=dtype))),
    ]
    taken = []
    with torch.inference_mode():
        for name, step in steps:
            start = time.perf_counter()
            step()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()
            taken.append((name, time.perf_counter() - start))
    return taken

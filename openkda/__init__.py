"""openkda: Kimi Delta Attention, Gated MLA, and the model around them.

    from openkda import kda, kda_step, BoundedGate, SoftplusGate    # the op: whole sequences, one token, the two gates
    from openkda import KimiDeltaAttention, GatedMLA                # the layers
    from openkda import ModelConfig, PRESETS, HybridLM              # the model, its config and named sizes

Beside them: `openkda.compat.hf` (transformers), `openkda.compat.fla` (fla's functions), `openkda.generation`,
`openkda.training`, and the command line, `python -m openkda`. Which page answers what: README.md, "Pages".

Names are imported when first used, so that `import openkda` costs nothing beyond torch.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOME = {
    "kda": "openkda.ops.kda.api",
    "kda_step": "openkda.ops.kda.api",
    "KDAOutput": "openkda.ops.kda.api",
    "BoundedGate": "openkda.ops.kda.gate",
    "SoftplusGate": "openkda.ops.kda.gate",
    "KimiDeltaAttention": "openkda.layers.kda",
    "GatedMLA": "openkda.layers.mla",
    "ModelConfig": "openkda.models.config",
    "PRESETS": "openkda.models.presets",
    "HybridLM": "openkda.models.hybrid",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'openkda' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

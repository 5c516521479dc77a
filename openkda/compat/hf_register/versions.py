"""What differs between the supported versions of transformers (5.17 to below 6)."""

from __future__ import annotations

import inspect
import re

import transformers
from transformers import GenerationMixin

# Renamed from `past_key_values` between 5.17 and 5.24.
CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


def check() -> None:
    """Raise ImportError for a transformers that is not supported."""
    found = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    if found is None or not (5, 17) <= (int(found[1]), int(found[2])) < (6, 0):
        raise ImportError(f"openkda needs transformers 5.17 or later, below 6; found {transformers.__version__}")

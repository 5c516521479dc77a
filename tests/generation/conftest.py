"""One small random model for all tests here, in float64: results that must be equal are, to 1e-10."""

from __future__ import annotations

import pytest
import torch

from openkda.models.hybrid import HybridLM
from openkda.models.presets import PRESETS


@pytest.fixture(scope="session")
def model() -> HybridLM:
    model = HybridLM(PRESETS["tiny"].replace(vocab_size=300, initializer_range=0.2))
    model.init_weights(0)
    return model.double().eval()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (n,), generator=rng).tolist() for n in (70, 1, 3, 131, 16)]

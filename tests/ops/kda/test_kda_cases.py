"""Chunkwise against the token loop on the whole shared case list: output, final state, every gradient.

One float64 loop a case serves both precisions; the float32 run gets the same (float32) inputs, so nothing but its own
arithmetic counts as error.
"""

from __future__ import annotations

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from openkda.ops.kda import api
from openkda.testing.cases import KDACase, kda_cases
from openkda.testing.runs import check_errors, gradients

typed_kda = jaxtyped(typechecker=beartype)(api.kda)  # the signature's shapes, checked on every case


@pytest.mark.parametrize("case", kda_cases(), ids=lambda c: c.id)
def test_chunkwise_equals_loop(case: KDACase) -> None:
    x = case.inputs()
    x64 = x.to(dtype=torch.float64)
    want = gradients(x64, typed_kda, impl="reference")
    check_errors(gradients(x64, typed_kda, impl="chunkwise"), want, 1e-10)
    check_errors(gradients(x, typed_kda, impl="chunkwise"), want, 2e-5, 1e-4)

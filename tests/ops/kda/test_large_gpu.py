"""Calls of more than 2^31 elements a tensor on a GPU: their last tokens are those of a short call from the state there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from openkda.ops.kda.api import BoundedGate, SoftplusGate, kda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HEADS, TOKENS, PIECES = 96, 180_224, 4
GIB = 50
"""Of free memory: four inputs of 4.1, outputs of as much, a workspace of up to 14."""


@pytest.fixture
def tokens() -> list[Tensor]:
    if torch.cuda.mem_get_info()[0] < GIB << 30:
        pytest.skip(f"needs {GIB} GiB of free memory")
    shape = (1, TOKENS, HEADS, 128)
    made = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(4)]
    return [*made, torch.randn(*shape[:3], dtype=torch.bfloat16, device="cuda")]


@pytest.mark.parametrize("impl, gate", [(None, "bounded"), (None, "softplus"), ("triton", "bounded")])
def test_the_last_tokens_are_those_of_a_short_call(tokens: list[Tensor], impl: str | None, gate: str) -> None:
    """To the bit: pieces begin where chunks do, and states between them are float32 either way. Rows of a batch and members of
    a pack, which lie as far behind, too."""
    A_log, dt_bias = torch.linspace(-1, 1, HEADS, device="cuda"), torch.randn(HEADS, 128, device="cuda")
    options: dict[str, Any] = {
        "gate": BoundedGate(-5.0, A_log, dt_bias) if gate == "bounded" else SoftplusGate(A_log, dt_bias),
        "use_qk_l2norm": True, "use_beta_sigmoid": True, "output_final_state": True, "impl": impl,
    }  # fmt: skip
    state = None
    with torch.inference_mode():
        for part in zip(*(t.split(TOKENS // PIECES, 1) for t in tokens), strict=True):
            last = kda(*(t.clone() for t in part), initial_state=state, **options)
            state = last.final_state
        whole = kda(*tokens, **options)
        assert torch.equal(whole.output[:, -last.output.shape[1] :], last.output)
        assert whole.final_state is not None and last.final_state is not None
        assert torch.equal(whole.final_state, last.final_state)
        del whole, last
        rows = [t.view(PIECES, -1, *t.shape[2:]) for t in tokens]
        ends = torch.arange(0, TOKENS + 1, TOKENS // PIECES, device="cuda")
        alone = kda(*(t[-1:].clone() for t in rows), **options)
        for pack in (False, True):
            found = kda(*tokens, cu_seqlens=ends, **options) if pack else kda(*rows, **options)
            assert found.final_state is not None and alone.final_state is not None
            close = torch.testing.assert_close  # another schedule may have taken them
            close(found.output.view(rows[2].shape)[-1:], alone.output, rtol=2e-2, atol=2e-3)
            close(found.final_state[-1:], alone.final_state, rtol=1e-2, atol=1e-3)
            del found

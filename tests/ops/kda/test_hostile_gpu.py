"""The checks of `hostile_checks.py` on a GPU, through the portable kernels by name and, where Hopper has others, the choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import hostile_checks as checks
from hostile_checks import BF16, F16, F32

from openkda.ops.kda.api import BoundedGate, kda
from openkda.testing.compare import check_close
from openkda.testing.inputs import make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("impl", ["triton", None])
@pytest.mark.parametrize(
    "check",
    [checks.check_lengths, checks.check_saturated_bound, checks.check_surroundings, checks.check_options],
    ids=lambda f: f.__name__,
)
def test_forward(check: Any, impl: str | None) -> None:
    check("cuda", BF16, impl)


@pytest.mark.parametrize(
    "check, dtype",
    [
        (checks.check_forgetting, BF16), (checks.check_forgetting, F32), (checks.check_nothing_to_do, BF16),
        (checks.check_rows_of_zeros, BF16), (checks.check_dirty_memory, BF16), (checks.check_dirty_memory, F32),
        (checks.check_pools, BF16), (checks.check_many_tokens, BF16), (checks.check_many_tokens, F32),
        (checks.check_absurd_counts, F32), (checks.check_tiny_gradients, BF16), (checks.check_tiny_gradients, F16),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)  # fmt: skip
def test_law(check: Any, dtype: torch.dtype) -> None:
    check("cuda", dtype)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_training_on_dirty_memory(gate: str) -> None:
    checks.check_dirty_memory_of_training("cuda", BF16, gate)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_layouts(gate: str) -> None:
    checks.check_layouts("cuda", BF16, gate)


def test_strong_decay() -> None:
    checks.check_strong_decay("cuda", BF16)


def test_no_decay() -> None:
    checks.check_no_decay("cuda")


def test_many_heads() -> None:
    checks.check_many_heads("cuda", BF16)


def test_rows_too_long_to_square_are_refused_where_values_are_checked() -> None:
    """The kernels take them for 0 (on a CPU they are exact): whoever asks for the check hears of it."""
    x = checks.published(40, "cuda", T=40)
    x.options["check_inputs"] = True
    checks.run(x)
    for name in ("q", "k"):
        y = x.to()
        getattr(y, name)[0, 3, 1] *= 1e25
        with pytest.raises(ValueError, match=f"{name}: expected rows shorter than"):
            checks.run(y)


def test_whole_numbers_are_no_constants() -> None:
    """scale=1 and a bound of -5, as integers, before any other call of the form; then other numbers, by the same binaries."""
    x = make_inputs(0, T=40, H=5, K=64, use_qk_l2norm=True, use_beta_sigmoid=True, unit_keys=False)
    x = x.to(dtype=torch.bfloat16, device="cuda")
    options: dict[str, Any] = {"use_qk_l2norm": True, "use_beta_sigmoid": True}
    for scale, bound in ((1, -5), (0.25, -2.5), (1.0, -5.0)):
        for _ in range(4):
            with torch.no_grad():
                got, want = (
                    kda(x.q, x.k, x.v, x.g, x.beta, gate=BoundedGate(bound), scale=scale, impl=impl, **options).output
                    for impl in ("triton", "reference")
                )
            check_close(f"scale {scale}, bound {bound}", got, want, 5e-3)

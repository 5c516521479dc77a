"""The kernels' gradients on a CPU, in Triton's interpreter and float32."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from interpreter import INTERPRETED, patch_interpreter, run_interpreted

if INTERPRETED:
    patch_interpreter()
    import backward_checks as checks
    from backward_checks import F32

    from openkda.testing.cases import kda_cases

    SMALL = [c for c in kda_cases() if max(c.K, c.V) <= 32 and c.T <= 64 and c.lengths is None]
    PACKS = [c for c in kda_cases() if c.lengths in ((0, 0, 5), (1, 1, 1, 1), (1,)) and max(c.K, c.V) <= 64]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_gradients_in_the_interpreter() -> None:
    run_interpreted(__file__)


if INTERPRETED:

    @pytest.mark.parametrize("case", SMALL[::5] + PACKS, ids=lambda c: c.id)
    def test_case(case: checks.KDACase) -> None:
        checks.check_case(case, "cpu", F32)

    @pytest.mark.parametrize(
        "check",
        [
            checks.check_packs, checks.check_upstream, checks.check_one_end, checks.check_extreme_gates,
            checks.check_refusals,
        ],
        ids=lambda f: f.__name__,
    )  # fmt: skip
    def test_law(check: checks.Any) -> None:
        check("cpu", F32)

    def test_future() -> None:
        checks.check_future("cpu", F32, T=18, prefixes=(7,), futures=checks.FUTURES[::3])

    def test_repeats() -> None:
        checks.check_repeats("cpu", F32, T=18, K=16)

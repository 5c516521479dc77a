"""Several threads of torch: the same numbers, the same run twice, nothing left changed, segments that stay small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from openkda.ops.kda.api import kda
from openkda.ops.kda.chunkwise.plan import make_plan
from openkda.testing.inputs import KDAInputs, make_inputs
from openkda.testing.runs import check_errors, gradients, outputs


@pytest.fixture(autouse=True)
def thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def cases() -> list[KDAInputs]:
    return [
        make_inputs(1, T=600, H=4, K=64, gate="softplus", use_qk_l2norm=True),
        make_inputs(2, T=700, H=3, HV=6, K=32, V=16),
        make_inputs(3, B=9, T=130, H=1, HV=2, K=64, gate=None),
        make_inputs(4, lengths=(300, 0, 1, 64, 64, 64, 300, 17), H=2, K=96),
    ]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_any_number_of_threads_gives_the_same(index: int, threads: int) -> None:
    x = cases()[index]
    torch.set_num_threads(1)
    want = gradients(x)
    torch.set_num_threads(threads)
    got, again = gradients(x), gradients(x)
    assert torch.get_num_threads() == threads
    check_errors(got, want, 2e-6, 1e-5)
    assert all(torch.equal(got[n], again[n]) for n in got)


def test_segments_grow_with_threads_but_not_beyond_half_of_the_call() -> None:
    spans, token_bytes = [(0, 8192)], 1 << 11
    sizes = []
    for threads in (1, 2, 64):
        torch.set_num_threads(threads)
        (block,) = make_plan(spans, token_bytes)
        sizes.append(block.step * block.chunk * token_bytes)
    assert sizes == [1 << 19, 1 << 20, 1 << 23]


def test_published_parameter_shapes() -> None:
    """A_log as [1, 1, HV, 1] and dt_bias as one row, with gradients in the same shapes."""
    torch.set_num_threads(2)
    x = make_inputs(5, T=600, H=4, K=64)
    want = gradients(x)
    x.gate.__dict__["A_log"], x.gate.__dict__["dt_bias"] = x.gate.A_log.view(1, 1, 4, 1), x.gate.dt_bias.view(-1)
    got = gradients(x)
    assert torch.equal(got["dA_log"].flatten(), want["dA_log"])
    assert torch.equal(got["ddt_bias"].view(4, 64), want["ddt_bias"])
    assert got["dA_log"].shape == (1, 1, 4, 1)


def test_inference_mode() -> None:
    torch.set_num_threads(2)
    x = make_inputs(6, T=600, H=4, K=64)
    want = outputs(x)
    with torch.inference_mode():
        got = kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs())
    assert torch.equal(got.output, want["o"])
    assert torch.equal(got.final_state, want["S"])

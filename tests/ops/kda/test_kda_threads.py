"""Several threads of torch: heads and sequences side by side, the same numbers, the same run twice, nothing left changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from openkda.ops.kda.api import kda
from openkda.ops.kda.chunkwise import parts
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
    assert x.g.numel() >= parts.SERIAL_BELOW
    torch.set_num_threads(1)
    want = gradients(x)
    torch.set_num_threads(threads)
    got, again = gradients(x), gradients(x)
    assert torch.get_num_threads() == threads
    check_errors(got, want, 2e-6, 1e-5)
    assert all(torch.equal(got[n], again[n]) for n in got)


def test_work_is_split_by_heads_then_by_sequences() -> None:
    x, y = make_inputs(1, T=600, H=4, K=64), make_inputs(1, B=8, T=64, H=1, K=256)
    torch.set_num_threads(3)
    for z, spans, count in ((x, [(0, 600)], 3), (y, [(64 * b, 64 * b + 64) for b in range(8)], 3)):
        t = parts.Tokens(*(v.flatten(0, 1) for v in (z.q, z.k, z.v, z.g, z.beta)), None, None)
        made = parts.make_parts(spans, t, 4)
        assert len(made) == count
        covered = [(n, h) for p in made for n in p.block.sequences for h in range(*p.heads.indices(z.q.shape[2]))]
        assert sorted(covered) == [(n, h) for n in range(len(spans)) for h in range(z.q.shape[2])]


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


def test_a_failure_in_any_part_comes_out_and_the_thread_count_is_back() -> None:
    torch.set_num_threads(3)

    def good() -> int:
        return 1

    def bad() -> int:
        raise RuntimeError("this part failed")

    with pytest.raises(RuntimeError, match="this part failed"):
        parts.run_parts([good, bad, good, good], torch.zeros(1))
    assert torch.get_num_threads() == 3
    assert parts.run_parts([good] * 5, torch.zeros(1)) == [1] * 5

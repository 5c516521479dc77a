"""fla-core's functions on a GPU: `use_graph`'s promise, that a captured call follows the contents of cu_seqlens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from openkda.compat import fla
from openkda.testing.inputs import make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
T, MOST = 96, 4
PACKS = ([0, 30, 70, 70, 70], [0, 10, 20, 90, 96], [0, 96, 96, 96, 96], [0, 1, 2, 3, 4])
"""Padded with members of no tokens; rows behind the last are of nobody, and undefined."""


@pytest.mark.parametrize("K, bound", [(128, -5.0), (32, None)])  # Hopper's forward, and the portable one
def test_a_captured_step_follows_the_lengths(K: int, bound: float | None) -> None:
    kind = "softplus" if bound is None else "bounded"
    x = make_inputs(
        3, lengths=(T, 0, 0, 0), H=2, K=K, gate=kind, use_qk_l2norm=True, use_beta_sigmoid=True, unit_keys=False
    ).to(dtype=torch.bfloat16, device="cuda")
    x.requires_grad_()
    leaves = x.tensors()
    cu = torch.tensor(PACKS[0], device="cuda")

    def step(cu: Tensor) -> list[Tensor]:
        o, S = fla.chunk_kda(
            x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, output_final_state=True, cu_seqlens=cu,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=bound,
            A_log=leaves["A_log"], dt_bias=leaves["dt_bias"], use_graph=True, max_num_seqs=MOST,
        )  # fmt: skip
        return [o, S, *torch.autograd.grad([o, S], list(leaves.values()), [x.do, x.dS])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # looked at, recorded, repeated
            step(cu)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(cu)
    names = ("o", "S", *leaves)
    for lengths in PACKS:
        cu.copy_(torch.tensor(lengths))
        graph.replay()
        for name, a, b in zip(names, captured, step(cu.clone()), strict=True):
            if name not in ("S", "initial_state", "A_log", "dt_bias"):
                a, b = a[:, : lengths[-1]], b[:, : lengths[-1]]
            assert torch.equal(a, b), f"{name} of {lengths}"
            assert bool(a.isfinite().all()), f"{name} of {lengths}"

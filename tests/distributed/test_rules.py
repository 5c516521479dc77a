"""`openkda.kda` on DTensors of two gloo processes: sharded batch, sharded heads, packs; the numbers of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from openkda.distributed import register_kda_rules
from openkda.ops.kda.api import kda
from openkda.testing.compare import rel
from openkda.testing.inputs import KDAInputs, make_inputs

TOKENS = ("q", "k", "v", "g", "beta")
CASES: dict[str, tuple[dict[str, Any], tuple[Placement, Placement, Placement]]] = {  # of tokens, states, the gate
    "batch": ({"B": 2}, (Shard(0), Shard(0), Replicate())),
    "heads": ({"B": 1, "H": 2, "HV": 4}, (Shard(2), Shard(1), Shard(0))),
    "heads of a pack": ({"lengths": (5, 0, 4), "H": 2, "HV": 2}, (Shard(2), Shard(1), Shard(0))),
    "no state, no gate": ({"B": 2, "initial_state": False, "gate": None}, (Shard(0), Shard(0), Replicate())),
    "odd batch": ({"B": 3}, (Shard(0), Shard(0), Replicate())),  # gathered, not wrong
}


def run(x: KDAInputs, do: Tensor, dS: Tensor, cu: Tensor | None) -> tuple[list[Tensor], list[str]]:
    out = kda(x.q, x.k, x.v, x.g, x.beta, **(x.kwargs() | {"cu_seqlens": cu}))
    assert out.final_state is not None
    named = x.tensors()
    grads = torch.autograd.grad([out.output, out.final_state], list(named.values()), [do, dS])
    return [out.output.detach(), out.final_state.detach(), *grads], ["o", "S", *named]


def spread(x: KDAInputs, mesh: DeviceMesh, where: tuple[Placement, Placement, Placement]) -> KDAInputs:
    tokens, states, gate = where

    def put(t: Tensor | None, p: Placement) -> Any:
        return None if t is None else distribute_tensor(t.detach(), mesh, [p]).requires_grad_()

    g = x.gate if x.gate is None else replace(x.gate, A_log=put(x.gate.A_log, gate), dt_bias=put(x.gate.dt_bias, gate))
    return replace(
        x, **{n: put(getattr(x, n), tokens) for n in TOKENS}, gate=g, initial_state=put(x.initial_state, states)
    )


def worker(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    register_kda_rules()
    register_kda_rules()
    found = {}
    for name, (sizes, where) in CASES.items():
        x = make_inputs(0, **({"T": 9, "K": 8} | sizes)).requires_grad_()
        cu = x.options.get("cu_seqlens")
        want, names = run(x, x.do, x.dS, cu)
        y = spread(x, mesh, where)
        do, dS = (distribute_tensor(t, mesh, [p]) for t, p in ((x.do, where[0]), (x.dS, where[1])))
        got, _ = run(y, do, dS, None if cu is None else distribute_tensor(cu, mesh, [Replicate()]))
        full, placements = [], []
        for t in got:
            assert isinstance(t, DTensor)
            full.append(t.full_tensor())
            placements.append(str(t.placements[0]))
        found[name] = {n: (rel(a, b), p) for n, a, b, p in zip(names, full, want, placements, strict=True)}
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


def test_sharded_calls_equal_whole_ones(tmp_path: Path) -> None:
    mp.start_processes(worker, (str(tmp_path / "store"), str(tmp_path / "results")), nprocs=2, start_method="spawn")
    found = torch.load(tmp_path / "results", weights_only=False)
    assert found.keys() == CASES.keys()
    for name, results in found.items():
        for n, (error, _) in results.items():
            assert error < 1e-5, f"{name}: {n}"
    assert found["batch"]["o"][1] == found["batch"]["q"][1] == "S(0)" and found["batch"]["A_log"][1].startswith("P")
    assert (
        found["heads"]["o"][1] == "S(2)" and found["heads"]["S"][1] == "S(1)" and found["heads"]["dt_bias"][1] == "S(0)"
    )
    assert found["heads of a pack"]["o"][1] == "S(2)"
    assert found["odd batch"]["o"][1] == "R"

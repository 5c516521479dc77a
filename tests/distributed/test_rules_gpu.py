"""`openkda.kda` on DTensors with the kernels: one process for each GPU there is (two at most), the numbers of plain tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_rules import CASES, run, spread
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from openkda.distributed import register_kda_rules
from openkda.testing.compare import rel
from openkda.testing.inputs import make_inputs
from openkda.testing.processes import run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


SIZES = {"T": 9, "K": 16, "H": 2, "HV": 4}
"""Of every case: other ones would be kernels of their own, seven a case, which take longer to compile than the test to run."""
NAMES = {torch.bfloat16: tuple(CASES), torch.float32: ("batch",)}
"""The rules see no dtype; float32 is there for its limit, where the parameters' gradients are sums over processes."""


def worker(rank: int, world: int, store: str, results: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cuda", (world,))
    register_kda_rules()
    found = {}
    for dtype, names_of_cases in NAMES.items():
        for name in names_of_cases:
            sizes, where = CASES[name]
            x = make_inputs(0, **(sizes | SIZES)).to(dtype=dtype, device="cuda").requires_grad_()
            cu = x.options.get("cu_seqlens")
            want, names = run(x, x.do, x.dS, cu)
            y = spread(x, mesh, where)
            do, dS = (distribute_tensor(t, mesh, [p]) for t, p in ((x.do, where[0]), (x.dS, where[1])))
            got, _ = run(y, do, dS, None if cu is None else distribute_tensor(cu, mesh, [Replicate()]))
            assert all(isinstance(t, DTensor) for t in got)
            full = [t.full_tensor() for t in got if isinstance(t, DTensor)]
            found[f"{name}, {dtype}"] = {n: rel(a, b) for n, a, b in zip(names, full, want, strict=True)}
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


def test_sharded_calls_equal_whole_ones(tmp_path: Path) -> None:
    world = min(2, torch.cuda.device_count())
    run_processes(worker, world, str(tmp_path / "store"), str(tmp_path / "results"))
    found = torch.load(tmp_path / "results", weights_only=False)
    assert len(found) == sum(map(len, NAMES.values()))
    for name, errors in found.items():
        limit = 1e-5 if "float32" in name else 1e-2  # partial sums of A_log and dt_bias, rounded once more
        assert all(e < limit for e in errors.values()), f"{name}: {errors}"

"""FSDP2 with the kernels: one process for each GPU there is (two at most), against one process without sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_sharding import FLOAT32, batch, build, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from openkda.testing.processes import run_processes
from openkda.training.sharding import shard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def worker(rank: int, world: int, store: str, results: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cuda", (world,))
    rows = batch().cuda().chunk(world)[rank]
    found: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        model = shard(build().cuda(), mesh, dtype=dtype)
        total = torch.tensor(train(model, rows), device="cuda")
        dist.all_reduce(total)
        sharded = all(isinstance(p, DTensor) for p in model.parameters())
        found[name] = (total.cpu() / world, sharded, {n: p.dtype for n, p in model.named_parameters()})
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where, world = tmp_path_factory.mktemp("fsdp"), min(2, torch.cuda.device_count())
    run_processes(worker, world, str(where / "store"), str(where / "results"))
    result: dict[str, Any] = torch.load(Path(where / "results"), weights_only=False)
    return result


@pytest.mark.parametrize("name, limit", [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_sharded_steps_are_those_of_one_process(found: dict[str, Any], name: str, limit: float) -> None:
    losses = train(build().cuda(), batch().cuda())
    total, sharded, kept = found[name]
    assert sharded and losses[2] < losses[0] and total[2] < total[0]
    assert torch.allclose(total, torch.tensor(losses), rtol=limit)
    assert all(dtype == torch.float32 for n, dtype in kept.items() if n.endswith(FLOAT32))

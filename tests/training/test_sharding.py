"""FSDP2 over two gloo processes, from a checkpoint: the same steps as one process, and float32 where it must be."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from openkda.models.checkpoint import save_checkpoint
from openkda.models.hybrid import HybridLM
from openkda.models.presets import PRESETS
from openkda.testing.compare import rel
from openkda.training.sharding import shard
from openkda.training.start import load_weights

CONFIG = PRESETS["tiny"].replace(
    hidden_size=32, num_hidden_layers=2, intermediate_size=48, kda_layers=(1,), full_attn_layers=(2,), vocab_size=64
)
FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight")


def build() -> HybridLM:
    model = HybridLM(CONFIG)
    model.init_weights(0)
    return model


def batch() -> Tensor:
    return torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, ids: Tensor, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(ids[:, :-1], targets=ids[:, 1:]).loss / ids[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def worker(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}
    for name, dtype, masters in (
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.float32),
        ("bfloat16 shards", torch.bfloat16, torch.bfloat16),
    ):
        model = load_weights(Path(results).parent / "model").to(masters)
        seen: dict[str, torch.dtype] = {}
        for n, _ in model.named_parameters():
            reader = n.rpartition(".")[0]
            if "conv1d" in n:  # the KDA layer reads these itself
                reader = reader.rpartition(".")[0]
            model.get_submodule(reader).register_forward_pre_hook(_see(seen, n, n.removeprefix(reader + ".")))
        shard(model, mesh, dtype=dtype)
        losses = train(model, batch()[2 * rank : 2 * rank + 2])
        total = torch.tensor(losses)
        dist.all_reduce(total)
        kept = {n: p.dtype for n, p in model.named_parameters()}
        sharded = all(isinstance(p, DTensor) for p in model.parameters())
        full = {n: p.full_tensor().detach() for n, p in model.named_parameters() if isinstance(p, DTensor)}
        found[name] = (total / 2, kept, seen, sharded, full)
    if rank == 0:
        torch.save(found, results)
    dist.barrier()  # a process that leaves while the other still writes was once aborted by gloo (SIGABRT, busy machine)
    dist.destroy_process_group()


def _see(seen: dict[str, torch.dtype], name: str, here: str) -> Any:
    def hook(module: nn.Module, inputs: Any) -> None:
        seen[name] = module.get_parameter(here).dtype

    return hook


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("fsdp")
    save_checkpoint(build(), where / "model")
    mp.start_processes(worker, (str(where / "store"), str(where / "results")), nprocs=2, start_method="spawn")
    result: dict[str, Any] = torch.load(Path(where / "results"), weights_only=False)
    return result


def test_two_processes_take_the_steps_of_one(found: dict[str, Any]) -> None:
    """Each process has half the batch; sums in another order are all that differs."""
    model = build()
    losses = train(model, batch())
    total, _, _, sharded, full = found["float32"]
    assert sharded
    assert torch.allclose(total, torch.tensor(losses), rtol=1e-4)
    assert losses[2] < losses[0]
    for n, p in model.named_parameters():
        assert rel(full[n], p) < 2e-3, (
            n
        )  # AdamW divides by the gradient's own size, so small gradients' rounding counts


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16 shards"])
def test_float32_parameters_stay_float32(found: dict[str, Any], name: str) -> None:
    total, kept, seen, sharded, _ = found[name]
    assert sharded and bool(torch.isfinite(total).all()) and total[2] < total[0]
    for n in kept:
        wide = n.endswith(FLOAT32)
        assert n.endswith(("kv_b_proj.weight", "lm_head.weight")) or seen[n] == (
            torch.float32 if wide else torch.bfloat16
        ), f"{n} computed in {seen[n]}"  # the two that are read as matrices
        assert kept[n] == (torch.float32 if wide or name == "bfloat16" else torch.bfloat16), f"{n} kept in {kept[n]}"
    assert any(n.endswith(FLOAT32) for n in kept)


def test_refusals() -> None:
    class Mesh:
        ndim, mesh_dim_names = 2, ("dp", "tp")

    with pytest.raises(ValueError, match="mesh: expected one dimension, received 2"):
        shard(copy.deepcopy(build()), Mesh())  # type: ignore[arg-type]

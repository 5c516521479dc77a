"""The balancer of a whole model: what is counted, when it takes effect, over micro-batches and ranks."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from openkda.layers.balance import QuantileBalancer
from openkda.layers.moe import SparseMoE
from openkda.models.presets import PRESETS

CONFIG = PRESETS["tiny"].replace(
    num_experts=8, num_experts_per_token=2, moe_intermediate_size=32, initializer_range=0.3
)


def built() -> SparseMoE:
    torch.manual_seed(0)
    return SparseMoE(CONFIG)


def tokens(n: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(1, n, 64, generator=torch.Generator().manual_seed(seed)) + 0.5


def bias_after(*batches: torch.Tensor) -> torch.Tensor:
    layer = built()
    balancer = QuantileBalancer(layer)
    for x in batches:
        layer(x)
    balancer.step()
    return layer.gate.e_score_correction_bias


def test_micro_batches_count_like_one_batch() -> None:
    x = tokens(300)
    whole = bias_after(x)
    assert bool(whole.any()) and torch.equal(whole, bias_after(x[:, :100], x[:, 100:130], x[:, 130:]))


def test_takes_effect_from_the_next_step_and_then_balances() -> None:
    layer, x = built(), tokens(2000)
    balancer = QuantileBalancer(layer)
    first = layer(x)
    assert torch.equal(first, layer(x)), "counting must not change the step's own routing"
    ratios = [balancer.step()["gate"]]
    for _ in range(5):
        layer(x)
        ratios.append(balancer.step()["gate"])
    assert not torch.equal(layer(x), first)
    assert ratios[0] > 1.5 and ratios[5] < 1.1
    assert abs(layer.gate.e_score_correction_bias.mean().item()) < 1e-6


def test_evaluation_is_not_counted() -> None:
    layer = built()
    balancer = QuantileBalancer(layer)
    layer.eval()
    layer(tokens(50))
    with torch.no_grad():
        layer(tokens(50))
    assert layer.gate.counts is None
    assert balancer.step() == {"gate": 0.0} and not bool(layer.gate.e_score_correction_bias.any())


def test_without_a_balancer_nothing_is_counted() -> None:
    layer = built()
    layer(tokens(50))
    assert layer.gate.counts is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_not_counted(reentrant: bool) -> None:
    x = tokens(64).requires_grad_()
    layer = built()
    balancer = QuantileBalancer(layer)
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert layer.gate.counts is not None and int(layer.gate.counts[:, -1].sum()) == 64 * 2
    assert (layer.gate.counts[:, :-1].sum(1) == 64).all()
    balancer.step()
    assert torch.equal(layer.gate.e_score_correction_bias, bias_after(tokens(64)))


def test_counts_are_no_part_of_the_model_state_but_the_bias_is() -> None:
    layer = built()
    balancer = QuantileBalancer(layer)
    layer(tokens(64))
    balancer.step()
    other = built()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.gate.e_score_correction_bias, layer.gate.e_score_correction_bias)
    assert set(layer.state_dict()) == set(built().state_dict())
    layer(tokens(64))
    copy.deepcopy(layer)


def test_balances_every_router_of_a_model() -> None:
    model = nn.Sequential(built(), SparseMoE(CONFIG.replace(num_experts=4)))
    balancer = QuantileBalancer(model)
    model(tokens(400))
    assert set(balancer.step()) == {"0.gate", "1.gate"}
    assert all(bool(m.gate.e_score_correction_bias.any()) for m in model)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="with routed experts, received one without"):
        QuantileBalancer(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="fewer experts a token than experts, received 4 of each"):
        QuantileBalancer(SparseMoE(CONFIG.replace(num_experts=4, num_experts_per_token=4)))
    with pytest.raises(ValueError, match="at least 2, received 1"):
        QuantileBalancer(built(), bins=1)


RANK = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {folder!r})
from test_balance_layer import built, tokens, QuantileBalancer
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
calls, plain = [], dist.all_reduce
dist.all_reduce = lambda t, *a, **k: (calls.append(t.dtype), plain(t, *a, **k))
layer = built()
balancer = QuantileBalancer(layer)
x = tokens(300)
if rank == 0:
    layer(x[:, :200]); layer(x[:, 200:])
balancer.step()
assert calls == [torch.int64], calls
torch.save(layer.gate.e_score_correction_bias, sys.argv[2] + str(rank))
dist.destroy_process_group()
"""


def test_two_ranks_one_of_them_without_tokens(tmp_path: Path) -> None:
    meeting, folder = tmp_path / "meeting", str(Path(__file__).parent)
    code = RANK.format(folder=folder)
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(r), str(meeting)]) for r in (0, 1)]
    assert [p.wait(60) for p in ranks] == [0, 0]
    want = bias_after(tokens(300))
    for r in (0, 1):
        assert torch.equal(torch.load(f"{meeting}{r}"), want)

"""QK-clip: the scores that it reads, and that a clipped layer's largest score is exactly tau."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from openkda.layers.kda import KimiDeltaAttention
from openkda.layers.mla import GatedMLA
from openkda.models.presets import PRESETS
from openkda.ops.mla import max_logits as module
from openkda.ops.mla.max_logits import max_logits
from openkda.training.qk_clip import QKClip

WIDE = PRESETS["tiny"].replace(initializer_range=0.4)  # scores well away from 0
CONFIGS = {
    "plain": WIDE,
    "low-rank": WIDE.replace(q_lora_rank=24, v_head_dim=24),
    "no-shared": WIDE.replace(qk_rope_head_dim=0),
}


def layer(name: str) -> GatedMLA:
    torch.manual_seed(0)
    return GatedMLA(CONFIGS[name], 3).double().train()


def tokens(length: int) -> Tensor:
    return torch.randn(1, length, WIDE.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_pairs(q: Tensor, latent: Tensor, kv_b: Tensor, cu: list[int]) -> Tensor:
    """Every causal pair's score, one at a time."""
    H, D, rank = q.shape[2], q.shape[3], kv_b.shape[1]
    nope = D - (latent.shape[2] - rank)
    W = kv_b.unflatten(0, (H, -1))[:, :nope]
    best = torch.full((H,), float("-inf"), dtype=q.dtype)
    for begin, end in pairwise(cu):
        for i in range(begin, end):
            for j in range(begin, i + 1):
                c, shared = latent[0, j, :rank], latent[0, j, rank:]
                for h in range(H):
                    k = torch.cat([W[h] @ c, shared])
                    best[h] = torch.maximum(best[h], (q[0, i, h] @ k) * D**-0.5)
    return best


@pytest.mark.parametrize("block", [1 << 24, 7])
@pytest.mark.parametrize("cu", [[0, 13], [0, 4, 4, 5, 13]])
def test_scores_of_every_causal_pair(cu: list[int], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCORES", block)
    g = torch.Generator().manual_seed(2)
    q, latent, kv_b = (
        torch.randn(s, dtype=torch.float64, generator=g) for s in ((1, 13, 3, 10), (1, 13, 11), (3 * 12, 7))
    )
    got = max_logits(q, latent, kv_b, cu_seqlens=None if len(cu) == 2 else torch.tensor(cu))
    torch.testing.assert_close(got, by_pairs(q, latent, kv_b, cu), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_after_a_clip_the_largest_score_is_tau(name: str) -> None:
    """A head above tau lands on it exactly (float64), a head below keeps every bit, and clipping again changes nothing."""
    mla, x = layer(name), tokens(40)
    mla(x)
    clip = QKClip(mla)
    mla(x)
    before = mla.largest_logits
    assert before is not None
    clip.tau = float(before.mean())  # between the two heads
    above = before > clip.tau
    assert above.any() and not above.all()
    weights = {n: p.detach().clone() for n, p in mla.named_parameters()}
    assert clip.step() == {"": float(before.max())}
    mla(x)
    after = mla.largest_logits
    assert after is not None
    torch.testing.assert_close(after[above], torch.full_like(after[above], clip.tau), rtol=1e-12, atol=0)
    assert torch.equal(after[~above], before[~above])
    changed = {n for n, p in mla.named_parameters() if not torch.equal(p, weights[n])}
    assert changed == {"q_b_proj.weight" if name == "low-rank" else "q_proj.weight", "kv_b_proj.weight"}
    values = mla.kv_b_proj.weight.unflatten(0, (2, -1))[:, 32:]
    assert torch.equal(values, weights["kv_b_proj.weight"].unflatten(0, (2, -1))[:, 32:])
    clipped = {n: p.detach().clone() for n, p in mla.named_parameters()}
    clip.tau *= 1 + 1e-9
    clip.step()
    assert all(torch.equal(p, clipped[n]) for n, p in mla.named_parameters())


def test_micro_batches_count_together_and_evaluation_does_not() -> None:
    mla = layer("plain")
    clip = QKClip(nn.ModuleDict({"attention": mla}), tau=1e9)
    mla.eval()(100 * tokens(9))
    assert clip.step() == {}
    mla.train()
    single = []
    for x in (tokens(9), 2 * tokens(20), tokens(3)):
        mla(x)
        single.append(clip.step()["attention"])
    for x in (tokens(9), 2 * tokens(20), tokens(3)):
        mla(x)
    assert clip.step() == {"attention": max(single)}


def test_nothing_to_watch_and_no_bound_are_refused() -> None:
    with pytest.raises(ValueError, match="Gated MLA"):
        QKClip(KimiDeltaAttention(WIDE, 0))
    with pytest.raises(ValueError, match="tau"):
        QKClip(layer("plain"), tau=0.0)

"""The Gated MLA layer: what it computes, and its cache."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from openkda.layers import latent_cache
from openkda.layers.mla import GatedMLA
from openkda.layers.state import MLAState
from openkda.models.presets import PRESETS
from openkda.testing.compare import rel

TINY = PRESETS["tiny"].replace(initializer_range=0.15, q_lora_rank=24, v_head_dim=24)


def literal(layer: GatedMLA, config, x: torch.Tensor) -> torch.Tensor:
    """The layer in float64 with every key, value and score written out."""
    w = {n: p.double() for n, p in layer.named_parameters()}
    x = x.double()
    H, nope, V, rank = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    T = x.shape[0]

    def norm(t: torch.Tensor, name: str) -> torch.Tensor:
        return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]

    if config.q_lora_rank is None:
        q = x @ w["q_proj.weight"].T
    else:
        q = norm(x @ w["q_a_proj.weight"].T, "q_a_layernorm") @ w["q_b_proj.weight"].T
    c, p = (x @ w["kv_a_proj_with_mqa.weight"].T).split([rank, config.qk_rope_head_dim], -1)
    kv = (norm(c, "kv_a_layernorm") @ w["kv_b_proj.weight"].T).view(T, H, nope + V)
    q = q.view(T, H, -1)
    o = x.new_zeros(T, H, V)
    for h in range(H):
        keys = torch.cat([kv[:, h, :nope], p], -1)
        for t in range(T):
            score = keys[: t + 1] @ q[t, h] * (nope + config.qk_rope_head_dim) ** -0.5
            o[t, h] = score.softmax(0) @ kv[: t + 1, h, nope:]
    o = o.view(T, H * V)
    if config.mla_use_output_gate:
        o = o * torch.sigmoid(x @ w["g_proj.weight"].T)
    return o @ w["o_proj.weight"].T


@pytest.mark.parametrize(
    "config",
    [TINY, TINY.replace(q_lora_rank=None, mla_use_output_gate=False), TINY.replace(qk_rope_head_dim=0, v_head_dim=80)],
    ids=["k3", "kimi-linear", "values-wider-than-keys"],
)
@torch.no_grad()
def test_equals_the_formulas(config) -> None:
    torch.manual_seed(0)
    layer = GatedMLA(config, 3)
    layer.kv_a_layernorm.weight.uniform_(0.5, 1.5)
    x = torch.randn(1, 20, config.hidden_size)
    assert rel(layer(x)[0][0], literal(layer, config, x[0])) < 2e-5


@torch.no_grad()
def test_decoding_appends_in_place_and_copies_little() -> None:
    layer = GatedMLA(TINY, 0).eval()
    x = torch.randn(1, 300, TINY.hidden_size)
    _, state = layer(x[:, :1], return_state=True)
    buffers = set()
    for t in range(1, 300):
        _, state = layer(x[:, t : t + 1], state=state, return_state=True)
        buffers.add(state.latent.data_ptr())
        assert state.latent.shape[1] >= 300 or state.latent.shape[1] > t
    assert len(buffers) <= 6  # the buffer grows by half each time
    assert state.nbytes == 300 * (TINY.kv_lora_rank + TINY.qk_rope_head_dim) * 4
    assert state.longest == 300 and state.length.tolist() == [300]


@torch.no_grad()
def test_what_lies_behind_the_end_is_never_read() -> None:
    layer = GatedMLA(TINY, 0).eval()
    x = torch.randn(3, 12, TINY.hidden_size)
    mask = torch.arange(12) >= torch.tensor([[0], [5], [9]])
    _, state = layer(x, attention_mask=mask, return_state=True)
    _, state = layer(x[:, :1], state=state, return_state=True)
    poisoned = copy.deepcopy(state)
    behind = torch.arange(poisoned.latent.shape[1]) >= poisoned.length.view(-1, 1)
    poisoned.latent[behind] = torch.nan
    for more in (x[:, :1], x[:, :5]):
        want, s = layer(more, state=state, return_state=True)
        got, t = layer(more, state=poisoned, return_state=True)
        assert torch.equal(got, want)
        assert torch.equal(layer(x[:, :1], state=t)[0], layer(x[:, :1], state=s)[0])


@torch.no_grad()
def test_selected_copied_and_pickled_states_are_their_own() -> None:
    layer = GatedMLA(TINY, 0).eval()
    x = torch.randn(2, 10, TINY.hidden_size)
    _, state = layer(x, return_state=True)
    _, state = layer(x[:, :1], state=state, return_state=True)
    want = layer(x, state=state)[0]
    others = {
        "view": MLAState(state.latent[:1], state.length[:1]),  # shares the buffer, knows nothing of its end
        "rows": MLAState(state.latent[[0]], state.length[[0]]),
        "copy": copy.deepcopy(state),
        "pickle": pickle.loads(pickle.dumps(state)),
    }
    for name, other in others.items():
        rows = other.length.shape[0]
        layer(-x[:rows], state=other, return_state=True)
        assert torch.equal(layer(x, state=state)[0], want), name
        assert rel(layer(x[:rows], state=other)[0], want[:rows]) < 2e-5, name
    whole = copy.deepcopy(state)
    whole.tail[0] = whole.length  # as it was before `state` was continued
    whole = pickle.loads(pickle.dumps(whole))
    _, further = layer(x, state=whole, return_state=True)
    assert further.latent.data_ptr() == whole.latent.data_ptr()  # a whole copy is again its buffer's newest


def test_threads_that_continue_one_state_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that several requests share: whoever comes second copies, even before the first has written."""
    state = latent_cache.start(torch.randn(1, 100, 8), None)
    state = latent_cache.append(state, torch.randn(1, 1, 8), None, keep=True)
    both, inside = threading.Barrier(2), latent_cache._claimed

    def claimed(state: MLAState, longest: int) -> bool:
        mine = inside(state, longest)
        both.wait(10)  # neither writes before both have asked
        return mine

    monkeypatch.setattr(latent_cache, "_claimed", claimed)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(latent_cache.append, state, torch.full((1, 3, 8), x), None, True) for x in (1.0, 2.0)]
        one, two = (a.result() for a in asked)
    assert (one.latent[:, 101:104] == 1).all() and (two.latent[:, 101:104] == 2).all()
    monkeypatch.undo()
    scored = latent_cache.append(two, torch.full((1, 3, 8), 3.0), None, keep=False)  # nobody's buffer: it is not kept
    assert scored.latent.data_ptr() not in (one.latent.data_ptr(), two.latent.data_ptr())


def test_states_cross_autograd_and_inference_modes() -> None:
    layer = GatedMLA(TINY, 0).eval()
    x = torch.randn(1, 12, TINY.hidden_size)
    want = layer(x)[0][:, 10:]
    with torch.inference_mode():
        _, state = layer(x[:, :9], return_state=True)
        _, state = layer(x[:, 9:10], state=state, return_state=True)
    with torch.no_grad():
        y, s = layer(x[:, 10:11], state=state, return_state=True)
        z, _ = layer(x[:, 11:12], state=s, return_state=True)
    assert rel(torch.cat([y, z], 1), want) < 2e-5
    _, state = layer(x[:, :10], return_state=True)  # part of a graph
    with torch.inference_mode():
        assert rel(layer(x[:, 10:], state=state)[0], want) < 2e-5
    layer(x[:, 10:], state=state)[0].sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_float32_output_is_a_switch_of_training(training: bool) -> None:
    torch.manual_seed(0)
    layer = GatedMLA(TINY.replace(mla_fp32_output=True), 0).train(training).bfloat16()
    assert layer.fp32_output
    seen = []
    layer.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    x = torch.randn(1, 30, TINY.hidden_size, dtype=torch.bfloat16)
    y, _ = layer(x)
    assert y.dtype == torch.bfloat16 and seen == [torch.bfloat16]
    layer.fp32_output = False
    rounded, _ = layer(x)
    assert torch.equal(y, rounded) != training  # one rounding less changes some bits


def test_bfloat16_is_close_to_float32() -> None:
    torch.manual_seed(0)
    layer = GatedMLA(TINY, 0)
    x = torch.randn(1, 40, TINY.hidden_size)
    want = layer(x)[0]
    assert rel(copy.deepcopy(layer).bfloat16()(x.bfloat16())[0], want) < 2e-2
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x, return_state=True)
    assert rel(y, want) < 2e-2 and state.latent.dtype == torch.bfloat16

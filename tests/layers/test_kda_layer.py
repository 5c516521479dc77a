"""The KDA layer: what it computes, how it starts, what stays float32."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

from openkda.layers.kda import KimiDeltaAttention
from openkda.layers.parameters import init_weights
from openkda.layers.state import KDAState
from openkda.models.presets import PRESETS
from openkda.testing.compare import rel

TINY = PRESETS["tiny"].replace(initializer_range=0.15)
GROUPED = TINY.replace(kda_num_v_heads=6, kda_head_dim=16, kda_v_head_dim=24)
FLOAT32 = {"A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight"}


def literal(layer: KimiDeltaAttention, x: torch.Tensor) -> torch.Tensor:
    """The layer in float64, one token at a time, written from the formulas with none of the package's functions."""
    w = {n: p.double() for n, p in layer.named_parameters()}
    H, K, HV, V = layer.heads, layer.key_dim, layer.v_heads, layer.v_dim
    (T, _), x = x.shape, x.double()

    def conv(name: str) -> torch.Tensor:
        u, taps = x @ w[f"{name}_proj.weight"].T, w[f"{name}_conv1d.weight"][:, 0]
        W = taps.shape[1]
        padded = torch.cat([u.new_zeros(W - 1, u.shape[1]), u])
        return F.silu(torch.stack([(padded[t : t + W] * taps.T).sum(0) for t in range(T)]))

    q, k, v = conv("q").view(T, H, K), conv("k").view(T, H, K), conv("v").view(T, HV, V)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    z = ((x @ w["f_a_proj.weight"].T) @ w["f_b_proj.weight"].T + w["dt_bias"]).view(T, HV, K)
    rate = w["A_log"].exp().view(HV, 1)
    log_a = -rate * F.softplus(z) if layer.lower_bound is None else layer.lower_bound * torch.sigmoid(rate * z)
    beta, u = torch.sigmoid(x @ w["b_proj.weight"].T), x
    for name in ("g_proj",) if layer.full_rank_gate else ("g_a_proj", "g_b_proj"):
        u = u @ w[f"{name}.weight"].T
    rows = []
    S = x.new_zeros(HV, K, V)
    for t in range(T):
        for h in range(HV):
            key, query = k[t, h * H // HV], q[t, h * H // HV]
            S[h] = log_a[t, h].exp().unsqueeze(1) * S[h]
            S[h] = S[h] + beta[t, h] * torch.outer(key, v[t, h] - S[h].T @ key)
            o = S[h].T @ query * K**-0.5
            o = o / (o.square().mean() + TINY.rms_norm_eps).sqrt() * w["o_norm.weight"]
            rows.append(o * torch.sigmoid(u[t].view(HV, V)[h]))
    return torch.stack(rows).view(T, HV * V) @ w["o_proj.weight"].T


@pytest.mark.parametrize(
    "config",
    [TINY, TINY.replace(gate_lower_bound=None, use_full_rank_gate=False), GROUPED.replace(gate_lower_bound=-2.0)],
    ids=["bounded", "softplus", "grouped"],
)
@torch.no_grad()
def test_equals_the_formulas(config) -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(config, 0)
    layer.A_log.uniform_(-0.5, 1.0)
    layer.o_norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(1, 20, config.hidden_size)
    assert rel(layer(x)[0][0], literal(layer, x[0])) < 2e-5


def test_published_start() -> None:
    torch.manual_seed(0)
    wide = PRESETS["tiny"].replace(kda_num_heads=32)
    soft, bounded = KimiDeltaAttention(wide.replace(gate_lower_bound=None), 0), KimiDeltaAttention(wide, 0)
    for layer in (soft, bounded):
        dt = F.softplus(layer.dt_bias.detach().double())
        assert 1e-3 * 0.999 <= dt.min() < 1.3e-3 and 0.08 < dt.max() <= 0.1 * 1.001
        assert abs(dt.log().median().item() - torch.tensor(1e-2).log().item()) < 0.2  # log-uniform
        assert abs(layer.q_proj.weight.std().item() - 0.02) < 1e-3
        assert bool((layer.o_norm.weight == 1).all())
    A = soft.A_log.detach().exp()
    assert 1 <= A.min() < 4 and 12 < A.max() <= 16
    assert not bounded.A_log.any()
    first = bounded.gate()(torch.zeros(1, 1, 32, 32))  # between about -0.005 and -0.48, says the fact behind the choice
    assert -0.5 < first.min() < -0.4 and -0.007 < first.max() < -0.004


def test_nothing_is_left_uninitialised_after_the_meta_device() -> None:
    with torch.device("meta"):
        layer = KimiDeltaAttention(TINY.replace(gate_lower_bound=None, use_full_rank_gate=False), 0)
    layer = layer.to_empty(device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(torch.nan)
    init_weights(layer, 0.02, torch.Generator().manual_seed(3))
    assert all(bool(torch.isfinite(p).all()) for p in layer.parameters())
    direct = KimiDeltaAttention(TINY.replace(gate_lower_bound=None, use_full_rank_gate=False), 0)
    init_weights(direct, 0.02, torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), direct.parameters(), strict=True))


CASTS = {
    "to": lambda m: m.to(torch.bfloat16),
    "to-half": lambda m: m.to(dtype=torch.float16),
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "type": lambda m: m.type(torch.bfloat16),
    "twice": lambda m: m.half().float().bfloat16(),
    "from-double": lambda m: m.double().bfloat16(),
    "in-a-parent": lambda m: torch.nn.Sequential(m).bfloat16()[0],
}


@pytest.mark.parametrize("cast", CASTS)
def test_float32_parameters_stay_float32(cast: str) -> None:
    layer = KimiDeltaAttention(TINY, 0)
    with torch.no_grad():
        layer.A_log.fill_(0.123456)
    before = {n: p.detach().clone() for n, p in layer.named_parameters() if n in FLOAT32}
    assert set(before) == FLOAT32
    layer = CASTS[cast](layer)
    for name, p in layer.named_parameters():
        if name in FLOAT32:
            assert p.dtype == torch.float32 and torch.equal(p, before[name]), name
        else:
            assert p.dtype in (torch.bfloat16, torch.float16), name
    dtype = layer.q_proj.weight.dtype
    y, state = layer(torch.randn(2, 9, TINY.hidden_size, dtype=dtype), return_state=True)
    assert y.dtype == state.conv_q.dtype == dtype and state.recurrent.dtype == torch.float32
    assert torch.equal(layer.gate()(torch.ones(1, 1, 2, 32)), bounded_gate_at_one(before))
    torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))


def bounded_gate_at_one(w: dict[str, torch.Tensor]) -> torch.Tensor:
    return -5.0 * torch.sigmoid(w["A_log"].exp().view(1, 1, 2, 1) * (1.0 + w["dt_bias"].view(1, 1, 2, 32)))


def test_double_widens_everything() -> None:
    layer = KimiDeltaAttention(TINY, 0).double()
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    y, state = layer(torch.randn(1, 5, TINY.hidden_size, dtype=torch.float64), return_state=True)
    assert y.dtype == state.recurrent.dtype == torch.float64
    assert {p.dtype for p in layer.float().parameters()} == {torch.float32}


def test_default_dtype_does_not_narrow_them() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = KimiDeltaAttention(TINY, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {n for n, p in layer.named_parameters() if p.dtype == torch.float32} == FLOAT32


def test_low_precision_is_close() -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(TINY, 0)
    x = torch.randn(1, 50, TINY.hidden_size)
    want = layer(x)[0]
    low = copy.deepcopy(layer).bfloat16()
    assert rel(low(x.bfloat16())[0], want) < 2e-2
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x, return_state=True)
        grads = torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))
        with torch.no_grad():
            stepped, _ = layer.eval()(x[:, :1], state=state)
    assert rel(y, want) < 2e-2 and state.recurrent.dtype == torch.float32
    assert rel(stepped, layer(x[:, :1], state=layer(x, return_state=True)[1])[0]) < 2e-2
    exact = torch.autograd.grad(want.square().sum(), list(layer.parameters()))
    assert all(rel(g, e) < 5e-2 for g, e in zip(grads, exact, strict=True))


@torch.no_grad()
def test_copies_are_whole() -> None:
    layer = KimiDeltaAttention(TINY, 0).eval()
    x = torch.randn(2, 9, TINY.hidden_size)
    y, state = layer(x, return_state=True)
    assert torch.equal(copy.deepcopy(layer)(x)[0], y)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], y)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), torch.load(file, weights_only=False)):
        assert torch.equal(layer(x, state=again)[0], layer(x, state=state)[0])


@torch.no_grad()
def test_impl_is_obeyed() -> None:
    x = torch.randn(1, 20, TINY.hidden_size)
    torch.manual_seed(0)
    layer = KimiDeltaAttention(TINY, 0, impl="reference")
    want = layer(x)[0]
    layer.impl = None
    assert rel(layer(x)[0], want) < 2e-5
    layer.impl = "no such thing"
    with pytest.raises(ValueError, match="no such thing"):
        layer(x)


@torch.no_grad()
def test_the_decoding_step_is_taken_only_in_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = KimiDeltaAttention(TINY, 0).eval()
    steps = []
    monkeypatch.setattr(layer, "_step", lambda x, state: steps.append(1) or KimiDeltaAttention._step(layer, x, state))
    x = torch.randn(2, 1, TINY.hidden_size)
    _, state = layer(x, return_state=True)  # one token, but nothing to continue
    assert not steps
    layer(x, state=state)
    assert len(steps) == 1
    layer.train()
    layer(x, state=state)
    layer.eval()
    with torch.enable_grad():
        layer(x, state=state)
    layer(x[:1].view(1, 1, -1), state=layer(x[:1], return_state=True)[1], cu_seqlens=torch.tensor([0, 1]))
    assert len(steps) == 1


@torch.no_grad()
def test_memory_of_a_state() -> None:
    layer = KimiDeltaAttention(GROUPED, 0).bfloat16()
    for length in (1, 40):
        _, state = layer(torch.randn(3, length, TINY.hidden_size, dtype=torch.bfloat16), return_state=True)
        assert state.recurrent.shape == (3, 6, 16, 24)
        assert state.conv_q.shape == (3, 32, 3) and state.conv_v.shape == (3, 144, 3)
        assert state.nbytes == 3 * (6 * 16 * 24 * 4 + (32 + 32 + 144) * 3 * 2)


def test_a_state_with_slots_is_a_pool() -> None:
    """Single tokens are written in place, into the slots named and no other; several tokens at once are refused."""
    layer = KimiDeltaAttention(PRESETS["tiny"], 0).double().eval()
    x = torch.randn(2, 5, PRESETS["tiny"].hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y, want = layer(x[:, :3], return_state=True)
        pool = KDAState(*(torch.full((4, *t.shape[1:]), 7.0, dtype=t.dtype) for t in want.tensors()))
        pool.slots = torch.tensor([3, 1])
        for place, value in zip(pool.tensors(), want.tensors(), strict=True):
            place[pool.slots] = value
        for t in (3, 4):
            y, want = layer(x[:, t : t + 1], state=want, return_state=True)
            got, after = layer(x[:, t : t + 1], state=pool, return_state=True)
            assert after is pool and rel(got, y) < 1e-12
        for place, value in zip(pool.tensors(), want.tensors(), strict=True):
            assert rel(place[pool.slots], value) < 1e-12 and bool((place[[0, 2]] == 7.0).all())
        with pytest.raises(ValueError, match=r"state\.slots: .* single tokens .* received T = 2"):
            layer(x[:, :2], state=pool)
    with pytest.raises(ValueError, match="without gradients"):
        layer(x[:, :1], state=pool)

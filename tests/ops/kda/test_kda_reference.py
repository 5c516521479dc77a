"""The token loop itself: numbers worked out by hand, and each of its options against a plainer way to say the same."""

from __future__ import annotations

import pytest
import torch

from openkda.ops.kda.api import kda, kda_step
from openkda.ops.kda.gate import BoundedGate, SoftplusGate
from openkda.testing.compare import rel
from openkda.testing.inputs import make_inputs
from openkda.testing.runs import gradients, outputs

IMPLS = ("reference", "chunkwise")


@pytest.mark.parametrize("impl", IMPLS)
def test_two_tokens_by_hand(impl: str) -> None:
    """k = 1, 1; v = 5, 7; b = 0.5, 0.4; no decay: S = 2.5, then 2.5 + 0.4 (7 - 2.5) = 4.3; with q = 1, 2: o = 2.5, 8.6."""
    one = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    q, v = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).double(), torch.tensor([5.0, 7.0]).view(1, 2, 1, 1).double()
    beta = torch.tensor([[[0.5], [0.4]]], dtype=torch.float64)
    out = kda(q, one, v, torch.zeros_like(one), beta, scale=1.0, output_final_state=True, impl=impl)
    assert torch.allclose(out.output.flatten(), torch.tensor([2.5, 8.6], dtype=torch.float64), rtol=1e-14)
    assert abs(out.final_state.item() - 4.3) < 1e-14


@pytest.mark.parametrize("impl", IMPLS)
def test_decay_acts_before_the_error_is_taken(impl: str) -> None:
    """S = 4, decay 1/2, k = 1, v = 3, b = 1: the state decays to 2, the error is 1, S = 3."""
    one = torch.ones(1, 1, 1, 1)
    out = kda(
        one, one, 3 * one, torch.log(0.5 * one), torch.ones(1, 1, 1), scale=1.0,
        initial_state=4 * one, output_final_state=True, impl=impl,
    )  # fmt: skip
    assert out.final_state.item() == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_unit_keys_with_full_write_are_recalled_exactly(impl: str) -> None:
    K = 16
    k = torch.eye(K).view(1, K, 1, K)
    v = torch.randn(1, K, 1, 24, generator=torch.Generator().manual_seed(0))
    out = kda(k, k, v, torch.zeros(1, K, 1, K), torch.ones(1, K, 1), scale=1.0, output_final_state=True, impl=impl)
    assert rel(out.output, v) < 1e-6
    assert rel(out.final_state[0, 0], v[0, :, 0]) < 1e-6


def test_gate_numbers() -> None:
    """Both gates at A_log = 0, worked out with a pocket calculator's log and exp."""
    z = torch.tensor([-4.0, -1.0, 0.0, 1.0, 4.0], dtype=torch.float64).view(5, 1, 1)
    soft = torch.tensor([-0.0181499, -0.3132617, -0.6931472, -1.3132617, -4.0181499], dtype=torch.float64)
    bounded = torch.tensor([-0.0899310, -1.3447071, -2.5, -3.6552929, -4.9100690], dtype=torch.float64)
    assert torch.allclose(SoftplusGate(torch.zeros(1))(z).flatten(), soft, atol=5e-8)
    assert torch.allclose(BoundedGate(-5.0, torch.zeros(1))(z).flatten(), bounded, atol=5e-8)
    assert torch.equal(BoundedGate(-5.0, None)(z), BoundedGate(-5.0, torch.zeros(1))(z))


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_dt_bias_is_per_channel_and_A_log_per_head(gate: str) -> None:
    x = make_inputs(1, T=5, H=2, K=8, gate=gate)
    x.gate.A_log.copy_(torch.tensor([0.3, -0.5]))
    x.gate.dt_bias.copy_(torch.arange(16.0).view(2, 8) / 10)
    got = x.gate(x.g)
    for h in range(2):
        for c in range(8):
            z, A = x.g[0, 2, h, c].double() + (8 * h + c) / 10, torch.tensor([0.3, -0.5])[h].double().exp()
            want = -A * torch.nn.functional.softplus(z) if gate == "softplus" else -5 * torch.sigmoid(A * z)
            assert got[0, 2, h, c].item() == pytest.approx(want.item(), rel=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("flag", ["use_qk_l2norm", "use_beta_sigmoid", "gate", "scale", "cu_seqlens"])
def test_every_option_says_what_it_does(impl: str, flag: str) -> None:
    """Each option at a non-default value equals the plain call on inputs prepared outside: no implementation ignores one."""
    x = make_inputs(
        2, T=70, H=2, K=16, V=8, gate="softplus" if flag == "gate" else None, unit_keys=flag != "use_qk_l2norm",
        lengths=(30, 40) if flag == "cu_seqlens" else None,
        use_qk_l2norm=flag == "use_qk_l2norm", use_beta_sigmoid=flag == "use_beta_sigmoid",
    )  # fmt: skip
    got = outputs(x, impl=impl, scale=0.3 if flag == "scale" else None)
    q, k, g, beta = x.q.double(), x.k.double(), x.g.double(), x.beta.double()
    if flag == "use_qk_l2norm":
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    if flag == "gate":
        g = SoftplusGate(x.gate.A_log.double(), x.gate.dt_bias.double())(g)
    if flag == "use_beta_sigmoid":
        beta = 1 / (1 + torch.exp(-beta))
    if flag == "scale":
        q = q * (0.3 * 4)  # the default scale is K^-0.5 = 1/4
    args = q, k, x.v.double(), g, beta
    state = x.initial_state.double()
    parts = [(0, 30), (30, 70)] if flag == "cu_seqlens" else [(0, 70)]
    want = [
        kda(*(t[:, a:b] for t in args), initial_state=state[n : n + 1], output_final_state=True, impl="reference")
        for n, (a, b) in enumerate(parts)
    ]
    assert rel(got["o"], torch.cat([w.output for w in want], 1)) < 2e-5
    assert rel(got["S"], torch.cat([w.final_state for w in want])) < 2e-5


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["bounded", "softplus", None])
def test_step_walks_like_the_whole_sequence(impl: str, gate: str | None) -> None:
    x = make_inputs(3, B=2, T=19, H=2, HV=6, K=8, V=24, gate=gate, use_qk_l2norm=True, use_beta_sigmoid=True)
    want = outputs(x.to(dtype=torch.float64), impl="reference")
    state, rows = x.initial_state, []
    for t in range(19):
        o, state = kda_step(
            x.q[:, t], x.k[:, t], x.v[:, t], x.g[:, t], x.beta[:, t], state,
            gate=gate and x.gate, use_qk_l2norm=True, use_beta_sigmoid=True, impl=impl,
        )  # fmt: skip
        rows.append(o)
    assert rel(torch.stack(rows, 1), want["o"]) < 2e-6
    assert rel(state, want["S"]) < 2e-6


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("T", [0, 1])
def test_no_tokens_and_one_token(impl: str, T: int) -> None:
    x = make_inputs(4, B=2, T=T, H=1, HV=3, K=8, V=16)
    got = outputs(x, impl=impl)
    assert got["o"].shape == (2, T, 3, 16)
    if T == 0:
        assert torch.equal(got["S"], x.initial_state)
        assert got["S"].data_ptr() != x.initial_state.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("impl", IMPLS)
def test_16_bit_inputs_are_computed_in_float32(impl: str, dtype: torch.dtype) -> None:
    """Against float64 on the same rounded inputs: only the one rounding of the output is left, half an ulp of the type."""
    x = make_inputs(5, T=150, H=1, HV=2, K=32, V=16).to(dtype=dtype)
    got, want = outputs(x, impl=impl), outputs(x.to(dtype=torch.float64), impl="reference")
    assert got["o"].dtype == dtype
    assert got["S"].dtype == torch.float32
    assert rel(got["o"], want["o"]) < {torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype] / 2
    assert rel(got["S"], want["S"]) < 2e-6


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_nothing(impl: str) -> None:
    """The op's dtypes are its own: inside an autocast region its products would be rounded to 16 bits."""
    x = make_inputs(6, T=70, H=1, HV=2, K=16, use_qk_l2norm=True)
    want = gradients(x, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(x, impl=impl)
        o, S = kda_step(
            x.q[:, 0], x.k[:, 0], x.v[:, 0], x.g[:, 0], x.beta[:, 0], x.initial_state, gate=x.gate, impl=impl
        )
    assert all(torch.equal(got[n], want[n]) for n in want)
    plain = kda_step(x.q[:, 0], x.k[:, 0], x.v[:, 0], x.g[:, 0], x.beta[:, 0], x.initial_state, gate=x.gate, impl=impl)
    assert torch.equal(o, plain[0])
    assert torch.equal(S, plain[1])

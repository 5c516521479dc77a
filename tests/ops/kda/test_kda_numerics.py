"""Numbers at the edges: hard and slow forgetting, saturated gates, equal keys, huge and tiny values, every head size."""

from __future__ import annotations

import math

import pytest
import torch

from openkda.ops.kda.api import kda, kda_step
from openkda.ops.kda.gate import BoundedGate, SoftplusGate
from openkda.testing.compare import rel
from openkda.testing.inputs import KDAInputs, make_inputs
from openkda.testing.runs import check_errors, errors, gradients, outputs


def against_loop(x: KDAInputs, limit: float = 2e-5, grad_limit: float = 1e-4) -> dict[str, torch.Tensor]:
    """Chunkwise float32 against the float64 loop; returns the loop's results."""
    want = gradients(x.to(dtype=torch.float64), impl="reference")
    check_errors(gradients(x, impl="chunkwise"), want, limit, grad_limit)
    return want


@pytest.mark.parametrize("where", ["random", "first", "tile ends", "chunk ends", "everywhere"])
def test_hard_forgetting(where: str) -> None:
    x = make_inputs(1, T=512, H=2, K=64, gate=None)
    t = torch.arange(512)
    hit = {
        "random": torch.rand(512, generator=torch.Generator().manual_seed(9)) < 0.05,
        "first": t == 0,
        "tile ends": t % 16 == 15,
        "chunk ends": t % 64 == 63,
        "everywhere": t >= 0,
    }[where]
    x.g = torch.where(hit.view(1, 512, 1, 1), -1000.0, -0.01).expand_as(x.g).contiguous()
    against_loop(x)


def test_after_forgetting_everything_the_run_starts_anew() -> None:
    x = make_inputs(2, T=140, H=2, K=32, gate=None, decay="slow")
    x.g[:, 70] = -1000.0
    whole = outputs(x, impl="chunkwise")["o"][:, 70:]
    tail = KDAInputs(**{**vars(x), **{n: getattr(x, n)[:, 70:] for n in ("q", "k", "v", "g", "beta", "do")}})
    tail.initial_state = None
    assert rel(whole, outputs(tail, impl="chunkwise")["o"]) < 2e-6


@pytest.mark.parametrize("T", [7, 50, 333, 2048])
@pytest.mark.parametrize("value", [0.0, -0.0, -1e-9])
def test_no_decay_is_the_plain_delta_rule(T: int, value: float) -> None:
    x = make_inputs(2, B=2, T=T, H=2, K=64, gate=None)
    x.g.fill_(value)
    got = outputs(x, impl="chunkwise")
    S, rows = x.initial_state.double(), []
    for t in range(T):  # the delta rule, no decay anywhere
        k, v, b = x.k[:, t].double(), x.v[:, t].double(), x.beta[:, t].double()
        S = S + torch.einsum("bhk,bhv->bhkv", k, b[..., None] * (v - torch.einsum("bhkv,bhk->bhv", S, k)))
        rows.append(torch.einsum("bhkv,bhk->bhv", S, x.q[:, t].double()) * 64**-0.5)
    assert rel(got["o"], torch.stack(rows, 1)) < 2e-6  # no growth with T
    assert rel(got["S"], S) < 2e-6


def test_strong_softplus_gate_has_finite_gradients() -> None:
    """Log decay about -64 a token: exp before the mask would give inf times 0 in the backward."""
    x = make_inputs(3, T=64, H=2, K=32, gate="softplus")
    x.gate.A_log.fill_(math.log(16.0))
    x.g.fill_(4.0)
    against_loop(x)


@pytest.mark.parametrize("c", [1.0, 5.5, 5.6, 8.0, 30.0])
def test_unbounded_gate_beyond_what_a_tile_can_divide_out(c: float) -> None:
    x = make_inputs(0, T=129, H=2, K=128, gate="softplus")
    x.gate.A_log.zero_(), x.gate.dt_bias.zero_()
    x.g.fill_(math.log(math.expm1(c)))
    against_loop(x)
    x.gate, x.g = None, torch.full_like(x.g, -c)  # a given log decay is never taken for bounded
    against_loop(x)


@pytest.mark.parametrize("m", [-5.0, -4.0, -0.5])
@pytest.mark.parametrize("T", [16, 17, 64, 200])
def test_saturated_bounded_gate(m: float, T: int) -> None:
    for pattern in ("all", "alternating"):
        x = make_inputs(1, T=T, H=2, K=32, gate="bounded")
        x.gate = BoundedGate(m, torch.zeros(2), torch.zeros(2, 32))
        x.g.fill_(60.0)
        if pattern == "alternating":
            x.g[:, ::2] = -60.0
        against_loop(x)


@pytest.mark.parametrize("m", [-5.0001, -5.9, -6.0, -11.0, -12.0, 0.0, 0.1, math.nan, -math.inf])
def test_bound_outside_its_range_is_refused(m: float) -> None:
    with pytest.raises(ValueError, match=r"lower_bound.*\[-5\.0, 0\.0\).*received"):
        BoundedGate(m)


def test_saturated_bounded_gate_with_large_values_keeps_finite_gradients() -> None:
    """exp(+80) times a gradient of 1e4 would leave float32: the tile's factors are centred."""
    x = make_inputs(6, T=64, H=1, K=32, gate="bounded")
    x.g.fill_(60.0)
    x.v *= 1e6
    x.do *= 1e6
    against_loop(x)


@pytest.mark.parametrize("path", ["chunkwise", "step"])
def test_slow_decay_does_not_drift(path: str) -> None:
    """4096 tokens at a log decay of about -8e-5, bfloat16 inputs: a decay or a write strength rounded to bfloat16, or a float32
    decay rounded the same way each step, shows up here and nowhere else."""
    x = make_inputs(7, T=4096, H=2, K=16, gate="softplus", use_beta_sigmoid=True)
    x.gate = SoftplusGate(torch.zeros(2), torch.zeros(2, 16))
    x.g.fill_(math.log(math.expm1(8e-5)))
    x.beta -= 6.0  # rare writes, so that the initial state is still there at the end
    x.initial_state = 10 * x.initial_state
    x = x.to(dtype=torch.bfloat16)
    want = outputs(x.to(dtype=torch.float64), impl="reference")["S"]
    forgotten = outputs(x.to(dtype=torch.float64), impl="chunkwise", gate=None, initial_state=None)["S"]
    assert rel(forgotten, want) > 0.1  # the test has power
    if path == "chunkwise":
        got = outputs(x, impl="chunkwise")["S"]
    else:
        got = x.initial_state
        for t in range(4096):
            _, got = kda_step(
                x.q[:, t], x.k[:, t], x.v[:, t], x.g[:, t], x.beta[:, t], got, gate=x.gate, use_beta_sigmoid=True
            )
    assert rel(got, want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_state_and_tiny_gradient_in_16_bit(dtype: torch.dtype) -> None:
    for size in (65536.0, 1e5):
        x = make_inputs(8, T=64, H=1, K=32).to(dtype=dtype)
        x.k[..., 0] = 0
        x.initial_state.zero_()
        x.initial_state[0, 0, 0, 0] = size
        want = outputs(x.to(dtype=torch.float64), impl="reference")
        got = outputs(x, impl="chunkwise")
        assert bool(torch.isfinite(got["S"]).all())
        assert rel(got["S"], want["S"]) < 2e-6
    x.do.zero_()
    x.dS.fill_(2.0**-25)
    want = gradients(x.to(dtype=torch.float64), impl="reference")
    got = gradients(x, impl="chunkwise")
    assert got["dinitial_state"].abs().max() > 0
    assert errors(got, want)["dinitial_state"] < 1e-5


@pytest.mark.parametrize("size", [0.0, 1e-4, 1e-8, 1e-20])
def test_l2norm_of_zero_and_tiny_rows(size: float) -> None:
    x = make_inputs(9, T=40, H=1, HV=2, K=16, unit_keys=False, use_qk_l2norm=True)
    x.q[:, :5] *= size
    x.k[:, :5] *= size
    want = gradients(x.to(dtype=torch.float64), impl="reference")
    got = gradients(x, impl="chunkwise")
    found = errors(got, want)
    assert max(found[n] for n in ("o", "S")) < 2e-5
    assert max(found.values()) < 1e-4
    state, rows = x.initial_state, []
    for t in range(40):
        o, state = kda_step(
            x.q[:, t], x.k[:, t], x.v[:, t], x.g[:, t], x.beta[:, t], state, gate=x.gate, use_qk_l2norm=True
        )
        rows.append(o)
    assert rel(torch.stack(rows, 1)[:, :5], want["o"][:, :5]) < 2e-5


@pytest.mark.parametrize("size", [1e10, 1e17, 1e19, 1e25, 3e37])
def test_l2norm_of_huge_rows(size: float) -> None:
    """Squares overflow float32 from 1.8e19 on; what they are normalised to does not, nor its gradient. The other rows keep
    their bits."""
    x = make_inputs(9, T=40, H=1, HV=2, K=16, unit_keys=False, use_qk_l2norm=True)
    plain = outputs(x, impl="chunkwise")["o"][:, :20]
    for t in (x.q, x.k):
        t[:, 20:25] *= size / t[:, 20:25].abs().amax(-1, keepdim=True)
    assert torch.equal(outputs(x, impl="chunkwise")["o"][:, :20], plain)
    want = gradients(x.to(dtype=torch.float64), impl="reference")
    got = gradients(x, impl="chunkwise")
    for name in ("dq", "dk"):
        got[name][:, 20:25] *= size  # into the range where relative errors mean something
        want[name][:, 20:25] *= size
    check_errors(got, want, 2e-5, 1e-4)
    state = x.initial_state
    for t in range(25):
        o, state = kda_step(
            x.q[:, t], x.k[:, t], x.v[:, t], x.g[:, t], x.beta[:, t], state, gate=x.gate, use_qk_l2norm=True
        )
        assert rel(o, want["o"][:, t]) < 2e-5


@pytest.mark.parametrize("T", [64, 192])
@pytest.mark.parametrize("part", ["state", "inputs", "both"])
def test_state_path_and_input_path_apart(part: str, T: int) -> None:
    """An error in one path hides behind the other: only the entering state, only the inputs, both."""
    x = make_inputs(10, T=T, H=2, K=32, V=48, gate=None, decay="unit", initial_state=part != "inputs")
    x.g *= 64 / T  # the state's last trace, exp(-64), still fits float32
    if part == "state":
        x.v.zero_()
    against_loop(x)


@pytest.mark.parametrize("K", [1, 60, 100, 192, 256])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_odd_head_sizes(K: int, gate: str) -> None:
    for T in (1, 17, 65, 129):
        against_loop(make_inputs(11, T=T, H=1, K=K, V={1: 7, 60: 36, 100: 8, 192: 20, 256: 12}[K], gate=gate))


@pytest.mark.parametrize("T", [1023, 1024, 1025])
def test_lengths_around_many_chunks(T: int) -> None:
    for state in (True, False):
        against_loop(make_inputs(12, T=T, H=1, K=32, gate="softplus", initial_state=state))


def test_equal_keys_full_write_no_decay() -> None:
    """The triangular system at its worst: all keys the same, b = 1, no decay; powers of its strict part grow like 2^64."""
    x = make_inputs(13, T=200, H=1, K=32, gate=None, decay="zero", near_equal_keys=True)
    x.k = x.k[:, :1].expand_as(x.k).contiguous()
    x.beta.fill_(1.0)
    against_loop(x)


@pytest.mark.parametrize("gate", ["bounded", "softplus", None])
def test_write_strengths_beyond_zero_and_one(gate: str | None) -> None:
    """Nobody checks values unasked: negative strengths and those of 2 (negative eigenvalues) have their gradients too."""
    x = make_inputs(15, T=100, H=1, HV=2, K=16, gate=gate)
    x.beta = 3 * x.beta - 1
    against_loop(x)
    x.beta[:, ::3], x.beta[:, 1::3] = 0, 1e-20
    against_loop(x)


def test_keys_longer_than_one() -> None:
    """Norm off: finite and right as long as the recurrence itself is; norm on: always. check_inputs says so."""
    for gate in ("softplus", None):
        x = make_inputs(42, T=64, H=1, K=64, gate=gate, decay="zero" if gate is None else "random", unit_keys=False)
        want = outputs(x.to(dtype=torch.float64), impl="reference")
        got = outputs(x, impl="chunkwise")
        small = want["o"].abs().amax(-1) < torch.finfo(torch.float32).max
        assert bool(torch.isfinite(got["o"][small]).all())
        steady = want["o"][:, :12]  # before rounding has been amplified by more than 1e3
        assert rel(got["o"][:, :12], steady) < 1e-4
        with pytest.raises(ValueError, match="k: expected keys of length"):
            outputs(x, check_inputs=True)
        check_errors(outputs(x, impl="chunkwise", use_qk_l2norm=True),
                     outputs(x.to(dtype=torch.float64), impl="reference", use_qk_l2norm=True), 2e-5)  # fmt: skip


def test_heads_with_very_different_gates() -> None:
    """Each head alone gives the same: no head reads another one's decay."""
    x = make_inputs(14, T=130, H=4, K=32, gate=None)
    x.g = torch.tensor([-0.01, -1.0, -4.0, -5.0]).view(1, 1, 4, 1).expand_as(x.g).contiguous()
    whole = outputs(x, impl="chunkwise")
    for h in range(4):
        alone = kda(
            *(t[:, :, h : h + 1] for t in (x.q, x.k, x.v, x.g, x.beta)),
            initial_state=x.initial_state[:, h : h + 1], output_final_state=True,
        )  # fmt: skip
        assert rel(alone.output, whole["o"][:, :, h : h + 1]) < 2e-6
        assert rel(alone.final_state, whole["S"][:, h : h + 1]) < 2e-6


def test_zeros_give_exactly_zero() -> None:
    for T in (1, 100, 1000):
        z = torch.zeros(1, T, 2, 16)
        for state in (None, torch.zeros(1, 2, 16, 16)):
            out = kda(z, z, z, z, z[..., 0], initial_state=state, output_final_state=True)
            assert not bool(out.output.any())
            assert not bool(out.final_state.any())

"""fla-core's names on `openkda.kda`: every documented flag does what its formula says, and what is unsupported raises."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.compat import fla
from openkda.testing.compare import check_close
from openkda.testing.inputs import KDAInputs, make_inputs

LIMIT = 2e-5  # float32 chunk form against the token loop


def inputs(**kw: Any) -> KDAInputs:
    return make_inputs(**{"T": 70, "B": 2, "H": 2, "HV": 4, "K": 16, "V": 24, "gate": None, **kw})


def tokens(x: KDAInputs) -> tuple[Tensor, ...]:
    return x.q, x.k, x.v, x.g, x.beta


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("op", [fla.chunk_kda, fla.fused_recurrent_kda])
@pytest.mark.parametrize("bound", [None, -5.0, -9.0])
def test_flags_are_their_formulas(op: Any, bound: float | None) -> None:
    """Raw gate, l2norm and doubled sigmoid inside, against the same computed outside."""
    x = inputs(unit_keys=False)
    A_log, dt_bias, raw = torch.randn(1, 1, 4, 1), torch.randn(64), torch.randn(2, 70, 4)
    z = torch.randn(x.g.shape)
    got = op(
        x.q, x.k, x.v, z, raw, initial_state=x.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, lower_bound=bound,
        A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    shifted = z + dt_bias.view(4, 16)
    rate = A_log.view(4, 1).exp()
    g = -rate * F.softplus(shifted) if bound is None else bound * torch.sigmoid(rate * shifted)
    want = fla.naive_recurrent_kda(
        unit(x.q), unit(x.k), x.v, g, 2 * raw.sigmoid(), initial_state=x.initial_state, output_final_state=True
    )  # fmt: skip
    check_close("o", got[0], want[0], LIMIT)
    check_close("state", got[1], want[1], LIMIT)


def test_naive_chunk_equals_naive_recurrent() -> None:
    x = inputs()
    options = {"initial_state": x.initial_state, "output_final_state": True, "scale": 0.3}
    got, want = fla.naive_chunk_kda(*tokens(x), **options), fla.naive_recurrent_kda(*tokens(x), **options)
    check_close("o", got[0], want[0], LIMIT)
    check_close("state", got[1], want[1], LIMIT)
    assert fla.naive_recurrent_kda(*tokens(x))[1] is None


def test_v_first_states_and_the_old_name() -> None:
    x = inputs()
    assert x.initial_state is not None
    turned = x.initial_state.transpose(-1, -2).contiguous()
    want = fla.chunk_kda(*tokens(x), initial_state=x.initial_state, output_final_state=True)
    got = fla.chunk_kda(*tokens(x), initial_state=turned, output_final_state=True, state_v_first=True)
    check_close("state", got[1].transpose(-1, -2), want[1], 1e-6)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        old = fla.chunk_kda(*tokens(x), initial_state=turned, output_final_state=True, transpose_state_layout=True)
    assert torch.equal(old[1], got[1])
    with pytest.raises(ValueError, match="received both"):
        fla.chunk_kda(*tokens(x), state_v_first=True, transpose_state_layout=True)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("lengths", [None, (5, 0, 64, 65, 33)])
def test_intermediate_states(size: int, lengths: tuple[int, ...] | None) -> None:
    """h holds the state before every chunk, in order."""
    x = inputs() if lengths is None else inputs(B=1, lengths=lengths)
    cu = x.options.get("cu_seqlens")
    with torch.inference_mode():
        _, final, h = fla.chunk_kda(
            *tokens(x), initial_state=x.initial_state, output_final_state=True, return_intermediate_states=True,
            chunk_size=size, cu_seqlens=cu, cu_seqlens_cpu=cu,
        )  # fmt: skip
    assert x.initial_state is not None and final is not None
    spans = [(b, 0, 70) for b in range(2)] if cu is None else [(0, int(s), int(e)) for s, e in itertools.pairwise(cu)]
    want = []
    for n, (b, start, end) in enumerate(spans):
        for t in range(start, end, size):
            state = x.initial_state[n : n + 1]
            if t > start:
                part = [y[b : b + 1, start:t] for y in tokens(x)]
                state = fla.naive_recurrent_kda(*part, initial_state=state, output_final_state=True)[1]
            want.append(state)
    assert h.shape[:2] == ((2, -(-70 // size)) if cu is None else (1, len(want))) and h.dtype == x.k.dtype
    check_close("h", h.flatten(0, 1), torch.cat(want), LIMIT)


def test_gradients_flow() -> None:
    x = inputs().requires_grad_()
    fla.chunk_kda(*tokens(x), initial_state=x.initial_state)[0].sum().backward()
    assert all(t.grad is not None and bool(t.grad.isfinite().all()) for t in x.tensors().values())


def test_what_changes_nothing_is_accepted() -> None:
    x = inputs(B=1, lengths=(30, 40, 0))
    cu = x.options["cu_seqlens"]
    want = fla.chunk_kda(*tokens(x), cu_seqlens=cu)[0]
    got = fla.chunk_kda(
        *tokens(x), cu_seqlens=cu, cu_seqlens_cpu=cu, use_graph=True, max_num_seqs=3, disable_recompute=True, safe_gate=True
    )[0]  # fmt: skip
    assert torch.equal(got, want)


def test_what_is_kept_for_the_backward_follows_disable_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    import openkda.compat.fla.ops as ops

    seen: list[bool | None] = []
    op = ops.kda
    monkeypatch.setattr(
        ops, "kda", lambda *a, recompute, **k: seen.append(recompute) or op(*a, recompute=recompute, **k)
    )
    for flag in (True, False):
        fla.chunk_kda(*tokens(inputs(B=1)), disable_recompute=flag)
    assert seen == [False, None]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"cp_context": object()}, NotImplementedError, "cp_context"),
        ({"chunk_size": 16}, ValueError, "32 or 64"),
        ({"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel"),
        ({"use_gate_in_kernel": True}, ValueError, "A_log"),
        ({"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.zeros(4)}, ValueError, "lower_bound"),
        ({"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -6.0}, ValueError, r"\[-5, 0\)"),
        ({"return_intermediate_states": True}, ValueError, "inference_mode"),
        ({"initial_state": torch.zeros(2, 4, 16, 24, dtype=torch.float64)}, TypeError, "float32"),
        ({"head_first": True}, TypeError, "head_first"),
        # What fla would take without a word: a gate that does not run, a decay above 1, a gate of wrong order, a number whose
        # gradient would be lost.
        ({"A_log": torch.zeros(4)}, ValueError, "use_gate_in_kernel=True"),
        ({"dt_bias": torch.zeros(64)}, ValueError, "use_gate_in_kernel=True"),
        ({"use_gate_in_kernel": True, "lower_bound": 0.0}, ValueError, "a number below 0"),
        ({"use_gate_in_kernel": True, "lower_bound": 1.0}, ValueError, "a number below 0"),
        ({"use_gate_in_kernel": True, "lower_bound": float("nan")}, ValueError, "a number below 0"),
        ({"lower_bound": 1.0}, ValueError, "a number below 0"),  # beside an activated g, too
        (
            {"use_gate_in_kernel": True, "lower_bound": torch.tensor(-5.0)},
            TypeError,
            "a number below 0, received Tensor",
        ),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(4).int()}, TypeError, "A_log: expected a float tensor"),
        (
            {"use_gate_in_kernel": True, "lower_bound": -9.0, "dt_bias": torch.zeros(16, 4)},
            ValueError,
            "dt_bias: expected",
        ),
        ({"beta": torch.zeros(2, 70, 4, 24)}, ValueError, r"beta\.shape"),
        ({"scale": torch.tensor(1.0, requires_grad=True)}, TypeError, "scale: expected a number"),
        ({"cu_seqlens_cpu": torch.tensor([0, 70])}, ValueError, "cu_seqlens_cpu: expected the values of cu_seqlens"),
    ],
)
def test_the_unsupported_raises(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fla.chunk_kda(**{**dict(zip(("q", "k", "v", "g", "beta"), tokens(inputs()), strict=True)), **options})


def test_lengths_on_the_host_are_those_on_the_device() -> None:
    """They decide where h is taken: other ones would give states of other tokens."""
    x = inputs(B=1, lengths=(30, 40))
    for host in ([0, 40, 70], [0, 10, 30, 70]):
        with torch.no_grad(), pytest.raises(ValueError, match="cu_seqlens_cpu: expected the values of cu_seqlens"):
            fla.chunk_kda(
                *tokens(x), cu_seqlens=x.options["cu_seqlens"], cu_seqlens_cpu=torch.tensor(host),
                return_intermediate_states=True,
            )  # fmt: skip


def test_gate_functions() -> None:
    g, A_log, bias = torch.randn(3, 5, 4, 16), torch.randn(4), torch.randn(64)
    want = -A_log.exp().view(4, 1) * F.softplus(g + bias.view(4, 16))
    assert torch.equal(fla.naive_kda_gate(g, A_log, bias), want)
    assert torch.equal(fla.fused_kda_gate(g, A_log.view(1, 1, 4, 1), bias), want)
    low = -3 * torch.sigmoid(g + bias.view(4, 16))
    check_close("no A_log", fla.fused_kda_gate(g, dt_bias=bias, lower_bound=-3.0), low, 1e-6)
    check_close("bounded", fla.naive_kda_lowerbound_gate(g, torch.zeros(4), bias, -3.0), low, 1e-6)
    assert fla.fused_kda_gate(g, A_log, output_dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("bound", [None, -5.0, -9.0])
def test_gates_hold_where_their_parameters_are_large(bound: float | None) -> None:
    """exp(A_log) beyond float32, raw inputs at 0 and far below: no NaN, neither in the gate nor in its gradients."""
    g = torch.tensor([0.0, -200.0, 200.0, -1e30]).expand(2, 3, 4, 4).clone().requires_grad_()
    A_log, bias = torch.full((4,), 95.0, requires_grad=True), torch.zeros(16, requires_grad=True)
    y = fla.fused_kda_gate(g, A_log, bias, bound)
    assert bool(((y <= 0) & ~y.isnan()).all())
    y.clamp_min(-100).sum().backward()
    assert all(t.grad is not None and not bool(t.grad.isnan().any()) for t in (g, A_log, bias))


def test_float64_stays_float64() -> None:
    x = inputs().to(dtype=torch.float64)
    A_log, bias = torch.randn(4, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    flags = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    for bound in (None, -5.0, -9.0):
        g = fla.fused_kda_gate(x.g, A_log, bias, bound, torch.float64)
        want = fla.naive_recurrent_kda(x.q, x.k, x.v, g, 2 * x.beta.sigmoid())[0]
        got = fla.chunk_kda(*tokens(x), A_log=A_log, dt_bias=bias, lower_bound=bound, **flags)[0]
        check_close("o", got, want, 1e-13)


@pytest.mark.parametrize("op", [fla.naive_recurrent_kda, fla.naive_chunk_kda])
def test_naive_forms_take_any_mixture_of_dtypes(op: Any) -> None:
    """As fla's: float32 inside, o in v's dtype."""
    x = inputs()
    q, k, v, g, beta = tokens(x)
    mixed = (q.bfloat16(), k, v.half(), g.double(), beta.bfloat16())
    assert x.initial_state is not None
    for state in (x.initial_state.bfloat16(), x.initial_state[:1]):
        o, S = op(*mixed, initial_state=state, output_final_state=True)
        want = op(
            *(t.double() for t in mixed), initial_state=state.double().expand(2, -1, -1, -1), output_final_state=True
        )
        assert o.dtype == torch.half
        check_close("o", o, want[0], 1e-3)
        check_close("state", S, want[1], 1e-12)


def test_gate_of_published_code() -> None:
    """0.4: flat input, head size third, then the bias, by position or by name."""
    g, A_log, bias = torch.randn(3, 5, 64), torch.randn(1, 1, 4, 1), torch.randn(64)
    want = fla.naive_kda_gate(g.unflatten(-1, (4, 16)), A_log, bias)
    assert torch.equal(fla.fused_kda_gate(g, A_log, 16, bias), want)
    assert torch.equal(fla.fused_kda_gate(g, A_log, 16, g_bias=bias), want)
    assert torch.equal(fla.fused_kda_gate(g, A_log, head_k_dim=16, g_bias=bias), want)
    sharp = fla.fused_kda_gate(g, A_log, 16, g_bias=bias, beta=2.0, threshold=1.0)
    check_close("beta", sharp, -A_log.exp().view(4, 1) * F.softplus((g + bias).unflatten(-1, (4, 16)), 2.0, 1.0), 1e-6)
    for wrong, error, message in (
        (lambda: fla.fused_kda_gate(g, A_log, 16, bias, 2.0), TypeError, "beta and threshold by name"),
        (lambda: fla.fused_kda_gate(g, A_log, 16, bias, torch.zeros(3, 5, 4)), TypeError, "received Tensor"),
        (lambda: fla.fused_kda_gate(g, A_log, 16, bias, g_bias=bias), ValueError, "one bias"),
        (lambda: fla.fused_kda_gate(g, A_log, dt_bias=bias, head_k_dim=16, g_bias=bias), ValueError, "one bias"),
        (lambda: fla.fused_kda_gate(g, A_log, 0), ValueError, r"H \* 0"),
        (lambda: fla.fused_kda_gate(g, A_log, 5), ValueError, r"H \* 5"),
    ):
        with pytest.raises(error, match=message):
            wrong()
    with pytest.raises(ValueError, match=r"0\.4"):
        fla.fused_kda_gate(g.unflatten(-1, (4, 16)), A_log, g_bias=bias)
    with pytest.raises(ValueError, match="A_log"):
        fla.fused_kda_gate(g.unflatten(-1, (4, 16)))


def test_the_form_over_a_pool() -> None:
    """Sequence n in its slot, read and written in place; the other slots are not touched."""
    x = inputs(B=1, lengths=(3, 1, 66))
    cu, slots = x.options["cu_seqlens"], torch.tensor([4, 0, 2], dtype=torch.int32)
    pool = torch.randn(6, 4, 16, 24)
    first = pool[slots.long()].clone()
    want = fla.fused_recurrent_kda(*tokens(x), cu_seqlens=cu, initial_state=first, output_final_state=True)
    before, out = pool.clone(), torch.empty_like(x.v)
    o, states = fla.fused_recurrent_kda_fwd(
        *tokens(x), initial_state=pool, cu_seqlens=cu, ssm_state_indices=slots, out=out
    )  # fmt: skip
    assert states is pool and o is out
    check_close("o", o, want[0], 1e-6)
    check_close("states", pool[slots.long()], want[1], 1e-6)
    rest = [1, 3, 5]
    assert torch.equal(pool[rest], before[rest])
    again = fla.fused_recurrent_kda_fwd(*tokens(x), initial_state=first, inplace_final_state=False, cu_seqlens=cu)
    check_close("o", again[0], want[0], 1e-6)
    assert again[1] is None
    fla.fused_recurrent_kda_fwd(
        *tokens(x), initial_state=first, cu_seqlens=cu
    )  # without indices, slot n is sequence n's
    check_close("in place", first, want[1], 1e-6)
    for options, message in (
        ({"num_accepted_tokens": slots}, "speculative"),
        ({"ssm_state_indices": slots.view(3, 1)}, "speculative"),
        ({"ssm_state_indices": slots, "inplace_final_state": False}, "inplace_final_state"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            fla.fused_recurrent_kda_fwd(*tokens(x), initial_state=pool, cu_seqlens=cu, **options)
    with pytest.raises(ValueError, match="the pool"):
        fla.fused_recurrent_kda_fwd(*tokens(x))
    for wrong in (
        torch.zeros(5, *x.v.shape),
        torch.zeros(x.v.shape).long(),
        torch.zeros(1, 1, 4, 24).expand(x.v.shape),
    ):
        before = pool.clone()
        with pytest.raises(ValueError, match="out: expected"):
            fla.fused_recurrent_kda_fwd(
                *tokens(x), initial_state=pool, cu_seqlens=cu, ssm_state_indices=slots, out=wrong
            )
        assert torch.equal(pool, before)


def test_a_pool_in_bfloat16() -> None:
    x = inputs(B=1, lengths=(3, 67))
    options = {"cu_seqlens": x.options["cu_seqlens"], "ssm_state_indices": torch.tensor([2, 0])}
    start = torch.randn(3, 4, 16, 24).bfloat16()
    narrow, wide = start.clone(), start.float()
    o = fla.fused_recurrent_kda_fwd(*tokens(x), initial_state=narrow, **options)[0]
    want = fla.fused_recurrent_kda_fwd(*tokens(x), initial_state=wide, **options)[0]
    check_close("o", o, want, 1e-6)
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_recurrent_form_reads_states_of_any_dtype(dtype: torch.dtype) -> None:
    x = inputs()
    assert x.initial_state is not None
    start = x.initial_state.to(dtype)
    want = fla.fused_recurrent_kda(*tokens(x), initial_state=start.float(), output_final_state=True)
    for op, options in ((fla.fused_recurrent_kda, {}), (fla.fused_recurrent_kda_fwd, {"inplace_final_state": False})):
        got = op(*tokens(x), initial_state=start, output_final_state=True, **options)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and got[1].dtype == torch.float32
    with pytest.raises(TypeError, match="float32"):  # fla's chunk form takes float32 alone
        fla.chunk_kda(*tokens(x), initial_state=start)


@pytest.mark.parametrize("op", [fla.naive_recurrent_kda, fla.naive_chunk_kda])
def test_one_initial_state_for_all(op: Any) -> None:
    x = inputs()
    assert x.initial_state is not None
    one = x.initial_state[0]
    got = op(*tokens(x), initial_state=one, output_final_state=True)
    want = op(*tokens(x), initial_state=torch.stack([one, one]), output_final_state=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_flags_may_be_none() -> None:
    """fla types them Optional; `kda` wants bools."""
    x = make_inputs(0, T=5, K=8)
    o, final = fla.chunk_kda(*tokens(x), output_final_state=None, use_qk_l2norm_in_kernel=None)  # type: ignore[arg-type]
    assert final is None and torch.equal(o, fla.chunk_kda(*tokens(x))[0])

"""States in and out: layouts, dtypes, pools with slots, states at chosen tokens, nothing shared, nothing left over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openkda.ops.kda.api import kda, kda_step
from openkda.testing.compare import rel
from openkda.testing.inputs import KDAInputs, make_inputs
from openkda.testing.runs import outputs

IMPLS = ("reference", "chunkwise")
NAN = float("nan")


def one_token(x: KDAInputs, t: int) -> tuple[Any, ...]:
    return tuple(getattr(x, n)[:, t] for n in ("q", "k", "v", "g", "beta"))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("K", "V"), [(32, 48), (32, 32)])
def test_v_first_is_the_transposed_state(impl: str, K: int, V: int) -> None:
    x = make_inputs(1, T=130, H=2, K=K, V=V)
    plain = outputs(x, impl=impl)
    flipped = x.initial_state.transpose(-1, -2).contiguous()
    got = outputs(x, impl=impl, initial_state=flipped, state_v_first=True)
    assert torch.equal(got["o"], plain["o"])
    assert torch.equal(got["S"], plain["S"].transpose(-1, -2))
    if K != V:
        with pytest.raises(ValueError, match=r"initial_state.shape: expected \[N, HV, V, K\]"):
            outputs(x, impl=impl, state_v_first=True)


@pytest.mark.parametrize("first", IMPLS)
@pytest.mark.parametrize("second", [*IMPLS, "step"])
@pytest.mark.parametrize("v_first", [False, True])
def test_handing_a_state_on_between_paths(first: str, second: str, v_first: bool) -> None:
    x = make_inputs(2, T=130, H=1, HV=2, K=16, V=24, gate="softplus")
    want = outputs(x.to(dtype=torch.float64), impl="reference")
    S0 = x.initial_state.transpose(-1, -2).contiguous() if v_first else x.initial_state
    options = {"gate": x.gate, "output_final_state": True, "state_v_first": v_first}
    a = kda(*(getattr(x, n)[:, :97] for n in ("q", "k", "v", "g", "beta")), initial_state=S0, impl=first, **options)
    if second == "step":
        state, rows = a.final_state, []
        for t in range(97, 130):
            o, state = kda_step(*one_token(x, t), state, gate=x.gate, state_v_first=v_first)
            rows.append(o)
        tail, S = torch.stack(rows, 1), state
    else:
        tokens = (getattr(x, n)[:, 97:] for n in ("q", "k", "v", "g", "beta"))
        b = kda(*tokens, initial_state=a.final_state, impl=second, **options)
        tail, S = b.output, b.final_state
    assert rel(torch.cat([a.output, tail], 1), want["o"]) < 2e-6
    assert rel(S, want["S"].transpose(-1, -2) if v_first else want["S"]) < 2e-6


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_state_is_rounded_only_at_the_door(impl: str) -> None:
    x = make_inputs(3, T=100, H=2, K=16)
    S0 = x.initial_state.bfloat16()
    got = outputs(x, impl=impl, initial_state=S0, state_dtype=torch.bfloat16)
    want = outputs(x, impl=impl, initial_state=S0.float())
    assert got["S"].dtype == torch.bfloat16
    assert torch.equal(got["o"], want["o"])
    assert torch.equal(got["S"], want["S"].bfloat16())
    o, S = kda_step(*one_token(x, 0), S0, gate=x.gate, impl=impl)
    assert S.dtype == torch.bfloat16
    assert rel(o, want["o"][:, 0]) < 2e-6


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("length", [1, 3, 64, 65])
def test_pool_with_slots(impl: str, index: torch.dtype, length: int) -> None:
    """Slots read and written in place; -1 starts from zeros and keeps nothing; no other slot is read or touched."""
    x = make_inputs(4, lengths=(length, 2, length), H=1, HV=2, K=8, V=16)
    states = x.initial_state.clone()
    states[1] = 0
    want = outputs(x, impl=impl, initial_state=states)
    pool = torch.full((6, 2, 8, 16), NAN)
    pool[4], pool[2] = states[0], states[2]
    slots = torch.tensor([4, -1, 2], dtype=index)
    with torch.no_grad():
        out = kda(
            x.q, x.k, x.v, x.g, x.beta, **(x.kwargs() | {"initial_state": pool, "state_indices": slots}), impl=impl
        )
    assert torch.equal(out.output, want["o"])
    assert out.final_state is pool
    assert torch.equal(pool[4], want["S"][0])
    assert torch.equal(pool[2], want["S"][2])
    assert bool(pool[[0, 1, 3, 5]].isnan().all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("v_first", [False, True])
def test_step_on_a_strided_pool_with_strided_slots(impl: str, v_first: bool) -> None:
    """A view into layered pools, slots as a column of a table: the same as contiguous, and written nowhere else."""
    x = make_inputs(5, B=4, T=1, H=2, K=8, V=16)
    S0 = x.initial_state.transpose(-1, -2).contiguous() if v_first else x.initial_state
    big = torch.full((7, 3, *S0.shape[1:]), NAN)
    pool = big[:, 1]
    table = torch.full((4, 8), 99)
    table[:, 0] = torch.tensor([5, -1, 0, 3])
    for n, slot in ((0, 5), (2, 0), (3, 3)):
        pool[slot] = S0[n]
    before = big.clone()
    o, same = kda_step(*one_token(x, 0), pool, gate=x.gate, state_indices=table[:, 0], state_v_first=v_first, impl=impl)
    want_o, want_S = kda_step(*one_token(x, 0), S0, gate=x.gate, state_v_first=v_first, impl=impl)
    assert same is pool
    assert torch.equal(o[[0, 2, 3]], want_o[[0, 2, 3]])
    assert not bool(o[1].any())
    for n, slot in ((0, 5), (2, 0), (3, 3)):
        assert torch.equal(pool[slot], want_S[n])
        before[slot, 1] = want_S[n]
    assert torch.equal(big.nan_to_num(77.0), before.nan_to_num(77.0))


def test_one_token_prompt_in_a_dirty_pool_starts_from_zero() -> None:
    x = make_inputs(6, lengths=(1,), H=2, K=8, initial_state=False)
    pool = torch.full((3, 2, 8, 8), NAN)
    options = x.kwargs() | {"initial_state": pool, "state_indices": torch.tensor([-1])}
    with torch.no_grad():
        out = kda(x.q, x.k, x.v, x.g, x.beta, **options)
    assert torch.equal(out.output, outputs(x)["o"])
    assert bool(pool.isnan().all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [False, True])
def test_states_at_chosen_tokens(impl: str, packed: bool) -> None:
    """Each equals the final state of a run that ends there; outputs stay the same; gradients flow through them."""
    shape: dict[str, Any] = {"lengths": (70, 0, 1, 0, 130)} if packed else {"B": 2, "T": 130}
    x = make_inputs(7, H=1, HV=2, K=8, V=16, gate="softplus", **shape).to(dtype=torch.float64)
    rows = [69, 70, 71 + 63, 0, 200, 71 + 64, 0] if packed else [0, 63, 64, 129, 130, 130 + 77, 130 + 129, 64]
    positions = torch.tensor(rows)
    options = x.kwargs() | {"state_positions": positions}
    y = x.to().requires_grad_()
    out = kda(y.q, y.k, y.v, y.g, y.beta, impl=impl, **(y.kwargs() | {"state_positions": positions}))
    assert rel(out.output, outputs(x, impl="reference")["o"]) < 1e-12
    starts = x.options["cu_seqlens"].tolist()[:-1] if packed else [0, 130]
    for p, S in zip(rows, out.states_at, strict=True):
        n = max(i for i, a in enumerate(starts) if a <= p)
        b, a = (0, starts[n]) if packed else (n, 0)
        t = p if packed else p - starts[n]
        tokens = (getattr(x, name)[b : b + 1, a : t + 1] for name in ("q", "k", "v", "g", "beta"))
        single = kda(*tokens, gate=x.gate, initial_state=x.initial_state[n : n + 1], output_final_state=True,
                     impl="reference")  # fmt: skip
        assert rel(S, single.final_state[0]) < 1e-12
    weight = torch.randn(out.states_at.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = torch.autograd.grad((out.states_at * weight).sum(), [y.k, y.v, y.g, y.initial_state])
    z = x.to().requires_grad_()
    ref = kda(z.q, z.k, z.v, z.g, z.beta, impl="reference", **(z.kwargs() | {"state_positions": positions}))
    want = torch.autograd.grad((ref.states_at * weight).sum(), [z.k, z.v, z.g, z.initial_state])
    assert all(rel(g, w) < 1e-10 for g, w in zip(got, want, strict=True))
    assert options["state_positions"] is positions


@pytest.mark.parametrize("impl", IMPLS)
def test_no_positions_is_an_empty_answer(impl: str) -> None:
    x = make_inputs(8, T=20, H=1, K=8, V=16)
    with torch.no_grad():
        out = kda(
            x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), state_positions=torch.tensor([], dtype=torch.int64), impl=impl
        )
    assert out.states_at.shape == (0, 1, 8, 16)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("B, T", [(0, 20), (0, 0), (2, 0)])
def test_nothing_in_gives_nothing_out(impl: str, B: int, T: int) -> None:
    x = make_inputs(8, B=2, T=20, H=1, K=8, V=16)
    tokens = [t[:B, :T] for t in (x.q, x.k, x.v, x.g, x.beta)]
    positions = torch.tensor([], dtype=torch.int64)
    with torch.no_grad():
        out = kda(*tokens, gate=x.gate, state_positions=positions, output_final_state=True, impl=impl)
    assert (out.output.shape, out.final_state.shape) == ((B, T, 1, 16), (B, 1, 8, 16))
    assert out.states_at.shape == (0, 1, 8, 16) and not bool(out.final_state.any())


@pytest.mark.parametrize("impl", IMPLS)
def test_inputs_are_left_alone_and_results_share_nothing(impl: str) -> None:
    for gate in ("bounded", "softplus", None):
        x = make_inputs(9, T=64, H=1, K=16, gate=gate)  # one head, one chunk: views could alias most easily
        before = {n: t.clone() for n, t in x.tensors().items()}
        runs = []
        for _ in range(2):
            y = x.to().requires_grad_()
            y.q, y.k, y.v, y.g, y.beta = (t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.beta))
            out = kda(y.q, y.k, y.v, y.g, y.beta, **y.kwargs(), impl=impl)
            grads = torch.autograd.grad((out.output, out.final_state), (y.q, y.k, y.v, y.g, y.beta), (x.do, x.dS))
            runs.append((out.output, out.final_state, *grads))
        assert all(torch.equal(t, before[n]) for n, t in x.tensors().items())
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        places = [t.untyped_storage().data_ptr() for run in runs for t in run]
        assert len(set(places)) == len(places)
        assert not set(places) & {t.untyped_storage().data_ptr() for t in x.tensors().values()}
    state = x.initial_state.clone()
    _, new = kda_step(*one_token(x, 0), state, impl=impl)
    assert torch.equal(state, x.initial_state)
    assert new.data_ptr() != state.data_ptr()


def test_a_pool_whose_slots_are_the_same_memory_is_refused() -> None:
    x = make_inputs(8, B=2, T=1, H=1, K=8, V=16)
    pool = torch.zeros(1, 1, 8, 16).expand(4, -1, -1, -1)
    tokens = [t[:, 0] for t in (x.q, x.k, x.v, x.g, x.beta)]
    with torch.no_grad(), pytest.raises(ValueError, match="slots are memory of their own"):
        kda_step(*tokens, pool, gate=x.gate, state_indices=torch.tensor([0, 1]))


@pytest.mark.parametrize("value", [None, 1, [1.0], torch.zeros(())])
def test_what_is_no_tensor_of_rows_is_named(value: object) -> None:
    x = make_inputs(8, B=2, T=1, H=1, K=8, V=16)
    with pytest.raises((TypeError, ValueError), match=r"^q"):
        kda(value, x.k, x.v, x.g, x.beta)
    good = [t[:, 0] for t in (x.q, x.k, x.v, x.g, x.beta)] + [torch.zeros(2, 1, 8, 16)]
    for i, name in enumerate(("q", "k", "v", "g", "beta", "state")):
        with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor"):
            kda_step(*good[:i], value, *good[i + 1 :])

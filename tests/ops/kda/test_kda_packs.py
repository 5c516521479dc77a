"""Packed sequences: each member equals the member alone, whatever its length and its neighbours."""

from __future__ import annotations

import itertools

import pytest
import torch

from openkda.ops.kda.api import kda
from openkda.testing.inputs import KDAInputs, make_inputs
from openkda.testing.runs import check_errors, gradients, outputs

IMPLS = ("reference", "chunkwise")
TOKENS = ("q", "k", "v", "g", "beta", "do")


def member(x: KDAInputs, n: int) -> KDAInputs:
    a, b = x.options["cu_seqlens"][n : n + 2].tolist()
    options = {k: v for k, v in x.options.items() if k != "cu_seqlens"}
    tokens = {t: getattr(x, t)[:, a:b] for t in TOKENS}
    state = None if x.initial_state is None else x.initial_state[n : n + 1]
    return KDAInputs(**tokens, gate=x.gate, initial_state=state, dS=x.dS[n : n + 1], options=options)


def one_by_one(x: KDAInputs, impl: str) -> dict[str, torch.Tensor]:
    """Results of every member alone, put together: tokens along T, states along N, gate gradients summed."""
    runs = [gradients(member(x, n), impl=impl) for n in range(x.options["cu_seqlens"].numel() - 1)]
    out = {}
    for name in runs[0]:
        parts = [r[name] for r in runs]
        if name in ("dA_log", "ddt_bias"):
            out[name] = torch.stack(parts).sum(0)
        else:
            out[name] = torch.cat(parts, 0 if name in ("S", "dinitial_state") else 1)
    return out


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "lengths",
    [(5, 64, 1, 37, 128, 3), (1, 1, 1, 100, 1), (0, 0, 2), (3, 1, 0, 0), (0,), (16, 17, 15), (200, 0, 1, 64, 65)],
    ids=str,
)
def test_pack_equals_members_alone(impl: str, lengths: tuple[int, ...]) -> None:
    for gate, state in (("bounded", True), ("softplus", False), (None, True)):
        x = make_inputs(3, lengths=lengths, H=2, HV=4, K=16, V=24, gate=gate, initial_state=state)
        check_errors(gradients(x, impl=impl), one_by_one(x, impl), 5e-6, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_rows_in_a_prefill_pack(dtype: torch.dtype) -> None:
    for gate in ("bounded", "softplus"):
        x = make_inputs(4, lengths=(1, 1, 1, 100, 1), H=2, K=32, gate=gate).to(dtype=dtype)
        want = gradients(x.to(dtype=torch.float64), impl="reference")
        got = gradients(x, impl="chunkwise")
        check_errors(got, want, 2e-5 if dtype == torch.float32 else 4e-3, 1e-4 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_content_of_one_member_changes_no_bit_of_another(impl: str) -> None:
    x = make_inputs(5, lengths=(5, 64, 1, 37, 128, 3), H=1, HV=2, K=16)
    y = make_inputs(6, lengths=(5, 64, 1, 37, 128, 3), H=1, HV=2, K=16)
    for t in TOKENS:
        getattr(y, t)[:, :70] = getattr(x, t)[:, :70]
        getattr(y, t)[:, 107:] = getattr(x, t)[:, 107:]
    y.gate, y.initial_state, y.dS = x.gate, x.initial_state, x.dS
    a, b = gradients(x, impl=impl), gradients(y, impl=impl)
    for n in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not torch.equal(a[n][:, 70:107], b[n][:, 70:107])
        assert torch.equal(a[n][:, :70], b[n][:, :70])
        assert torch.equal(a[n][:, 107:], b[n][:, 107:])
    for n in ("S", "dinitial_state"):
        assert torch.equal(a[n][[0, 1, 2, 4, 5]], b[n][[0, 1, 2, 4, 5]])


def test_two_thousand_documents() -> None:
    """More sequences than tokens a chunk holds; a random sample is checked one by one."""
    gen = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(0, 4, (2000,), generator=gen).tolist())
    x = make_inputs(7, lengths=lengths, H=1, HV=2, K=8)
    got = outputs(x, impl="chunkwise")
    cu = x.options["cu_seqlens"].tolist()
    for n in torch.randint(0, 2000, (30,), generator=gen).tolist():
        want = outputs(member(x, n), impl="reference")
        check_errors({"o": got["o"][:, cu[n] : cu[n + 1]], "S": got["S"][n : n + 1]}, want, 5e-6)


def test_batch_row_pack_member_and_pieces_agree() -> None:
    """The same 64 tokens alone, as row 3 of 8, inside a pack of 8, and as 40 + 24; no state and a zero state are one thing."""
    x = make_inputs(8, B=8, T=64, H=2, K=32, gate="softplus")
    row = {t: getattr(x, t)[3:4] for t in ("q", "k", "v", "g", "beta")}
    S = x.initial_state[3:4]
    alone = kda(**row, gate=x.gate, initial_state=S, output_final_state=True)
    batch = outputs(x)
    flat = {t: getattr(x, t).flatten(0, 1).unsqueeze(0) for t in row}
    cu = torch.arange(0, 513, 64)
    pack = kda(**flat, gate=x.gate, initial_state=x.initial_state, cu_seqlens=cu, output_final_state=True)
    first = kda(**{t: r[:, :40] for t, r in row.items()}, gate=x.gate, initial_state=S, output_final_state=True)
    last = kda(
        **{t: r[:, 40:] for t, r in row.items()}, gate=x.gate, initial_state=first.final_state, output_final_state=True
    )
    want = {"o": alone.output, "S": alone.final_state}
    check_errors({"o": batch["o"][3:4], "S": batch["S"][3:4]}, want, 2e-6)
    check_errors({"o": pack.output[:, 192:256], "S": pack.final_state[3:4]}, want, 2e-6)
    check_errors({"o": torch.cat([first.output, last.output], 1), "S": last.final_state}, want, 2e-6)
    zeros = outputs(x, initial_state=torch.zeros_like(x.initial_state))
    none = outputs(x, initial_state=None)
    assert torch.equal(zeros["o"], none["o"])
    assert torch.equal(zeros["S"], none["S"])


@pytest.mark.parametrize("seed", range(12))
def test_any_cut_gives_the_same(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    x = make_inputs(9, T=150, H=1, HV=2, K=16, gate=("bounded", "softplus", None)[seed % 3])
    cuts = [0, *sorted(set(torch.randint(1, 150, (1 + seed % 5,), generator=gen).tolist())), 150]
    state, rows = x.initial_state, []
    for a, b in itertools.pairwise(cuts):
        tokens = (getattr(x, t)[:, a:b] for t in ("q", "k", "v", "g", "beta"))
        out = kda(*tokens, gate=x.gate, initial_state=state, output_final_state=True)
        state = out.final_state
        rows.append(out.output)
    check_errors({"o": torch.cat(rows, 1), "S": state}, outputs(x), 2e-6)


def test_torchs_default_device_does_not_matter() -> None:
    """Index tables are made where they are used: a default of another device must not catch them."""
    x = make_inputs(3, T=0, H=1, K=16, lengths=(5, 70, 1))
    want = outputs(x, impl="chunkwise")["o"]
    with torch.device("meta"):
        got = outputs(x, impl="chunkwise")["o"]
    assert torch.equal(got, want)

"""Chunks of 64 prepared for the backward on Hopper, for every gate, on a CPU with torch under the source, against float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
import gluon_clocks_on_cpu as on_cpu
from gluon_on_cpu import Value

from openkda.ops.kda.hopper import TRITON_RELEASE, _triton_release

if _triton_release() != TRITON_RELEASE:
    pytest.skip(f"Gluon of Triton {TRITON_RELEASE}", allow_module_level=True)
import test_hopper

from openkda.ops.kda.hopper import apart, chains, factors, instructions, levels, prepare

F64 = torch.float64
SCALE = 0.088
CASES: dict[str, dict[str, Any]] = {
    "bounded, partial chunk": {"gate": 2},
    "softplus, partial chunk": {"gate": 1},
    "softplus, slow": {"gate": 1, "shift": -4.0, "T": 64},
    "softplus, fast": {"gate": 1, "shift": 4.0, "T": 64},
    "log decays": {"gate": 0, "T": 100},
    "log decays, slow": {"gate": 0, "T": 64, "spread": 0.01},
    "log decays, all forgotten": {"gate": 0, "T": 64, "spread": 100.0},
    "softplus, pack with empty and partial members": {"gate": 1, "T": 194, "HV": 1, "cu": [0, 5, 5, 75, 194]},
}


@pytest.mark.parametrize("name", CASES)
def test_on_a_cpu(name: str) -> None:
    found = errors(**CASES[name])
    bad = {n: e for n, e in found.items() if not e <= (1e-6 if n in ("decay", "norm") else 1e-3)}
    assert found and not bad, bad


def errors(
    gate: int,
    T: int = 150,
    shift: float = 0.0,
    spread: float = 1.0,
    cu: list[int] | None = None,
    HV: int = 2,
    H: int = 1,
) -> dict[str, float]:
    """The largest over chunks and heads, of every operand."""
    gen = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(shape, generator=gen)  # noqa: E731
    q, k, z = (
        rand(1, T, H, 128).bfloat16(),
        rand(1, T, H, 128).bfloat16(),
        (spread * rand(1, T, HV, 128) + shift).bfloat16(),
    )
    beta, A_log, dt_bias = rand(1, T, HV).bfloat16(), 0.3 * rand(HV), 0.3 * rand(HV, 128)
    z = -z.abs() if gate == 0 else z
    members = list(pairwise([0, T] if cu is None else cu))
    slots, tiles = (-(-T // c) if cu is None else T // c + len(members) for c in (64, 16))
    nan = lambda *shape, dtype=torch.float32: torch.full(shape, float("nan"), dtype=dtype)  # noqa: E731
    wide, square = nan(slots * HV * 192, 128, dtype=torch.float16), nan(slots * HV * 192, 32, dtype=torch.float16)
    decay, norm = nan(slots * HV, 128), nan(HV, tiles, 3, 16)
    room = torch.zeros(4 * 64 + 8, dtype=torch.int32)  # ranks, and a counter beside them
    names = on_cpu.load(instructions, factors, apart, chains, prepare, levels)
    tokens = lambda t: on_cpu.Matrix(t.view(T, -1), (64, 128))  # noqa: E731
    sizes = [Value(torch.tensor(i)) for i in (HV, HV // H, T, len(members), tiles, SCALE)]
    offsets = beta if cu is None else torch.tensor(cu)
    arguments = [tokens(q), tokens(k), tokens(z), on_cpu.Matrix(wide, (64, 128)), on_cpu.Matrix(square, (32, 32)), decay,
                 room[4:], beta, A_log, dt_bias, offsets, norm, *sizes]  # fmt: skip
    if gate == 2:
        arguments += [Value(torch.tensor(-5.0)), cu is not None, 16]
        on_cpu.run(names["kda_prepare_backward_kernel"], slots * HV, arguments)
    else:
        on_cpu.run(names["kda_prepare_levels_kernel"], slots * HV, [*arguments, cu is not None, 16, False, True, gate])
    worst: dict[str, float] = {}
    slot = 0
    for i, (start, end) in enumerate(members):
        for c in range(-(-(end - start) // 64)):
            at = slice(start + 64 * c, min(end, start + 64 * c + 64))
            first = (0 if cu is None else start // 16 + i) + 4 * c
            for h in range(HV):
                group = h // (HV // H)
                want = _operands(
                    q[0, at, group], k[0, at, group], z[0, at, h], beta[0, at, h], A_log[h], dt_bias[h], gate
                )
                ws = (slot + c) * HV + h
                got = {n: wide[ws * 192 + 64 * j :][:64] for j, n in enumerate(("Kt", "Qt", "Kh"))}
                got |= {"T": _whole(square, ws * 192), "M": _whole(square, ws * 192 + 96), "decay": decay[ws]}
                got["norm"] = norm[h, first : first + 4, :2].transpose(0, 1).reshape(2, -1)[:, : at.stop - at.start]
                for n, x in got.items():
                    off = (x.double() - want[n]).norm() / want[n].norm().clamp(min=1e-9)
                    worst[n] = max(worst.get(n, 0.0), off.item() if bool(torch.isfinite(x).all()) else math.inf)
        slot += -(-(end - start) // 64)
    return worst


def _whole(square: Tensor, at: int) -> Tensor:
    """Of three quarters, the one that is 0 put in."""
    top = torch.cat([square[at : at + 32], torch.zeros(32, 32)], 1)
    return torch.cat([top, torch.cat([square[at + 32 : at + 64], square[at + 64 : at + 96]], 1)])


def _operands(q: Tensor, k: Tensor, z: Tensor, beta: Tensor, A_log: Tensor, dt: Tensor, gate: int) -> dict[str, Tensor]:
    n = q.shape[0]
    pad = lambda x: torch.cat([x, x.new_zeros(64 - n, *x.shape[1:])])  # noqa: E731
    q, k, z, beta = q.double(), k.double(), z.double() + (dt.double() if gate else 0.0), pad(beta.double().sigmoid())
    norms = torch.stack([(x.square().sum(-1) + 1e-6).rsqrt() for x in (k, q)])
    rate = A_log.double().exp()
    g = (z, -rate * F.softplus(z), -5.0 * torch.sigmoid(rate * z))[gate] / math.log(2.0)
    G = pad(g.clamp(min=-57.7)).cumsum(0)
    k, q = pad(k * norms[0, :, None]), pad(q * norms[1, :, None] * SCALE)
    decay = torch.exp2((G[:, None] - G[None]).clamp(max=0.0))
    L = torch.einsum("ic,ijc,jc->ij", k, decay, k).tril(-1)
    M = torch.einsum("ic,ijc,jc->ij", q, decay, k).tril()
    inverse = torch.linalg.inv(torch.eye(64, dtype=F64) + beta[:, None] * L) * beta
    return {"Kt": k * torch.exp2(G), "Qt": q * torch.exp2(G), "Kh": k * torch.exp2(G[-1] - G), "M": M, "T": inverse,
            "decay": torch.exp2(G[-1]), "norm": norms}  # fmt: skip


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("norms", [False, True])  # of the forward and of the backward
@pytest.mark.parametrize("which", ["bounded", "softplus", "log decays"])
def test_three_programs_fit_an_sm(which: str, norms: bool, varlen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    known = test_hopper._signature() | {"norm_ptr": "*fp32", "tiles": "i32"}
    monkeypatch.setattr(test_hopper, "_signature", lambda: known)
    constants: dict[str, Any] = {"VARLEN": varlen, "NP": 64}
    kernel = prepare.kda_prepare_backward_kernel if norms else prepare.kda_prepare_kernel
    if which != "bounded":
        kernel = levels.kda_prepare_levels_kernel
        constants |= {"LAST_FIRST": False, "NORMS": norms, "GATE": 1 if which == "softplus" else 0}
    elif not norms:
        constants |= {"LAST_FIRST": False, "APART": True}
    options = {"maxnreg": 168} if which != "bounded" or not norms else {}
    counts, shared, remarks = test_hopper._compile(kernel, constants, **options)
    assert counts["spill stores"] <= 16 and counts["spill loads"] <= 16, remarks
    assert "Used 16" in remarks and 3 * (shared + 1024) <= 228 * 1024, remarks

"""The backward's products on Hopper: on a CPU with torch under their source, and on the card, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import gluon_on_cpu
from gluon_aot import compiled
from gradient_stage import spans

from openkda.ops.kda.hopper import TRITON_RELEASE, _triton_release

if _triton_release() != TRITON_RELEASE:
    pytest.skip(f"Gluon of Triton {TRITON_RELEASE}", allow_module_level=True)
from openkda.ops.kda.hopper import gradient_tiles, instructions, products
from openkda.ops.kda.hopper.backward import REGISTERS

CASES: dict[str, dict[str, Any]] = {
    "one chunk": {"T": 64},
    "partial chunk, batch": {"T": 150, "B": 2},
    "64 key channels": {"T": 70, "BK": 64},
    "beta of either sign": {"T": 70, "sigmoid": False},
    "pack with empty and partial members": {"T": 130, "cu": [0, 5, 5, 75, 130]},
}
LIMITS = {"dv": 2e-3} | dict.fromkeys(("both", "dbeta", "qdq", "kdk"), 1e-5)  # others: float16's own rounding, 2.1e-4


def make(
    T: int, B: int = 1, HV: int = 2, BK: int = 128, cu: list[int] | None = None, sigmoid: bool = True
) -> SimpleNamespace:
    gen = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(shape, generator=gen)  # noqa: E731
    power = lambda *shape: torch.exp2(torch.randint(-6, 7, shape, generator=gen).float())  # noqa: E731
    nan = lambda *shape, dtype=torch.float32: torch.full(shape, float("nan"), dtype=dtype)  # noqa: E731
    slots, tiles = (B * -(-T // c) if cu is None else T // c + len(cu) - 1 for c in (64, 16))
    x = SimpleNamespace(
        sigmoid=sigmoid,
        T=T,
        B=B,
        HV=HV,
        BK=BK,
        cu=cu,
        slots=slots,
        tiles=tiles,
        N=B if cu is None else len(cu) - 1,
        scale=0.3,
    )
    x.v, x.o, x.beta = rand(B, T, HV, 128).bfloat16(), rand(B, T, HV, 128).bfloat16(), rand(B, T, HV).bfloat16()
    x.do = (rand(B, T, HV, 128) * power(B, T, HV, 1)).bfloat16()
    x.u, x.dd = rand(B, T, HV, 128).half(), rand(B, T, HV, 128).half()
    x.s, x.ds = rand(HV, slots, 128, BK).half(), rand(HV, slots, 128, BK).half()
    x.u_unit, x.dd_unit = power(HV, tiles, 2, 16), power(HV, tiles, 2, 16)
    x.s_unit, x.ds_unit = power(HV, slots, 2), power(HV, slots, 2)
    x.dv, x.d = nan(B, T, HV, 128, dtype=torch.bfloat16), nan(HV, slots, 2, 64, 64, dtype=torch.float16)
    x.wide, x.both = nan(HV, slots, 3, 64, BK, dtype=torch.float16), nan(HV, slots, BK)
    x.unit, x.dbeta, x.rows = nan(HV, slots, BK // 64, 4), nan(B, T, HV), nan(2, B, T, HV)
    return x


def launches(x: SimpleNamespace) -> list[tuple[str, int, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]]:
    cu = None if x.cu is None else torch.tensor(x.cu, device=x.u.device)
    v, do, sizes = x.v.stride()[:3], x.do.stride()[:3], (x.T, x.N, x.slots, x.tiles, x.scale)
    shared = {"HV": x.HV, "BK": x.BK, "PACKED": cu is not None}
    states = (cu, x.do, x.u, x.dd, x.s, x.ds, x.u_unit, x.dd_unit, x.s_unit, x.ds_unit, x.wide, x.both, x.unit)
    pairs = (x.v, x.beta, cu, x.o, x.do, x.u, x.dd, x.u_unit, x.dd_unit, x.dv, x.d, x.unit, x.dbeta, x.rows)
    numbers, beta = (*v, *x.beta.stride(), *do, x.B, *sizes), {"SIGMOID": x.sigmoid, "FLOOR": 1e-12}
    return [
        ("states_kernel", x.BK // 64 * x.slots * x.HV, states, (*do, *sizes), shared),
        ("pairs_kernel", x.slots * x.HV, pairs, numbers, shared | beta),
    ]


def errors(x: SimpleNamespace) -> dict[str, float]:
    """Of everything written, relative to float64; what belongs to tokens that do not exist is 0."""
    sums: dict[str, Tensor] = {}

    def add(name: str, got: Tensor, want: Tensor) -> None:
        sums[name] = sums.get(name, 0.0) + torch.stack([(got.double() - want).square().sum(), want.square().sum()])

    units = torch.zeros(2, x.B, x.T, x.HV, 2, dtype=torch.float64)
    for b, s, e, tile in spans(x.T, x.B, x.cu, 16):
        for i, unit in enumerate((x.u_unit, x.dd_unit)):
            units[i, b, s:e] = unit[:, tile, :, : e - s].permute(2, 0, 1).double()
    halves = lambda t: t.double().repeat_interleave(64, -1)  # noqa: E731
    for b, s, e, slot in spans(x.T, x.B, x.cu, 64):
        n = e - s
        for h in range(x.HV):
            U, D, do = (
                x.u[b, s:e, h] * halves(units[0, b, s:e, h]),
                x.dd[b, s:e, h] * halves(units[1, b, s:e, h]),
                x.do[b, s:e, h].double(),
            )
            S, dS = (
                x.s[h, slot] * halves(x.s_unit[h, slot])[:, None],
                x.ds[h, slot] * halves(x.ds_unit[h, slot])[:, None],
            )
            unit, d, wide = x.unit[h, slot].double(), x.d[h, slot].double(), x.wide[h, slot]
            assert not d[:, n:].any() and not d[:, :, n:].any() and not wide[:, n:].any() and float(d.abs().max()) < 2
            add("dM", d[0, :n, :n] * unit[0, 0], (x.scale * do @ U.T).tril())
            add("dA", d[1, :n, :n] * unit[0, 0], -(D @ U.T).tril(-1))
            for i, want in enumerate((x.scale * do @ S, -D @ S, U @ dS)):
                add(("d(qd)", "d(kd)", "d(ke)")[i], wide[i, :n] * halves(unit[:, i + 1]), want)
            beta, along = x.beta[b, s:e, h].double(), (D * U).sum(1)
            slope = torch.ones_like(beta)
            if x.sigmoid:
                beta = torch.sigmoid(beta)
                slope = beta * (1.0 - beta)
            add("both", x.both[h, slot], (S * dS).sum(0))
            add("dv", x.dv[b, s:e, h], D)
            add("dbeta", x.dbeta[b, s:e, h], along / beta**2 * slope)
            add("qdq", x.rows[0, b, s:e, h], (do * x.o[b, s:e, h].double()).sum(1))
            add("kdk", x.rows[1, b, s:e, h], 2.0 * along / beta - (D * x.v[b, s:e, h].double()).sum(1))
    return {name: float((a / b).sqrt()) for name, (a, b) in sums.items()}


def check(x: SimpleNamespace) -> None:
    found = errors(x)
    assert all(found[n] <= LIMITS.get(n, 4e-4) for n in found), found


@pytest.mark.parametrize("name", CASES)
def test_source_on_a_cpu(name: str) -> None:
    x, kernels = make(**CASES[name]), gluon_on_cpu.load(instructions, gradient_tiles, products)
    for kernel, programs, tensors, numbers, constants in launches(x):
        gluon_on_cpu.run(kernels[kernel], programs, tensors, numbers, constants)
    check(x)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name, programs", [("states_kernel", 2), ("pairs_kernel", 3)])
def test_programs_fit_an_sm(name: str, programs: int, packed: bool) -> None:
    types = dict.fromkeys(("v_p", "beta_p", "o_p", "do_p", "dv_p", "dbeta_p"), "*bf16") | {
        "scale": "fp32",
        "cu_p": "*i64",
    }
    types |= dict.fromkeys(("u_p", "dd_p", "s_p", "ds_p", "d_p", "wide_p"), "*fp16")
    constants = {"HV": 96, "BK": 128, "PACKED": packed, "SIGMOID": True, "FLOOR": 1e-12}
    steps = ("svb", "svt", "svh", "sob", "sot", "soh")
    moved, shared = compiled(getattr(products, name), constants, types, steps, maxnreg=REGISTERS)
    assert moved <= 60 and programs * (shared + 1024) <= 228 * 1024, (moved, shared)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_the_card(name: str) -> None:
    x = make(**CASES[name])
    x = SimpleNamespace(**{n: t.cuda() if isinstance(t, Tensor) else t for n, t in vars(x).items()})
    for kernel, programs, tensors, numbers, constants in launches(x):
        getattr(products, kernel)[(programs,)](*tensors, *numbers, *constants.values(), num_warps=4)
    check(SimpleNamespace(**{n: t.cpu() if isinstance(t, Tensor) else t for n, t in vars(x).items()}))

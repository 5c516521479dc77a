"""What the kernels' gradients must hold, on any device: the interpreter on a CPU (float32) and the GPU run the same checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.ops.kda.api import kda
from openkda.ops.kda.gate import BoundedGate, SoftplusGate
from openkda.testing.cases import KDACase
from openkda.testing.compare import rel_grad
from openkda.testing.inputs import KDAInputs, make_inputs
from openkda.testing.runs import gradients

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOKENS = ("q", "k", "v", "g", "beta")
SIZES: dict[str, Any] = {"H": 1, "HV": 2, "K": 16, "V": 24}
"""Of most checks: every other combination of sizes and options is seven kernels to compile on a GPU, which takes longer than
the check."""

# Goals against float64 on the same rounded inputs. 16 bits, measured on an H200: 2e-3 to 4e-3 of each, of which the
# rounding of the result is 1.7e-3 (bfloat16). A gate's or beta's gradient is a difference of two such numbers.
_NAMES = ("dq", "dk", "dv", "dinitial_state", "dg", "dbeta", "dA_log", "ddt_bias")
_WIDE = dict(zip(_NAMES, (6e-3, 6e-3, 6e-3, 6e-3, 1.2e-2, 1.2e-2, 6e-3, 6e-3), strict=True))
# Float32, three-term operands: sums of float32. Parameter gradients cancel over tokens (1.7e-4 at worst in the case list).
_EXACT = dict(zip(_NAMES, (2e-5, 2e-5, 2e-5, 2e-5, 1e-4, 1e-4, 5e-4, 2e-4), strict=True))


_NEAR = {"dA_log": 1.2e-2, "ddt_bias": 1.2e-2}
"""Keys of one direction in 16 bits: what their rounding (2^-12 of kd and ke) leaves in a chunk's sum is common to the gates of
its 64 tokens. 96 heads of 512 tokens 3.2e-3 at worst; one head of 246 tokens that hardly forget, whose dt_bias has 7e-4 of
dq's size, 6.4e-3 in float16 on an H200. `triton_exact` holds the limits of float32."""


def limits(dtype: torch.dtype, near_equal: bool = False) -> dict[str, float]:
    return _EXACT if dtype == F32 else _WIDE | (_NEAR if near_equal else {})


def reference(x: KDAInputs, **options: Any) -> dict[str, Tensor]:
    """By the chunk form in float64, itself held to the token loop to 1e-12; it is twenty times faster."""
    return gradients(x.to(dtype=torch.float64), impl="chunkwise", **options)


CHANCE = 6e-3
"""16 bits: a gate's parameters sum one number a token and channel, each off by about 1e-3 of itself, and the sum is off by the
limit's share of the root of their squares, whatever it is itself. One head of 128 tokens can cancel to a tenth of that root
by chance: in pack64-64-K64V24-softplus-random-x1-near_equal the sum is 0.010, the root 0.131 and the sum of absolute values
4.6, so 4e-2 of the sum is 3.7e-3 of the root. Many heads do not (test_goal_accuracy holds 6e-3 of the sum)."""


def spread(x: KDAInputs, want: dict[str, Tensor]) -> dict[str, float]:
    """Root of the squares of what is summed up to the gradients of the gate's parameters."""
    if x.gate is None or x.gate.A_log is None:
        return {}
    y = x.to(dtype=torch.float64)
    assert y.gate is not None and y.gate.dt_bias is not None
    z, dz = y.g + y.gate.dt_bias, want["dg"]
    by_rate = dz * z if isinstance(y.gate, BoundedGate) else dz * F.softplus(z) / z.sigmoid()
    return {"dA_log": by_rate.norm().item(), "ddt_bias": dz.norm().item()}


def check_gradients(
    name: str,
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    limit: dict[str, float],
    spread: dict[str, float] | None = None,
) -> None:
    found = {n: rel_grad(got[n], want[n], want["dq"]) for n in want if n in limit}
    bad = {n: e for n, e in found.items() if not e <= limit[n]}
    for n, size in (spread or {}).items():
        if n in bad and (got[n].double() - want[n]).norm().item() <= CHANCE * size:
            del bad[n]
    assert found and not bad, f"{name}: relative errors above the limit: " + ", ".join(
        f"{n} {e:.3g} (limit {limit[n]:g})" for n, e in bad.items()
    )


def hold(name: str, x: KDAInputs, got: dict[str, Tensor], want: dict[str, Tensor], near_equal: bool = False) -> None:
    """The limits of x's dtype, one head's chance included."""
    check_gradients(name, got, want, limits(x.q.dtype, near_equal), None if x.q.dtype == F32 else spread(x, want))


def check_case(case: KDACase, device: str, dtype: torch.dtype, impl: str = "triton") -> None:
    x = case.inputs().to(dtype=dtype, device=device)
    got, want = gradients(x, impl=impl), reference(x)
    hold(case.id, x, got, want, case.keys == "near_equal")
    for n, t in x.tensors().items():
        assert got[f"d{n}"].dtype == t.dtype and got[f"d{n}"].shape == t.shape, n


def check_packs(device: str, dtype: torch.dtype, lengths: tuple[int, ...] = (0, 1, 18, 0, 2)) -> None:
    """Members that are empty, of one token, with a partial last chunk; grouped heads; every member as if alone."""
    x = make_inputs(1, lengths=lengths, **SIZES, gate="bounded").to(dtype=dtype, device=device)
    got = gradients(x, impl="triton")
    check_gradients("pack", got, reference(x), limits(dtype))
    start = 0
    for n, length in enumerate(lengths):
        part = slice(start, start + length)
        start += length
        if length == 0:  # the state goes through
            assert torch.equal(got["dinitial_state"][n], x.dS[n])
        elif length == max(lengths):
            assert x.initial_state is not None
            options = {k: v for k, v in x.options.items() if k != "cu_seqlens"}
            alone = replace(
                x, **{m: getattr(x, m)[:, part] for m in (*TOKENS, "do")}, initial_state=x.initial_state[n : n + 1],
                dS=x.dS[n : n + 1], options=options,
            )  # fmt: skip
            one = gradients(alone, impl="triton")
            for m in TOKENS:
                assert torch.equal(got[f"d{m}"][:, part], one[f"d{m}"]), f"{m}: a neighbour in the pack was felt"


def check_strided_offsets(device: str, dtype: torch.dtype) -> None:
    """Offsets may be a column of a table: the same bits."""
    x = make_inputs(1, lengths=(5, 0, 18), **SIZES, gate="bounded").to(dtype=dtype, device=device)
    want, cu = gradients(x, impl="triton"), x.options["cu_seqlens"]
    column = torch.stack([cu, torch.full_like(cu, 7)], 1)[:, 0]
    got = gradients(replace(x, options={**x.options, "cu_seqlens": column}), impl="triton")
    for n in want:
        assert torch.equal(got[n], want[n]), n


def check_upstream(device: str, dtype: torch.dtype) -> None:
    """Upstream gradients as autograd hands them on: the expanded scalar of sum(), a transposed one, slices of one buffer;
    inputs that are slices of a fused projection."""
    x = make_inputs(2, B=1, T=17, H=1, HV=2, K=16, gate="bounded").to(dtype=dtype, device=device)
    x.do = torch.full_like(x.do, 0.5)
    want = gradients(x, impl="triton")
    fused = torch.full((1, 17, 2, 80), float("nan"), device=device, dtype=dtype)
    leaves = {"q": fused[:, :, :1, :16], "k": fused[:, :, :1, 16:32], "v": fused[..., 32:48], "g": fused[..., 48:64],
              "beta": fused[..., 70]}  # fmt: skip
    for n, view in leaves.items():
        view.copy_(getattr(x, n))
    leaves = {n: t.detach().requires_grad_() for n, t in leaves.items()}
    out = kda(**leaves, **x.kwargs(), impl="triton")
    assert out.final_state is not None
    scalar = torch.tensor(0.5, device=device, dtype=dtype).expand_as(out.output)
    transposed = x.do.transpose(1, 3).contiguous().transpose(1, 3)
    state = x.dS.transpose(-1, -2).contiguous().transpose(-1, -2)
    for do, dS in ((scalar, x.dS), (transposed, state), (torch.cat([x.do, x.do], -1)[..., 16:], x.dS)):
        ends, given = (out.output, out.final_state), (do, dS)
        got = torch.autograd.grad(ends, list(leaves.values()), given, retain_graph=True)
        for n, g in zip(leaves, got, strict=True):
            assert torch.equal(g, want[f"d{n}"]), f"{n}: strides {do.stride()} changed the gradient"


def check_one_end(device: str, dtype: torch.dtype, T: int = 70) -> None:
    """Only through the output, only through the final state: the other counts as zero. One gradient can be asked for alone."""
    x = make_inputs(3, T=T, **SIZES, gate="softplus").to(dtype=dtype, device=device)
    for end in ("output", "final_state"):
        zero = replace(x, dS=torch.zeros_like(x.dS)) if end == "output" else replace(x, do=torch.zeros_like(x.do))
        want = reference(zero)
        y = x.to().requires_grad_()
        out = kda(y.q, y.k, y.v, y.g, y.beta, **y.kwargs(), impl="triton")
        named = y.tensors()
        given = x.do if end == "output" else x.dS
        found = torch.autograd.grad(getattr(out, end), list(named.values()), given, retain_graph=True)
        got = {f"d{n}": g for n, g in zip(named, found, strict=True)}
        if end == "final_state":  # q reads, it does not write
            assert not bool(got["dq"].any())
            want["dq"] = want["dk"]  # the floor of rel_grad
            got["dq"] = want["dk"]
        hold(end, x, got, want)
        (alone,) = torch.autograd.grad(getattr(out, end), y.beta, given)
        assert torch.equal(alone, got["dbeta"])
    y = replace(x.to(), initial_state=None).requires_grad_()
    kda(y.q, y.k, y.v, y.g, y.beta, gate=y.gate, impl="triton").output.sum().backward()  # no state asked for
    assert all(t.grad is not None and bool(torch.isfinite(t.grad).all()) for t in y.tensors().values())


def check_extreme_gates(device: str, dtype: torch.dtype, T: int = 70) -> None:
    """Saturated bound, A_log of 90, hard forgetting: finite, and as in float64. What cannot change has no gradient."""
    for name, gate, decay, A in (
        ("saturated bound", "bounded", "saturated", None),
        ("A_log 90, bounded", "bounded", "random", 90.0),
        ("A_log 90, softplus", "softplus", "random", 90.0),
        ("hard forgetting", None, "hard", None),
    ):
        x = make_inputs(4, T=T, **SIZES, gate=gate, decay=decay).to(dtype=dtype, device=device)
        if A is not None:
            assert isinstance(x.gate, BoundedGate | SoftplusGate) and x.gate.A_log is not None
            x.gate.A_log.fill_(A)  # e^90 is no float32
        got, want = gradients(x, impl="triton"), reference(x)
        assert all(bool(torch.isfinite(t).all()) for t in got.values()), name
        keep = {n: v for n, v in limits(dtype).items() if A is None or n not in ("dg", "dA_log", "ddt_bias")}
        check_gradients(name, got, want, keep)
        if A is not None:  # the gate is a step: its slope is 0 except at |z| < e^-90, which no input has
            assert not any(bool(got[n].any()) for n in ("dg", "dA_log", "ddt_bias")), name
            assert x.gate is not None and x.gate.dt_bias is not None
            x.g[:, 3], x.gate.dt_bias[:] = 0, 0  # the step itself: a slope of e^90 / 4, for which float16 has no number
            assert dtype == F16 or all(bool(torch.isfinite(t).all()) for t in gradients(x, impl="triton").values()), (
                name
            )


def check_write_strengths(device: str, dtype: torch.dtype, T: int = 70) -> None:
    """beta in [-0.25, 1.25], and 0 or next to nothing at some tokens: the walks divide by it. Nobody checks values unasked."""
    for gate in ("bounded", None):
        x = make_inputs(15, T=T, **SIZES, gate=gate)
        x.beta = 1.5 * x.beta - 0.25
        x.beta[:, 1::5], x.beta[:, 2::5] = 0, 1e-20
        x = x.to(dtype=dtype, device=device)
        hold(f"strengths beyond [0, 1], gate {gate}", x, gradients(x, impl="triton"), reference(x))


FUTURES = (("g", 20.0), ("g", -20.0), ("v", 100.0), ("k", 3.0), ("beta", 5.0))
ABSURD = (("v", 1e30),)  # float16 has no such number


def check_future(
    device: str,
    dtype: torch.dtype,
    T: int = 130,
    prefixes: tuple[int, ...] = (1, 17, 64, 65, 100),
    futures: tuple[tuple[str, float], ...] = FUTURES,
) -> None:
    """A loss on the first P tokens: exactly 0 for every later row, and the first P rows' gradients the same bits whatever
    the later rows hold."""
    for gate in ("bounded", "softplus"):
        x = make_inputs(5, T=T, K=16, gate=gate, use_qk_l2norm=True, use_beta_sigmoid=True).to(
            dtype=dtype, device=device
        )
        x.dS = torch.zeros_like(x.dS)
        for P in prefixes:
            y = x.to()
            y.do[:, P:] = 0
            first = gradients(y, impl="triton")
            for n in TOKENS:
                assert not bool(first[f"d{n}"][:, P:].any()), f"{gate}: {n} behind token {P} got a gradient"
                assert bool(first[f"d{n}"][:, :P].any()) or (n == "g" and P == 1)
            for n, value in (*futures, *(ABSURD if dtype != F16 else ())):
                z = y.to()
                getattr(z, n)[:, P:] = value
                again = gradients(z, impl="triton")
                for m in (*TOKENS, "initial_state"):
                    a, b = first[f"d{m}"], again[f"d{m}"]
                    a, b = (a, b) if m == "initial_state" else (a[:, :P], b[:, :P])
                    assert torch.equal(a, b), f"{gate}: {n} of token {P} reached the gradient of {m} before it"


def check_positions(device: str, dtype: torch.dtype, T: int = 70) -> None:
    """Through the states at chosen tokens: twice at one of them, at the first and last of a sequence, in a batch and in a
    pack with empty members, V-first or not, with and without the other ends (in pairs, not in all combinations: SIZES)."""
    pack = (0, T, 1, 0, 20)
    for lengths, v_first, ends in (
        (None, False, (0, 1, 2)), (None, True, (2,)), (pack, False, (2,)), (pack, True, (0, 2)),
    ):  # fmt: skip
        sizes = {"B": 2, "T": T} if lengths is None else {"lengths": lengths}
        x = make_inputs(8, **SIZES, gate="softplus", use_qk_l2norm=True, **sizes).to(dtype=dtype, device=device)
        if v_first:
            assert x.initial_state is not None
            x.initial_state, x.dS = (s.transpose(-1, -2).contiguous() for s in (x.initial_state, x.dS))
        at = torch.tensor([T - 1, 3, 16, 3, 0, T, T + 2], device=device)
        dkept = torch.randn(7, *x.dS.shape[1:], generator=torch.Generator().manual_seed(0)).to(device)
        found = []
        for y, impl in ((x, "triton"), (x.to(dtype=torch.float64), "chunkwise")):
            y = y.to().requires_grad_()
            options = {**y.kwargs(), "state_positions": at, "state_v_first": v_first}
            out = kda(y.q, y.k, y.v, y.g, y.beta, **options, impl=impl)
            given = (y.do, y.dS, dkept.to(y.dS.dtype))
            named = y.tensors()
            grads = torch.autograd.grad(
                [out[i] for i in ends], list(named.values()), [given[i] for i in ends], allow_unused=True
            )
            found.append({f"d{n}": g for n, g in zip(named, grads, strict=True) if g is not None})
        got, want = found
        if 0 not in ends:  # q reads, it does not write
            got["dq"] = want["dq"] = want["dk"]
        hold(f"{lengths} {v_first} {ends}", x, got, want)  # of 2 heads: sums that cancel by chance


def check_key_lengths(device: str, dtype: torch.dtype, T: int = 70) -> None:
    """Without l2norm: rows of q and k whose lengths differ by 10^4, each key with the write strength that fits it."""
    for near in (False, True):
        x = make_inputs(12, T=T, **SIZES, gate="bounded", near_equal_keys=near)
        length = 10.0 ** (4 * torch.rand(2, 1, T, 1, 1, generator=torch.Generator().manual_seed(0)) - 2)
        x.q, x.k, x.v, x.beta = x.q * length[0], x.k * length[1], x.v * length[1], x.beta / length[1, ..., 0] ** 2
        x.do = x.do / length[0]
        x = x.to(dtype=dtype, device=device)
        hold(f"near-equal {near}", x, gradients(x, impl="triton"), reference(x), near)


def check_repeats(device: str, dtype: torch.dtype, **sizes: Any) -> None:
    """Two runs agree to the bit, parameter gradients included."""
    x = make_inputs(6, **sizes).to(dtype=dtype, device=device)
    a, b = gradients(x, impl="triton"), gradients(x, impl="triton")
    for n in a:
        assert torch.equal(a[n], b[n]), n


def check_refusals(device: str, dtype: torch.dtype) -> None:
    """The second derivative is refused in words."""
    import pytest

    x = make_inputs(7, T=5, **SIZES).to(dtype=dtype, device=device).requires_grad_()
    out = kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), impl="triton")
    (dk,) = torch.autograd.grad(out.output.float().square().sum(), x.k, create_graph=True)  # the first one is fine
    with pytest.raises(NotImplementedError, match=r"second derivative.*impl='reference'"):
        dk.sum().backward()

"""The scan that norms its output: against the two ops, with the laws (gpu); compiled ahead of time for sm_90 (CPU)."""

from __future__ import annotations

from typing import Any

import pytest
import test_hopper as hopper
import torch
from torch import Tensor

from openkda.layers.kda import KimiDeltaAttention
from openkda.models.presets import PRESETS
from openkda.ops.kda.api import kda
from openkda.ops.kda.hopper import TRITON_RELEASE, _triton_release
from openkda.ops.kda.normed import kda_normed
from openkda.ops.norm.api import gated_rms_norm
from openkda.testing.compare import check_close
from openkda.testing.inputs import KDAInputs

EPS = 1e-5


@pytest.mark.parametrize("varlen", [False, True])
def test_compiles_for_sm90_without_spilling_in_its_loops(varlen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four words, all set up before the loops and read behind them; 208 registers a state, 64 the norm, of 512."""
    pytest.importorskip("triton", reason="triton is not installed")
    if _triton_release() != TRITON_RELEASE:
        pytest.skip(f"Gluon of Triton {TRITON_RELEASE}")
    from triton.experimental.gluon import language as gl

    from openkda.ops.kda.hopper.scan_norm import kda_normed_scan_kernel

    half = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    more = {"gate_desc": f"tensordesc<bf16[64, 64],{half!r}>", "w_ptr": "*fp32", "eps": "fp32"}
    known = hopper._signature()
    monkeypatch.setattr(hopper, "_signature", lambda: known | more)
    counts, used, remarks = hopper._compile(kda_normed_scan_kernel, {"VARLEN": varlen})
    assert counts["spill stores"] <= 16 and counts["spill loads"] <= 16, remarks
    assert used <= 232448 and "serialized" not in remarks


def drawn(x: KDAInputs, seed: int = 3) -> tuple[Tensor, Tensor]:
    """The norm's gate, one of three tensors side by side, and its weight."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    B, T, HV, V = x.v.shape
    wide = torch.randn(B, T, 3 * HV, V, generator=generator, device="cuda").bfloat16()
    return wide[:, :, HV : 2 * HV], 1 + 0.3 * torch.randn(V, generator=generator, device="cuda")


def one(x: KDAInputs, gate: Tensor, weight: Tensor, impl: str | None = "hopper") -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        y, state, _ = kda_normed(
            x.q, x.k, x.v, x.g, x.beta, gate, weight=weight, eps=EPS, impl=impl, **x.kwargs()
        )  # fmt: skip
    assert state is not None
    return y, state


def check(x: KDAInputs, gate: Tensor, weight: Tensor) -> None:
    """The states of two passes to the bit; y within one rounding of the norm of their outputs."""
    if x.gate is not None and x.gate.lower_bound is not None:
        o, states = hopper.scheduled(x, "two_pass")
    else:
        with torch.no_grad():
            o, states, _ = kda(x.q, x.k, x.v, x.g, x.beta, impl="hopper", **x.kwargs())
    want = gated_rms_norm(o, gate, weight, EPS)
    y, state = one(x, gate, weight)
    assert torch.equal(state, states)
    assert bool(((y.float() - want.float()).abs() <= 2**-7 * want.float().abs()).all())
    assert (y != want).float().mean() < 1e-2


@hopper.gpu
@hopper.needs_hopper
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize(
    "sizes",
    [{"T": 17, "HV": 2}, {"T": 64, "HV": 4}, {"T": 321, "HV": 6}, {"T": 130, "B": 3}, {"T": 1000, "H": 67}, {"T": 640, "H": 96},
     {"lengths": (0, 1, 2, 63, 64, 65, 129, 0)}, {"lengths": (0, 3, 0, 70) * 18}],
    ids=str,
)  # fmt: skip
def test_is_the_two_ops(sizes: dict[str, Any], gate: str) -> None:
    x = hopper.bf16(5, **{"H": 2, "gate": gate} | sizes)
    check(x, *drawn(x))


@hopper.gpu
@hopper.needs_hopper
def test_windows_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from openkda.ops.kda.hopper import launch, schedule

    x = hopper.bf16(16, T=600, H=67, decay="slow")
    whole = one(x, *drawn(x))
    for beside in (True, False):
        plan = tuple(schedule.Window(n, False, beside) for n in (3, 3, 4))
        monkeypatch.setattr(launch, "windows", lambda *sizes, plan=plan: plan)
        assert all(torch.equal(a, b) for a, b in zip(one(x, *drawn(x)), whole, strict=True))


@hopper.gpu
@hopper.needs_hopper
@pytest.mark.parametrize("t", [0, 15, 63, 64, 100])
def test_the_future_never_changes_the_past(t: int) -> None:
    x, y = hopper.bf16(9, T=150, H=2), hopper.bf16(10, T=150, H=2)
    gate, weight = drawn(x)
    before, _ = one(x, gate, weight)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(x, name)[:, t + 1 :] = getattr(y, name)[:, t + 1 :]
    gate[:, t + 1 :] = drawn(x, 4)[0][:, t + 1 :]
    after, _ = one(x, gate, weight)
    assert torch.equal(after[:, : t + 1], before[:, : t + 1])


@hopper.gpu
@hopper.needs_hopper
def test_a_neighbour_in_the_pack_changes_nothing() -> None:
    x = hopper.bf16(8, H=2, lengths=(70, 100, 33))
    gate, weight = drawn(x)
    y, S = one(x, gate, weight)
    for t in (x.q, x.k, x.v, x.g, x.beta, gate):
        t[:, 70:170] = float("nan")
    poisoned, P = one(x, gate, weight)
    assert torch.equal(poisoned[:, :70], y[:, :70]) and torch.equal(poisoned[:, 170:], y[:, 170:])
    assert torch.equal(P[[0, 2]], S[[0, 2]])


@hopper.gpu
@hopper.needs_hopper
def test_many_runs_give_the_same_bits() -> None:
    """All processors at work, two streams; in a CUDA graph too."""
    xs = [hopper.bf16(17 + i, T=1024, H=96, decay="random") for i in range(2)]
    norms = [drawn(x) for x in xs]
    want = [one(x, *n) for x, n in zip(xs, norms, strict=True)]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(40):
        found = []
        for stream, x, n in zip(streams, xs, norms, strict=True):
            with torch.cuda.stream(stream):
                found.append(one(x, *n))
        torch.cuda.synchronize()
        for a, b in zip(found, want, strict=True):
            assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = one(xs[0], *norms[0])
    captured[0].zero_()
    graph.replay()
    assert all(torch.equal(s, t) for s, t in zip(captured, want[0], strict=True))


@hopper.gpu
@hopper.needs_hopper
def test_a_layer_of_many_heads_takes_it() -> None:
    """Prefill of 80 heads, at once and continued: what the layer gives with gradients on."""
    from dataclasses import replace

    from openkda.ops.kda import normed

    config = replace(
        PRESETS["tiny"], hidden_size=64, kda_num_heads=80, kda_head_dim=128, gate_lower_bound=-5.0, use_full_rank_gate=True
    )  # fmt: skip
    layer = KimiDeltaAttention(config, 0).to(device="cuda", dtype=torch.bfloat16).eval()
    x = torch.randn(1, 700, 64, device="cuda", dtype=torch.bfloat16)
    want, _ = layer(x)
    normed.CALLS.forget()
    with torch.no_grad():
        for _ in range(3):
            y, _ = layer(x, return_state=True)
            check_close("whole", y, want, 1e-3)
        assert len(normed.CALLS.replays) == 1
        first, state = layer(x[:, :300], return_state=True)
        rest, _ = layer(x[:, 300:], state=state, return_state=True)
    check_close("continued", torch.cat([first, rest], 1), want, 8e-3)

"""What went wrong in public KDA and delta-rule kernels, on a GPU, through the kernels by name and through the choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton_checks as checks
from triton_checks import BF16, F16, F32, LIMITS

from openkda.ops.kda.api import BoundedGate, SoftplusGate, kda, kda_step
from openkda.ops.kda_block.api import kda_block
from openkda.ops.norm.api import gated_rms_norm, rms_norm
from openkda.ops.short_conv.api import short_conv
from openkda.testing.compare import check_close, rel
from openkda.testing.inputs import KDAInputs, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
IMPLS = ["triton", None]
TOKENS = ("q", "k", "v", "g", "beta")


def published(seed: int = 0, H: int = 4, dtype: torch.dtype = BF16, **sizes: Any) -> KDAInputs:
    """Inputs that the fast forward of a Hopper card takes too."""
    x = make_inputs(seed, H=H, K=128, use_qk_l2norm=True, use_beta_sigmoid=True, **sizes)
    x.gate = BoundedGate(-5.0, torch.zeros(H), 0.1 * torch.randn(H, 128, generator=torch.Generator().manual_seed(1)))
    return x.to(dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("gate", [None, "softplus"])
@pytest.mark.parametrize("norm", [True, False])
def test_keys_that_are_not_unit_length(norm: bool, gate: str | None, dtype: torch.dtype) -> None:
    """|k| = 8: l2norm makes it ordinary; without it the recurrence grows, and what the loop can hold comes out finite."""
    x = make_inputs(42, T=64, H=1, K=64, gate=gate, use_qk_l2norm=norm, unit_keys=False).to(dtype=dtype, device="cuda")
    got, want = checks.run(x), checks.reference(x)
    if norm:
        check_close("output", got.output, want.output, LIMITS[dtype][0])
    fits = want.output.abs() < 0.5 * torch.finfo(dtype).max
    assert bool(torch.isfinite(got.output[fits]).all())


def test_slow_decay_over_4096_steps() -> None:
    """Log decay -8e-5, rare writes: a decay or a write strength rounded to bfloat16 anywhere is 1e-3 to 1e-2 off by then."""
    x = make_inputs(7, T=4096, H=2, K=32, gate="softplus", use_beta_sigmoid=True)
    x.gate = SoftplusGate(torch.zeros(2), torch.zeros(2, 32))
    x.g.fill_(math.log(math.expm1(8e-5)))
    x.beta -= 6.0
    x.initial_state = 10 * x.initial_state  # type: ignore[operator]
    x = x.to(dtype=BF16, device="cuda")
    want = checks.reference(x)
    state = x.initial_state
    assert want.final_state is not None and state is not None
    with torch.no_grad():
        for t in range(4096):
            rows = [getattr(x, n)[:, t] for n in TOKENS]
            _, state = kda_step(*rows, state, gate=x.gate, use_beta_sigmoid=True, impl="triton")
    # As a float32 factor, 1 - 8e-5 is 1.8e-8 off, the same way each step: 7.5e-5 after 4096 (0.3 if rounded to bfloat16).
    check_close("state, step by step", state, want.final_state, 1e-5)
    check_close("state, chunks", checks.run(x).final_state, want.final_state, LIMITS[BF16][1])  # type: ignore[arg-type]


@pytest.mark.parametrize("gate", ["bounded", "softplus", None])
def test_no_nan_is_lost(gate: str | None) -> None:
    """A NaN in a gate once came out as total forgetting: a finite loss of a model that was already lost."""
    for T, at in ((80, 64), (3, 1)):
        for dtype in (BF16, F32):
            checks.check_nan(make_inputs(9, T=T, H=2, K=64, gate=gate).to(dtype=dtype, device="cuda"), at)


@pytest.mark.parametrize("A_log", [60.0, 88.0, 90.0, 1e30, -90.0])
def test_rates_beyond_float32(A_log: float) -> None:
    """e^90 is no float32: infinity times a raw gate of 0, or infinity minus infinity beside dt_bias, would be NaN."""
    x = published(H=2, T=100)
    assert isinstance(x.gate, BoundedGate) and x.gate.A_log is not None
    x.gate.A_log.fill_(A_log)
    x.g[:, 10:20] = 0
    for impl in IMPLS:
        got, want = checks.run(x, impl), checks.reference(x)  # type: ignore[arg-type]
        check_close(f"output, {impl}", got.output, want.output, LIMITS[BF16][0])
        check_close(f"state, {impl}", got.final_state, want.final_state, LIMITS[BF16][1])  # type: ignore[arg-type]


def test_no_nan_is_lost_by_the_choice() -> None:
    x = published(H=2, T=100)
    checks.check_nan(x, 64, None)
    for name in ("A_log", "dt_bias", "g", "v"):
        y = checks._with_nan(x, name, 64).requires_grad_()
        o = kda(y.q, y.k, y.v, y.g, y.beta, **y.kwargs()).output
        o.float().sum().backward()
        assert y.q.grad is not None and not bool(y.q.grad[:, 64:, 1].isfinite().all()), f"NaN in {name}"
        assert bool(y.q.grad[:, :, 0].isfinite().all())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("size", [65536.0, 1e5])
@pytest.mark.parametrize("T", [1, 64])
def test_state_beyond_float16(T: int, size: float, dtype: torch.dtype) -> None:
    x = make_inputs(3, T=T, H=1, K=32, gate="bounded").to(dtype=dtype, device="cuda")
    assert x.initial_state is not None
    x.initial_state.zero_()[0, 0, 0, 0] = size
    for t in (x.k, x.q):
        t[..., 0] = 0.0
    got, want = checks.run(x), checks.reference(x)
    check_close("output", got.output, want.output, LIMITS[dtype][0])
    check_close("state", got.final_state, want.final_state, LIMITS[dtype][1])  # type: ignore[arg-type]
    rest = (slice(None), slice(None), slice(1, None))
    check_close("the other rows", got.final_state[rest], want.final_state[rest], LIMITS[dtype][1])  # type: ignore[index]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("length", [0.0, 1e-8, 1e-4])
def test_rows_of_no_length(length: float, impl: str | None) -> None:
    """Padding of zeros, and rows that l2norm's epsilon is larger than."""
    x = published(T=40)
    for t in (x.q, x.k):
        t[:, :5] *= length / t[:, :5].float().norm(dim=-1, keepdim=True).to(t.dtype)
    got, want = checks.run(x, impl), checks.reference(x)  # type: ignore[arg-type]
    check_close("output", got.output[:, 5:], want.output[:, 5:], LIMITS[BF16][0])
    check_close("state", got.final_state, want.final_state, LIMITS[BF16][1])  # type: ignore[arg-type]
    assert bool(torch.isfinite(got.output).all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("lengths", [(8191, 1), (1, 8191), (1, 1, 1, 100, 1), (1,) * 512], ids=lambda x: str(x[:5]))
def test_members_of_one_token(lengths: tuple[int, ...], impl: str | None) -> None:
    """With states of their own; the first, the longest and the last member as calls of their own."""
    x = published(lengths=lengths)
    whole = checks.run(x, impl)  # type: ignore[arg-type]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for n in {0, lengths.index(max(lengths)), len(lengths) - 1}:
        begin, end = ends[n] - lengths[n], ends[n]
        with torch.no_grad():
            alone = kda(
                *(getattr(x, name)[:, begin:end] for name in TOKENS), gate=x.gate, use_qk_l2norm=True,
                use_beta_sigmoid=True, initial_state=x.initial_state[n : n + 1], output_final_state=True,  # type: ignore[index]
                impl="triton",
            )  # fmt: skip
        check_close(f"output {n}", whole.output[:, begin:end], alone.output, LIMITS[BF16][0])
        check_close(f"state {n}", whole.final_state[n : n + 1], alone.final_state, 2 * LIMITS[BF16][1])  # type: ignore[index, arg-type]


@pytest.mark.parametrize("impl", IMPLS)
def test_neighbours_in_the_batch_change_nothing(impl: str | None) -> None:
    x = published(B=8, T=64, initial_state=False)
    whole = checks.run(x, impl)  # type: ignore[arg-type]
    one = KDAInputs(**{**x.__dict__, **{n: getattr(x, n)[3:4] for n in TOKENS}})
    alone = checks.run(one, impl)  # type: ignore[arg-type]
    assert torch.equal(whole.output[3:4], alone.output)
    assert torch.equal(whole.final_state[3:4], alone.final_state)  # type: ignore[index, arg-type]


def test_each_head_reads_its_own_gate() -> None:
    """Log decays of -0.01, -1, -4 and -5 a token side by side: every head as if it were alone, to the bit."""
    x = make_inputs(5, T=70, H=4, K=32, gate=None).to(dtype=BF16, device="cuda")
    x.g = (
        torch.tensor([-0.01, -1.0, -4.0, -5.0], device="cuda").view(1, 1, 4, 1).expand(x.g.shape).to(BF16).contiguous()
    )
    whole = checks.run(x)
    for h in range(4):
        parts: dict[str, Any] = {n: getattr(x, n)[:, :, h : h + 1] for n in TOKENS}
        alone = checks.run(KDAInputs(**{**x.__dict__, **parts, "initial_state": x.initial_state[:, h : h + 1]}))  # type: ignore[index]
        assert torch.equal(whole.output[:, :, h : h + 1], alone.output)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "lengths", [(16224,), (16225,), (16383,), (16385,), (12000, *(20,) * 200), (*(20,) * 200, 12000)]
)
def test_lengths_that_hung_and_inputs_of_zero(lengths: tuple[int, ...], impl: str | None) -> None:
    """All zeros give exactly zero, also behind many short members and with a state of zeros."""
    T, N = sum(lengths), len(lengths)
    q, g = (torch.zeros(1, T, 2, 128, device="cuda", dtype=BF16) for _ in range(2))
    cu = None if N == 1 else torch.tensor([0, *lengths], device="cuda").cumsum(0)
    with torch.no_grad():
        out = kda(
            q, q, q, g, torch.zeros(1, T, 2, device="cuda", dtype=BF16), gate=BoundedGate(), use_qk_l2norm=True,
            use_beta_sigmoid=True, initial_state=torch.zeros(N, 2, 128, 128, device="cuda"), output_final_state=True,
            cu_seqlens=cu, impl=impl,
        )  # fmt: skip
    assert not out.output.any() and not out.final_state.any()  # type: ignore[union-attr]


def test_many_rows_and_members_of_the_small_ops() -> None:
    """70,000 of them: beyond what a second axis of a grid can hold."""
    N = 70_000
    rows = [torch.randn(N, 1, 16, device="cuda", dtype=BF16) for _ in range(4)]
    rows.append(torch.rand(N, 1, device="cuda", dtype=BF16))
    state = torch.zeros(N, 1, 16, 16, device="cuda")
    some = torch.randint(0, N, (50,), device="cuda")
    with torch.no_grad():
        o, _ = kda_step(*rows, state, gate=BoundedGate(), impl="triton")
        want, _ = kda_step(*(t[some] for t in rows), state[some], gate=BoundedGate(), impl="triton")
        assert torch.equal(o[some], want)
        x, w = torch.randn(1, N, 32, device="cuda"), torch.randn(32, 4, device="cuda")
        y, _ = short_conv(x, w, cu_seqlens=torch.arange(N + 1, device="cuda"), impl="triton")
        single = x * w[:, 3]
        assert rel(y, single * single.sigmoid()) < 1e-5


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_norms_of_few_rows(rows: int, size: int) -> None:
    x, gate, up = (torch.randn(rows, size, device="cuda") for _ in range(3))
    w = torch.randn(size, device="cuda")
    found = []
    for impl in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in (x, gate, w)]
        y, z = rms_norm(leaves[0], leaves[2], 1e-5, impl=impl), gated_rms_norm(*leaves, 1e-5, impl=impl)
        found.append((y, z, *torch.autograd.grad((y * up + z * up).sum(), leaves)))
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        check_close(f"{i}", a, b, 1e-5)


def test_norms_of_more_than_2_31_elements() -> None:
    rows = (1 << 31) // 128 + 1000
    x, w = torch.empty(rows, 128, device="cuda", dtype=BF16).normal_(), torch.randn(128, device="cuda")
    with torch.no_grad():
        y = rms_norm(x, w, 1e-5, impl="triton")
        assert torch.equal(y[-500:], rms_norm(x[-500:].clone(), w, 1e-5, impl="triton"))
        del y
        z = gated_rms_norm(x, x, w, 1e-5, impl="triton")
        tail = x[-500:].clone()
        assert torch.equal(z[-500:], gated_rms_norm(tail, tail, w, 1e-5, impl="triton"))


def _calls() -> dict[str, Callable[[], list[Tensor | None]]]:
    dense, pack = published(T=100), published(lengths=(5, 0, 70, 1))
    tokens, weights, state = checks.block_inputs(3, 1, (2, 2, 128, 128), 4, 3, "cuda", BF16)
    x, w = torch.randn(1, 76, 40, device="cuda"), torch.randn(40, 4, device="cuda")
    cu = torch.tensor([0, 5, 5, 75, 76], device="cuda")
    slots = torch.tensor([1, -1, 2], device="cuda")

    def block() -> list[Tensor | None]:
        y, new, _ = kda_block(*tokens, weights=weights, state=state, gate=BoundedGate())
        assert new is not None
        every = kda_block(*tokens, weights=weights, state=state, gate=BoundedGate(), slots=slots, keep="all")
        return [y, *new.tensors(), every.output, every.states]

    return {
        "triton": lambda: list(checks.run(dense)), "triton pack": lambda: list(checks.run(pack)),
        "chosen": lambda: list(checks.run(dense, None)),  # type: ignore[arg-type]
        "chosen pack": lambda: list(checks.run(pack, None)),  # type: ignore[arg-type]
        "block": block,
        "convolution": lambda: list(short_conv(x, w, cu_seqlens=cu, output_final_state=True, impl="triton")),
        "norm": lambda: [rms_norm(x, w[:, 0], 1e-5, impl="triton")],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["triton", "triton pack", "chosen", "chosen pack", "block", "convolution", "norm"])
def test_fresh_memory_is_never_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and workspaces full of NaN beforehand change no bit, and none of it comes out."""
    call = _calls()[name]
    empty, new_empty = torch.empty, Tensor.new_empty

    def poisoned(t: Tensor) -> Tensor:
        if t.dim() and t.numel():
            t.view(torch.uint8).fill_(255)
        return t

    with torch.no_grad():
        want = call()
        monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
        monkeypatch.setattr(Tensor, "new_empty", lambda self, *a, **k: poisoned(new_empty(self, *a, **k)))
        for _ in range(3):  # looked at, recorded, repeated
            for a, b in zip(call(), want, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]

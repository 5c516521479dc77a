"""What the Triton kernels must hold, on any device: the interpreter on a CPU (float32) and the GPU run the same checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openkda.ops.kda.api import KDAOutput, kda, kda_step
from openkda.ops.kda_block.api import BlockState, BlockWeights, kda_block, kda_block_commit
from openkda.ops.norm.api import gated_rms_norm, rms_norm
from openkda.ops.short_conv.api import short_conv, short_conv_step, short_convs
from openkda.testing.cases import KDACase
from openkda.testing.compare import check_close
from openkda.testing.inputs import KDAInputs, make_inputs

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LIMITS = {
    # fp32 operands in three terms; the log decays of a chunk of 16 are summed in float32 (6e-5 at worst, hard forgetting).
    F32: (2e-5, 2e-5),
    # Output: bfloat16's own rounding, 1.7e-3, and the operands'. State: float16 operands, 2^-12 a factor.
    BF16: (3e-3, 1e-3),
    F16: (1.5e-3, 1e-3),
}
NEARLY_PARALLEL = 20.0
"""Keys of one direction cancel in v - S^T k: the operands' rounding of 2^-12 is seen through a difference."""


def run(x: KDAInputs, impl: str = "triton", **extra: Any) -> KDAOutput:
    with torch.no_grad():
        return kda(x.q, x.k, x.v, x.g, x.beta, impl=impl, **{**x.kwargs(), **extra})


def reference(x: KDAInputs, **extra: Any) -> KDAOutput:
    extra = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in extra.items()}
    wide = {} if "state_dtype" not in extra else {"state_dtype": torch.float64}
    return run(x.to(dtype=torch.float64), "reference", **{**extra, **wide})


def check_case(case: KDACase, device: str, dtype: torch.dtype, impl: str = "triton") -> None:
    x = case.inputs().to(dtype=dtype, device=device)
    got, want = run(x, impl), reference(x)
    limit_o, limit_s = LIMITS[dtype]
    loose = NEARLY_PARALLEL if case.keys == "near_equal" and dtype != F32 else 1.0
    check_close(f"{case.id} output", got.output, want.output, limit_o * loose)
    assert got.final_state is not None and want.final_state is not None
    check_close(f"{case.id} state", got.final_state, want.final_state, limit_s * loose)


def check_positions(device: str, dtype: torch.dtype) -> None:
    for extra, positions in (
        ({"B": 2, "T": 40, "gate": None}, [0, 3, 15, 16, 39, 79, 60, 61]),
        ({"lengths": (5, 0, 33, 1, 18), "gate": "softplus"}, [4, 5, 37, 38, 39, 56, 20, 21]),
    ):
        x = make_inputs(1, K=16, HV=2, **extra).to(dtype=dtype, device=device)  # type: ignore[arg-type]
        at = torch.tensor(positions, device=device)
        got, want = run(x, state_positions=at), reference(x, state_positions=at)
        assert got.states_at is not None and want.states_at is not None
        check_close("states_at", got.states_at, want.states_at, LIMITS[dtype][1])
        check_close("output", got.output, want.output, LIMITS[dtype][0])


def check_pool(device: str, dtype: torch.dtype, T: int) -> None:
    """Read and written in place, strided, unused slots full of NaN and left alone; -1 starts from zeros, keeps nothing."""
    x = make_inputs(2, B=3, T=T, K=16, V=24, H=2).to(dtype=dtype, device=device)
    for v_first in (False, True):
        tail = (24, 16) if v_first else (16, 24)
        big = torch.full((6, 3, 2, *tail), float("nan"), device=device)
        pool = big[:, 1]
        start = torch.randn((6, 2, *tail), generator=torch.Generator().manual_seed(0)).to(device)
        slots = torch.tensor([[4, 0], [-1, 0], [1, 0]], dtype=torch.int32, device=device)[:, 0]
        for s in (4, 1):
            pool[s] = start[s]
        wide = start.double()
        options = {"state_indices": slots, "state_v_first": v_first}
        want = reference(x, initial_state=wide, **options)
        got = run(x, initial_state=pool, **options)
        check_close("output", got.output, want.output, LIMITS[dtype][0])
        for s in (4, 1):
            check_close(f"slot {s}", pool[s], wide[s], LIMITS[dtype][1])
        assert bool(big[:, [0, 2]].isnan().all()) and bool(pool[[0, 2, 3, 5]].isnan().all())


def check_step(device: str, dtype: torch.dtype) -> None:
    x = make_inputs(3, B=5, T=1, K=24, V=40, H=2, HV=4, gate="softplus").to(dtype=dtype, device=device)
    tokens = [t[:, 0] for t in (x.q, x.k, x.v, x.g, x.beta)]
    y = x.to(dtype=torch.float64)
    wide = [t[:, 0] for t in (y.q, y.k, y.v, y.g, y.beta)]
    assert x.initial_state is not None and y.initial_state is not None
    slots = torch.tensor([3, 0, -1, 4, 1], device=device)
    with torch.no_grad():
        before = x.initial_state.clone()
        o, new = kda_step(*tokens, x.initial_state, gate=x.gate, impl="triton")
        want, want_new = kda_step(*wide, y.initial_state, gate=y.gate, impl="reference")
        check_close("step", o, want, LIMITS[dtype][0])
        check_close("new state", new, want_new, 1e-5)
        assert torch.equal(before, x.initial_state)
        o, pool = kda_step(*tokens, x.initial_state, gate=x.gate, state_indices=slots, impl="triton")
        want, _ = kda_step(*wide, y.initial_state, gate=y.gate, state_indices=slots, impl="reference")
    assert pool is x.initial_state and bool((o[2] == 0).all()) and torch.equal(pool[2], before[2])
    check_close("pool step", o, want, LIMITS[dtype][0])
    check_close("pool", pool, y.initial_state, 1e-5)


def check_bf16_states(device: str, dtype: torch.dtype) -> None:
    x = make_inputs(4, B=2, T=40, K=16).to(dtype=dtype, device=device)
    S = x.initial_state.bfloat16()  # type: ignore[union-attr]
    got = run(x, initial_state=S, state_dtype=BF16)
    want = reference(x, initial_state=S.double())
    assert got.final_state is not None and got.final_state.dtype == BF16 and want.final_state is not None
    check_close("output", got.output, want.output, LIMITS[dtype][0])
    check_close(
        "state", got.final_state, want.final_state, 4e-3
    )  # bfloat16 storage: 2^-9, 2^-8 where the interpreter cuts


def check_strides(device: str, dtype: torch.dtype) -> None:
    """Slices of one fused projection, and a gate whose last axis is not the unit stride: the same bits as contiguous ones."""
    x = make_inputs(5, B=2, T=35, K=16, H=2).to(dtype=dtype, device=device)
    fused = torch.cat([x.q, x.k, x.v], -1)
    again = KDAInputs(**x.__dict__)
    again.q, again.k, again.v = fused.split(16, -1)
    again.g = x.g.transpose(-1, -2).contiguous().transpose(-1, -2)
    again.beta = torch.nn.functional.pad(x.beta, (0, 5))[..., :2]
    a, b = run(x), run(again)
    assert torch.equal(a.output, b.output) and torch.equal(a.final_state, b.final_state)  # type: ignore[arg-type]


def check_laws(device: str, dtype: torch.dtype, cuts: tuple[int, ...] = (1, 15, 16, 17, 21)) -> None:
    """Bit for bit: two runs; zeros for no state; inputs untouched; the future; the neighbours in a pack."""
    for gate in ("bounded", "softplus"):
        x = make_inputs(6, lengths=(22, 37), K=32, gate=gate, decay="fast", initial_state=False)
        x = x.to(dtype=dtype, device=device)
        copies = [t.clone() for t in (x.q, x.k, x.v, x.g, x.beta)]
        a, b = run(x), run(x)
        assert torch.equal(a.output, b.output) and torch.equal(a.final_state, b.final_state)  # type: ignore[arg-type]
        zeros = torch.zeros_like(a.final_state)  # type: ignore[arg-type]
        assert torch.equal(run(x, initial_state=zeros).output, a.output)
        assert all(torch.equal(t, c) for t, c in zip((x.q, x.k, x.v, x.g, x.beta), copies, strict=True))
        for P in cuts:
            for name, value in (("g", 20.0), ("g", -20.0), ("v", 1e4), ("k", 3.0), ("q", -7.0), ("beta", 0.0)):
                y = KDAInputs(**x.__dict__)
                changed = getattr(x, name).clone()
                changed[:, P:22] = value
                setattr(y, name, changed)
                assert torch.equal(run(y).output[:, :P], a.output[:, :P]), (
                    f"{gate}: {name} of token {P} reached the past"
                )
        y = KDAInputs(**x.__dict__)
        y.v = x.v.clone()
        y.v[:, 22:] = float("nan")
        assert torch.equal(run(y).output[:, :22], a.output[:, :22]), "a neighbour in the pack was read"


def check_absurd_future(device: str, dtype: torch.dtype) -> None:
    """Finite garbage of 1e30 (1e4 in float16) in later tokens leaves the past as zeros there would, by the bit."""
    size = 1e4 if dtype == F16 else 1e30
    for P in (1, 15, 16, 17):
        outputs = []
        for value in (0.0, size):
            x = make_inputs(7, T=33, K=16, gate="bounded").to(dtype=dtype, device=device)
            for t in (x.q, x.k, x.v, x.beta):
                t[:, P:] = value
            outputs.append(run(x).output[:, :P])
        assert bool(torch.isfinite(outputs[1]).all()) and torch.equal(*outputs), f"tokens from {P} on reached the past"


def check_splits(device: str, dtype: torch.dtype) -> None:
    """A prompt cut anywhere, tokens one by one included, is the prompt."""
    x = make_inputs(8, T=50, K=16, gate="softplus", decay="slow").to(dtype=dtype, device=device)
    whole = run(x)
    for cut in (1, 13, 16, 33, 49):
        state, outputs = x.initial_state, []
        for part in (slice(0, cut), slice(cut, 50)):
            piece = KDAInputs(**{**x.__dict__, **{n: getattr(x, n)[:, part] for n in ("q", "k", "v", "g", "beta")}})
            o, state, _ = run(piece, initial_state=state)
            outputs.append(o)
        check_close(f"cut at {cut}", torch.cat(outputs, 1), whole.output, 2 * LIMITS[dtype][0])
        check_close(f"state, cut at {cut}", state, whole.final_state, 2 * LIMITS[dtype][1])  # type: ignore[arg-type]


def _with_nan(x: KDAInputs, name: str, at: int) -> KDAInputs:
    """A copy of x with NaN in one input of head 1, at one token where the input has tokens."""
    y = x.to()
    t = y.tensors()[name]
    if name in ("A_log", "dt_bias"):
        t[1:2, ...] = float("nan")
    elif name == "initial_state":
        t[0, 1, 3, 4] = float("nan")
    elif name == "g":
        t[0, at, 1, 2] = float("nan")
    else:
        t[0, at, 1] = float("nan")
    return y


def check_nan(x: KDAInputs, at: int, impl: str | None = "triton") -> None:
    """No NaN is lost: the outputs and states that are no number by the recurrence are none here. And it does not spread:
    the other head and the tokens before keep their bits."""
    clean = run(x, impl)  # type: ignore[arg-type]
    for name in x.tensors():
        y = _with_nan(x, name, at)
        got, want = run(y, impl), reference(y)  # type: ignore[arg-type]
        assert want.final_state is not None and got.final_state is not None and clean.final_state is not None
        for what, a, b in (("output", got.output, want.output), ("state", got.final_state, want.final_state)):
            lost = int((a.isfinite() & ~b.isfinite()).sum())
            assert not lost, f"NaN in {name}: {lost} numbers of the {what} do not show it"
        before = at if name in ("q", "k", "v", "g", "beta") else 0
        assert torch.equal(got.output[:, :, 0], clean.output[:, :, 0]), f"NaN in {name} reached the other head"
        assert torch.equal(got.final_state[:, 0], clean.final_state[:, 0]), f"NaN in {name} reached the other head"
        assert torch.equal(got.output[:, :before], clean.output[:, :before]), f"NaN in {name} reached the past"


def check_nans(device: str, dtype: torch.dtype) -> None:
    for gate in ("bounded", "softplus", None):
        for T, at in ((20, 16), (3, 1)):  # chunks, and token by token
            check_nan(make_inputs(9, T=T, H=2, K=16, gate=gate).to(dtype=dtype, device=device), at)


def check_block_nans(device: str, dtype: torch.dtype) -> None:
    """The same of the fused step: row 1 shows its NaN, the other rows keep their bits."""
    names = ("q", "k", "v", "g", "beta", "out_gate")
    for T in (1, 3):
        for kind in ("bounded", "softplus"):
            gate = make_inputs(0, T=1, H=2, K=16, gate=kind).to(dtype=F32, device=device).gate
            tokens, weights, state = block_inputs(3, T, (2, 2, 16, 16), 4, 3, device, dtype)

            def step(tokens: Any, impl: str, T: int = T, gate: Any = gate, w: Any = weights, s: Any = state) -> Any:
                with torch.no_grad():
                    return kda_block(*tokens, weights=w, state=s, gate=gate, impl=impl)

            clean = step(tokens, "triton")
            for i, name in enumerate(names):
                changed = [t.clone() for t in tokens]
                changed[i][1, 0, 0] = float("nan")
                got, want = step(changed, "triton"), step(changed, "reference")
                pairs = zip((got.output, *got.state.tensors()), (want.output, *want.state.tensors()), strict=True)
                assert not any(bool((a.isfinite() & ~b.isfinite()).any()) for a, b in pairs), (
                    f"a NaN in {name} was lost"
                )
                rest = zip((got.output, *got.state.tensors()), (clean.output, *clean.state.tensors()), strict=True)
                assert all(torch.equal(a[[0, 2]], b[[0, 2]]) for a, b in rest), f"NaN in {name} reached another row"


def block_inputs(N: int, T: int, sizes: tuple[int, ...], W: int, rows: int, device: str, dtype: torch.dtype) -> Any:
    H, HV, K, V = sizes
    gen = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=gen).to(device, dtype)

    tokens = (
        draw(N, T, H * K),
        draw(N, T, H * K),
        draw(N, T, HV * V),
        draw(N, T, HV, K),
        draw(N, T, HV),
        draw(N, T, HV, V),
    )
    weights = BlockWeights(
        draw(H * K, W, dtype=F32), draw(H * K, W, dtype=F32), draw(HV * V, W, dtype=F32), draw(V, dtype=F32), 1e-5
    )
    state = BlockState(
        draw(rows, HV, K, V, dtype=F32), draw(rows, H * K, W - 1), draw(rows, H * K, W - 1), draw(rows, HV * V, W - 1)
    )
    return tokens, weights, state


def check_block(device: str, dtype: torch.dtype) -> None:
    """The fused step against the composition of its ops, with its roundings: pools, every state, fresh states. Each of them and
    each size meets both gates, in turns (the other half in bfloat16): every combination is a kernel to compile."""
    limit = {F32: 2e-5, BF16: 4e-3, F16: 1e-3}[
        dtype
    ]  # a rounding that falls the other way costs one unit: 2^-8 of bfloat16
    for i, (N, T, sizes, W) in enumerate(
        ((3, 1, (2, 2, 16, 16), 4), (2, 5, (1, 3, 24, 40), 3), (3, 2, (2, 2, 32, 16), 2))
    ):
        tokens, weights, state = block_inputs(N, T, sizes, W, 7, device, dtype)
        slots = torch.tensor([5, -1, 2][:N], device=device)
        live = slots >= 0
        gates = [
            make_inputs(0, T=1, H=sizes[0], HV=sizes[1], K=sizes[2], gate=kind).to(dtype=F32, device=device).gate
            for kind in ("bounded", "softplus")
        ]
        turn = i + (dtype == BF16)
        outs = []
        for impl in ("triton", "reference"):
            pool = BlockState(*(t.clone() for t in state.tensors()))
            first = BlockState(*(t[:N].clone() for t in state.tensors()))
            options: dict[str, Any] = {"weights": weights, "impl": impl}
            one, other = gates[turn % 2], gates[(turn + 1) % 2]
            assert one is not None and other is not None
            with torch.no_grad():
                done = kda_block(*tokens, state=pool, gate=one, slots=slots, **options)
                every = kda_block(*tokens, state=state, gate=other, slots=slots, keep="all", **options)
                fresh = kda_block(*tokens, state=first, gate=one if T > 1 else other, **options)
            outs.append((done, pool, every, fresh))
        (a, pa, ea, fa), (b, pb, eb, fb) = outs
        for name, x, y in (("pool", a, b), ("every state's", ea, eb), ("fresh", fa, fb)):
            check_close(f"{name} output", x.output, y.output, limit)
        assert not a.output[~live].any() and not ea.output[~live].any()
        check_close("states", ea.states[live], eb.states[live], limit)
        for x, y, old in zip(pa.tensors(), pb.tensors(), state.tensors(), strict=True):
            check_close("pool", x, y, limit)
            assert torch.equal(x[[0, 1, 3, 4, 6]], old[[0, 1, 3, 4, 6]]), "a slot of nobody was written"
        for x, y in zip(fa.state.tensors(), fb.state.tensors(), strict=True):
            check_close("fresh state", x, y, limit)


def check_commit(device: str, dtype: torch.dtype) -> None:
    """The state of any accepted length, in any slot, is what a step over that many tokens leaves; nothing else is touched.
    Drafts longer and shorter than the convolutions' windows go through the same kernels."""
    limit = {F32: 2e-5, BF16: 4e-3, F16: 1e-3}[dtype]
    for T, sizes, W in ((5, (2, 4, 24, 40), 4), (2, (2, 4, 24, 40), 4), (3, (2, 2, 16, 16), 2)):
        tokens, weights, state = block_inputs(4, T, sizes, W, 7, device, dtype)
        gate = (
            make_inputs(0, T=1, H=sizes[0], HV=sizes[1], K=sizes[2], gate="bounded").to(dtype=F32, device=device).gate
        )
        slots = torch.tensor([5, -1, 2, 0], device=device)
        options: dict[str, Any] = {"weights": weights, "gate": gate, "slots": slots, "impl": "triton"}
        with torch.no_grad():
            every = kda_block(*tokens, state=state, keep="all", **options)
            for accepted in ((1, 1, 0, T), (T, 2, 1, 0), (2, 0, T, 1)):
                counts = torch.tensor(accepted, dtype=torch.int32, device=device)
                pool = BlockState(*(t.clone() for t in state.tensors()))
                assert kda_block_commit(every.states, *tokens[:3], counts, state=pool, slots=slots) is pool
                for n, (slot, count) in enumerate(zip(slots.tolist(), accepted, strict=True)):
                    if slot < 0 or not count:
                        continue
                    want = BlockState(*(t.clone() for t in state.tensors()))
                    some = (x[n : n + 1, :count] for x in tokens)
                    kda_block(*some, state=want, **{**options, "slots": slots[n : n + 1]})
                    for got, w in zip(pool.tensors(), want.tensors(), strict=True):
                        check_close(f"slot {slot} after {count}", got[slot], w[slot], limit)
                touched = [s for s, a in zip(slots.tolist(), accepted, strict=True) if s >= 0 and a]
                idle = [s for s in range(7) if s not in touched]
                for got, old in zip(pool.tensors(), state.tensors(), strict=True):
                    assert torch.equal(got[idle], old[idle]), "a slot of nobody was written"


def check_conv_and_norms(device: str, dtype: torch.dtype) -> None:
    limit = {F32: 1e-6, BF16: 4e-3, F16: 1e-3}[dtype]
    gen = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=gen).to(device, dtype)

    with torch.no_grad():
        for W in (2, 3, 4):
            w = draw(40, W, dtype=F32)
            for cu in (None, torch.tensor([0, 0, 1, 3, 35, 35, 45], device=device)):
                x = draw(2, 70, 40) if cu is None else draw(1, 45, 48)[..., :40]
                state = None if (W + (cu is None)) % 2 else draw(2 if cu is None else 6, 40, W - 1)
                options: dict[str, Any] = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu}
                a, b = (short_conv(x, w, impl=i, **options) for i in ("triton", "reference"))
                check_close("conv", a[0], b[0], limit)
                assert torch.equal(a[1], b[1])  # type: ignore[arg-type]
            x, state = draw(5, 40), draw(5, 40, W - 1)
            a, b = (short_conv_step(x, w, state, impl=i) for i in ("triton", "reference"))
            check_close("conv step", a[0], b[0], limit)
            assert torch.equal(a[1], b[1])
        x, gate, w = draw(3, 7, 100), draw(3, 7, 100), draw(100, dtype=F32)
        check_close("norm", rms_norm(x, w, 1e-5, impl="triton"), rms_norm(x, w, 1e-5, impl="reference"), limit)
        a, b = (gated_rms_norm(x, gate, w, 1e-5, impl=i) for i in ("triton", "reference"))
        check_close("gated norm", a, b, limit)


def _derived(f: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Results of f and the gradients of its leaves, for upstream gradients that depend on the results' shapes only."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    results = f(*leaves)
    gen = torch.Generator().manual_seed(3)
    up = [torch.randn(y.shape, generator=gen).to(y.device, y.dtype) for y in results]
    return [*results, *torch.autograd.grad(results, leaves, up)]


def check_conv_and_norm_gradients(device: str, dtype: torch.dtype) -> None:
    """Against float64 on the same inputs: dx, the weights' and the states' gradients; two runs are bit-equal."""
    limit = {F32: 2e-6, BF16: 4e-3, F16: 6e-4}[dtype]
    gen = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=gen).to(device, dtype)

    def compare(name: str, f: Any, leaves: list[Tensor]) -> None:
        got = _derived(lambda *a: f("triton", *a), leaves)
        again = _derived(lambda *a: f("triton", *a), leaves) if device == "cuda" else got
        want = _derived(lambda *a: f("reference", *a), [t.double() for t in leaves])
        for i, (a, b, c) in enumerate(zip(got, again, want, strict=True)):
            assert torch.equal(a, b), f"{name} {i}: two runs differ"
            check_close(f"{name} {i}", a, c, limit)

    pack = torch.tensor([0, 0, 1, 3, 70, 70, 80], device=device)
    for W, channels, cu, states in (
        (4, (40, 16, 33), pack, True), (4, (20,), None, False), (3, (20, 8), None, True), (2, (20,), pack, False),
    ):  # fmt: skip
        B, T, N = (2, 66, 2) if cu is None else (1, 80, 6)
        n = len(channels)
        xs, ws = [draw(B, T, D) for D in channels], [draw(D, W, dtype=F32) for D in channels]
        ss = [draw(N, D, W - 1) for D in channels] if states else []

        def convs(impl: str, *a: Tensor, cu: Tensor | None = cu, n: int = n) -> list[Tensor]:
            ys, finals = short_convs(
                a[:n],
                a[n : 2 * n],
                initial_states=a[2 * n :] or None,
                output_final_state=True,
                cu_seqlens=cu,
                impl=impl,
            )
            assert finals is not None
            return [*ys, *finals]

        compare(f"convolution W={W}", convs, [*xs, *ws, *ss])
    x, gate, w = draw(3, 7, 100), draw(3, 7, 100), draw(100, dtype=F32)
    compare("norm", lambda impl, x, w: [rms_norm(x, w, 1e-5, impl=impl)], [x, w])
    compare("gated norm", lambda impl, x, g, w: [gated_rms_norm(x, g, w, 1e-5, impl=impl)], [x, gate, w])

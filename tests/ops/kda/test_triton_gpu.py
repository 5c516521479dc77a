"""The Triton kernels on a GPU: the shared cases in every dtype, the laws by the bit, graphs, and the sizes that overflow."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton_checks as checks
from triton_checks import BF16, F16, F32

from openkda.ops.kda.api import kda, kda_step
from openkda.ops.kda.call import CALLS as KDA_CALLS
from openkda.ops.kda.gate import BoundedGate, SoftplusGate
from openkda.ops.kda_block.api import BlockState, kda_block, kda_block_commit
from openkda.ops.short_conv.api import short_conv
from openkda.testing.cases import kda_cases
from openkda.testing.compare import check_close, rel
from openkda.testing.inputs import KDAInputs, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = [BF16, F16, F32]
CASES = kda_cases()


def some_cases() -> list[Any]:
    """In bfloat16 an eighth of the list. Half as many others in float16, which has the kernels of bfloat16 but for their loads
    and stores, and in float32, which the interpreter runs, too. Every case is two kernels to compile."""
    every = {BF16: range(0, len(CASES), 8), F16: range(4, len(CASES), 16), F32: range(12, len(CASES), 16)}
    return [pytest.param(i, dtype, id=f"{CASES[i].id}-{dtype}") for dtype in DTYPES for i in every[dtype]]


@pytest.mark.parametrize("i, dtype", some_cases())
def test_case(i: int, dtype: torch.dtype) -> None:
    checks.check_case(CASES[i], "cuda", dtype)


@pytest.mark.parametrize("i", range(3, len(CASES), 40), ids=lambda i: CASES[i].id)
def test_exact_operands_on_bfloat16(i: int) -> None:
    x = CASES[i].inputs().to(dtype=BF16, device="cuda")
    got, want = checks.run(x, "triton_exact"), checks.reference(x)
    check_close("output", got.output, want.output, 2e-3)  # bfloat16's own rounding
    check_close("state", got.final_state, want.final_state, 1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "check",
    [
        checks.check_positions, checks.check_step, checks.check_bf16_states, checks.check_strides, checks.check_laws,
        checks.check_absurd_future, checks.check_splits, checks.check_block,
        checks.check_commit, checks.check_block_nans, checks.check_conv_and_norms, checks.check_conv_and_norm_gradients,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_law(check: Any, dtype: torch.dtype) -> None:
    check("cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [3, 40])
def test_pool(T: int, dtype: torch.dtype) -> None:
    checks.check_pool("cuda", dtype, T)


@pytest.mark.parametrize("K, V", [(128, 128), (256, 64), (100, 200), (8, 256), (60, 96)])
def test_sizes(K: int, V: int) -> None:
    for dtype in (BF16, F32):
        x = make_inputs(0, T=70, K=K, V=V, gate="softplus", use_qk_l2norm=True).to(dtype=dtype, device="cuda")
        got, want = checks.run(x), checks.reference(x)
        check_close("output", got.output, want.output, checks.LIMITS[dtype][0])
        check_close("state", got.final_state, want.final_state, checks.LIMITS[dtype][1])  # type: ignore[arg-type]


def test_goal_accuracy() -> None:
    """The promise for both gates at K = V = 128, over shifted, uniform and per-channel gates: 3e-3 and 1e-3."""
    names = ("-8", "-4", "0", "4", "8", "uniform", "channels")
    gen = torch.Generator().manual_seed(0)
    z = torch.randn(1, 512, len(names), 128, generator=gen)
    for i, name in enumerate(names[:5]):
        z[:, :, i] += float(name)
    z[:, :, 5] = torch.rand(1, 512, 128, generator=gen) * 16 - 8
    z[:, :, 6] += torch.rand(128, generator=gen) * 16 - 8
    for gate in ("bounded", "softplus"):
        x = make_inputs(0, T=512, H=len(names), K=128, gate=gate, use_qk_l2norm=True, use_beta_sigmoid=True)
        x.g = z
        assert x.gate is not None
        A_log, dt = torch.zeros(len(names)), torch.zeros(len(names), 128)
        x.gate = BoundedGate(-5.0, A_log, dt) if gate == "bounded" else SoftplusGate(A_log, dt)
        x = x.to(dtype=BF16, device="cuda")
        got, want = checks.run(x), checks.reference(x)
        for i, name in enumerate(names):
            assert rel(got.output[:, :, i], want.output[:, :, i]) < 3e-3, (gate, name)
            assert rel(got.final_state[:, i], want.final_state[:, i]) < 1e-3, (gate, name)  # type: ignore[index]


def test_many_members() -> None:
    """70000 members, empty ones among them; a random sample of 50 against each alone."""
    gen = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (70000,), generator=gen)
    lengths[-1] = 1
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).cuda()
    x = make_inputs(0, T=int(cu[-1]), K=16, initial_state=False).to(dtype=F32, device="cuda")
    got = checks.run(x, cu_seqlens=cu)
    for n in torch.randint(0, 70000, (50,), generator=gen).tolist():
        part = slice(int(cu[n]), int(cu[n + 1]))
        one = KDAInputs(**{**x.__dict__, **{m: getattr(x, m)[:, part] for m in ("q", "k", "v", "g", "beta")}})
        want = checks.reference(one)
        check_close(f"state {n}", got.final_state[n : n + 1], want.final_state, 2e-5)  # type: ignore[index, arg-type]
        check_close(f"output {n}", got.output[:, part], want.output, 2e-5)


def test_more_than_2_31_elements() -> None:
    """The last tokens of a call whose tensors pass 2^31 elements, in windows, equal the same tokens from the state before."""
    H, K, T = 96, 128, 176_000
    gen = torch.Generator("cuda").manual_seed(0)
    q, k, v, g = (torch.randn(1, T, H, K, generator=gen, device="cuda", dtype=BF16) for _ in range(4))
    beta = torch.randn(1, T, H, generator=gen, device="cuda", dtype=BF16)
    flags = ("use_qk_l2norm", "use_beta_sigmoid", "output_final_state")
    options: dict[str, Any] = {"gate": BoundedGate(), **dict.fromkeys(flags, True)}
    cut = T - 160
    with torch.no_grad():
        whole = kda(q, k, v, g, beta, impl="triton", **options)
        before = kda(*(t[:, :cut] for t in (q, k, v, g, beta)), impl="triton", **options)
        rest = kda(
            *(t[:, cut:] for t in (q, k, v, g, beta)), impl="triton", initial_state=before.final_state, **options
        )  # fmt: skip
    assert torch.equal(whole.output[:, cut:], rest.output) and torch.equal(whole.final_state, rest.final_state)  # type: ignore[arg-type]


def test_a_convolution_of_more_than_2_31_elements() -> None:
    """The last rows and their gradient equal those of the same rows behind their own window."""
    T, D, cut = 180_000, 12_288, 179_900
    x = torch.randn(1, T, D, device="cuda", dtype=BF16).requires_grad_()
    w = torch.randn(D, 4, device="cuda")
    y, final = short_conv(x, w, output_final_state=True, impl="triton")
    up = torch.zeros_like(y)
    up[:, cut:] = 1.0
    (dx,) = torch.autograd.grad(y, x, up)
    tail, before = x.detach()[:, cut:].clone().requires_grad_(), x.detach()[:, cut - 3 : cut].transpose(1, 2)
    want, want_final = short_conv(tail, w, initial_state=before, output_final_state=True, impl="reference")
    assert rel(y[:, cut:], want) < 4e-3 and torch.equal(final, want_final)  # type: ignore[arg-type]
    assert rel(dx[:, cut:], torch.autograd.grad(want.sum(), tail)[0]) < 6e-3
    assert not bool(dx[:, : cut - 3].any())


def test_graph_with_padded_rows() -> None:
    """A captured step, replayed with other slots and fewer live rows, equals the eager one by the bit; other slots stay."""
    x = make_inputs(0, B=6, T=1, K=32, H=2).to(dtype=BF16, device="cuda")
    tokens = [t[:, 0].contiguous() for t in (x.q, x.k, x.v, x.g, x.beta)]
    pool = torch.randn(9, 2, 32, 32, device="cuda")
    slots = torch.tensor([0, 1, 2, 3, 4, 5], device="cuda")
    with torch.no_grad():
        kda_step(*tokens, pool.clone(), gate=x.gate, state_indices=slots, impl="triton")
        graph, static = torch.cuda.CUDAGraph(), pool.clone()
        with torch.cuda.graph(graph):
            o, _ = kda_step(*tokens, static, gate=x.gate, state_indices=slots, impl="triton")
        for live in ([8, -1, 3, -1, -1, -1], [1, 0, 2, 7, -1, 4]):
            slots.copy_(torch.tensor(live))
            static.copy_(pool)
            for t in tokens:
                t.normal_()
            tokens[4].sigmoid_()
            graph.replay()
            eager = pool.clone()
            want, _ = kda_step(*tokens, eager, gate=x.gate, state_indices=slots, impl="triton")
            assert torch.equal(o, want) and torch.equal(static, eager)
            idle = [s for s in range(9) if s not in live]
            assert torch.equal(static[idle], pool[idle])


def test_block_in_a_graph() -> None:
    tokens, weights, state = checks.block_inputs(4, 1, (2, 2, 32, 32), 4, 8, "cuda", BF16)
    slots = torch.tensor([5, -1, 2, 0], device="cuda")
    gate = BoundedGate()
    pools = [BlockState(*(t.clone() for t in state.tensors())) for _ in range(2)]
    with torch.no_grad():
        scratch = BlockState(*(t.clone() for t in state.tensors()))
        kda_block(*tokens, weights=weights, state=scratch, gate=gate, slots=slots, impl="triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kda_block(*tokens, weights=weights, state=pools[0], gate=gate, slots=slots, impl="triton").output
        for _ in range(3):
            graph.replay()
            want = kda_block(*tokens, weights=weights, state=pools[1], gate=gate, slots=slots, impl="triton").output
            assert torch.equal(y, want)
    assert all(torch.equal(a, b) for a, b in zip(pools[0].tensors(), pools[1].tensors(), strict=True))


def test_verify_and_commit_in_one_graph() -> None:
    """Drafted tokens, every state, the accepted ones kept: replayed with other counts, and bit-equal to the eager calls."""
    tokens, weights, state = checks.block_inputs(3, 4, (2, 2, 32, 32), 4, 6, "cuda", BF16)
    slots, counts = torch.tensor([5, -1, 2], device="cuda"), torch.tensor([1, 2, 3], device="cuda")
    gate, static = BoundedGate(), BlockState(*(t.clone() for t in state.tensors()))

    def verify(pool: BlockState) -> None:
        every = kda_block(*tokens, weights=weights, state=pool, gate=gate, slots=slots, keep="all")
        kda_block_commit(every.states, *tokens[:3], counts, state=pool, slots=slots)  # type: ignore[arg-type]

    with torch.no_grad():
        verify(BlockState(*(t.clone() for t in state.tensors())))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            verify(static)
        for accepted in ([4, 1, 0], [2, 0, 4], [1, 1, 1]):
            counts.copy_(torch.tensor(accepted))
            eager = BlockState(*(t.clone() for t in static.tensors()))
            graph.replay()
            verify(eager)
            assert all(torch.equal(a, b) for a, b in zip(static.tensors(), eager.tensors(), strict=True))


def test_repeated_calls_under_other_streams_and_memory() -> None:
    """The tape of a call, played on a side stream and on other tensors, gives what a call looked at anew gives."""
    side = torch.cuda.Stream()
    for i in range(5):
        x = make_inputs(i, T=50, K=32, use_qk_l2norm=True).to(dtype=BF16, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            got = checks.run(x)
        side.synchronize()
        KDA_CALLS.replays.clear()
        want = checks.run(x)
        assert torch.equal(got.output, want.output) and torch.equal(got.final_state, want.final_state)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_torch_compile(mode: Any) -> None:
    x = make_inputs(0, T=40, K=32).to(dtype=BF16, device="cuda")

    def f(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kda(q * 2, x.k, v, x.g, x.beta, gate=x.gate, scale=0.5).output * 3

    with mode():
        want = f(x.q, x.v)
        got = torch.compile(f, fullgraph=True)(x.q, x.v)
    assert rel(got, want) < 5e-3


def test_layers_copy_and_pickle() -> None:
    from openkda.layers.kda import KimiDeltaAttention
    from openkda.models.presets import PRESETS

    layer = KimiDeltaAttention(PRESETS["tiny"], 0).cuda().eval()
    x = torch.randn(2, 20, PRESETS["tiny"].hidden_size, device="cuda")
    with torch.no_grad():
        want = layer(x)[0]
        assert torch.equal(copy.deepcopy(layer)(x)[0], want)
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], want)


def test_repeats_are_bit_equal_under_load() -> None:
    x = make_inputs(0, T=700, H=8, K=128, use_qk_l2norm=True).to(dtype=BF16, device="cuda")
    want = checks.run(x)
    side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(30):
        with torch.cuda.stream(side):
            busy @ busy
        got = checks.run(x)
        assert torch.equal(got.output, want.output) and torch.equal(got.final_state, want.final_state)  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_no_compilation_after_the_first_call(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other lengths, batches and packs (of as many members, to the next power of two, for the Hopper kernels) are served by
    what the first call compiled."""
    from triton import knobs

    from openkda.ops.triton import ahead

    monkeypatch.setattr(ahead, "ENABLED", True)
    options = {"H": 80, "K": 128, "use_qk_l2norm": True, "use_beta_sigmoid": True}

    def call(**sizes: Any) -> None:
        x = make_inputs(0, **options, **sizes)
        x.gate = BoundedGate(-5.0, torch.zeros(80), torch.zeros(80, 128))
        checks.run(x.to(dtype=BF16, device="cuda"), impl)

    def convolve(B: int, T: int) -> None:
        short_conv(torch.randn(B, T, 64, device="cuda"), torch.randn(64, 4, device="cuda"), impl="triton")

    def decode(N: int) -> None:
        tokens, weights, state = checks.block_inputs(N, 1, (2, 2, 128, 128), 4, N, "cuda", BF16)
        slots = torch.arange(N, device="cuda")
        kda_block(*tokens, weights=weights, state=state, gate=BoundedGate(), slots=slots)

    with torch.no_grad():
        call(T=40), call(lengths=(30, 10)), convolve(1, 40), decode(3)
        compiled: list[Any] = []
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about["repr"]))
        for B, T in ((1, 17), (1, 333), (2, 100), (3, 64)):
            call(B=B, T=T), convolve(B, T)
        for lengths in ((5, 0, 70, 1, 33), (129, 64), (17,) * 11):
            call(lengths=lengths)
        for N in (1, 2, 40):
            decode(N)
    assert not compiled


@pytest.mark.parametrize("few", [132, 0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group, W", [(1, 4), (2, 4), (1, 3), (2, 2)])
def test_one_token_of_published_heads(
    group: int, W: int, dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 128 have a decoding kernel of their own, in two layouts: fresh states and pools, padded rows, strided pools.
    Gates and strides take turns, so that each meets every value of the others: every combination is a kernel to compile."""
    from openkda.ops.kda_block import hopper
    from openkda.ops.kda_block.call import CALLS

    monkeypatch.setattr(hopper, "FEW", few)
    CALLS.forget()
    limit = {F32: 2e-5, BF16: 4e-3, F16: 1e-3}[dtype]
    H = 3
    strided = (group == 2) ^ (few > 0) ^ (dtype == F32)
    kind = ("bounded", "softplus")[(W == 4) ^ (few > 0) ^ (dtype == F16)]
    tokens, weights, state = checks.block_inputs(5, 1, (H, H * group, 128, 128), W, 9, "cuda", dtype)
    gate = make_inputs(0, T=1, H=H, HV=H * group, K=128, gate=kind).to(dtype=F32, device="cuda").gate
    assert gate is not None

    def copy_of(t: torch.Tensor, strided: bool = strided) -> torch.Tensor:
        return torch.stack([t, torch.full_like(t, float("nan"))], 1)[:, 0] if strided else t.clone()

    slots = torch.tensor([8, -1, 0, 3, -1], dtype=torch.int32, device="cuda")
    runs = []
    for impl in ("triton", "reference"):
        pool = BlockState(*(copy_of(t) for t in state.tensors()))
        with torch.no_grad():
            y = kda_block(*tokens, weights=weights, state=pool, gate=gate, slots=slots, impl=impl).output
            first = BlockState(*(copy_of(t[:5]) for t in state.tensors()))
            z, new, _ = kda_block(*tokens, weights=weights, state=first, gate=gate, impl=impl)
        assert new is not None
        runs.append((y, z, pool, new))
    (a, c, pool_a, new_a), (b, d, pool_b, new_b) = runs
    check_close("pool output", a, b, limit)
    check_close("fresh output", c, d, limit)
    assert not a[[1, 4]].any()
    for x, want, old in zip(pool_a.tensors(), pool_b.tensors(), state.tensors(), strict=True):
        check_close("pool", x, want, limit)
        assert torch.equal(x[[1, 2, 4, 5, 6, 7]], old[[1, 2, 4, 5, 6, 7]]), "a slot of nobody was written"
    for x, want in zip(new_a.tensors(), new_b.tensors(), strict=True):
        check_close("fresh state", x, want, limit)

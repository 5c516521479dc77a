"""The Hopper forward: every schedule against the float64 loop and the laws (gpu); compiled ahead of time for sm_90 (CPU)."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any

import pytest
import torch
from barrier_memory import shared_places
from register_operands import overwritten, overwritten_in

from openkda.ops.kda.api import BoundedGate, SoftplusGate, kda
from openkda.testing.compare import check_close
from openkda.testing.inputs import KDAInputs, make_inputs

gpu = pytest.mark.gpu
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
# bfloat16 rounding of the output alone is 1.7e-3; measured worst of the random sets: 1.80e-3 and 6.2e-4.
OUTPUT, STATE = 3e-3, 1e-3
SCHEDULES: tuple[Any, ...] = ("fused", "two_pass", ("segments", 2), ("segments", 5))


def bf16(seed: int, **options: Any) -> KDAInputs:
    """K3-shaped inputs on the GPU: 128 channels, everything inside the kernel, tokens rounded to bfloat16."""
    options = {
        "K": 128,
        "gate": "bounded",
        "use_qk_l2norm": True,
        "use_beta_sigmoid": True,
        "unit_keys": False,
    } | options
    return make_inputs(seed, **options).to(dtype=torch.bfloat16, device="cuda")


def truth(x: KDAInputs) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(dtype=torch.float64)
    out = kda(wide.q, wide.k, wide.v, wide.g, wide.beta, **wide.kwargs(), impl="reference")
    return out.output, out.final_state


def scheduled(x: KDAInputs, schedule: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from openkda.ops.kda.hopper.launch import forward

    assert isinstance(x.gate, BoundedGate)
    return forward(
        x.q, x.k, x.v, x.g, x.beta, x.gate.A_log, x.gate.dt_bias.flatten(), scale=128**-0.5,
        lower_bound=x.gate.lower_bound, initial_state=x.initial_state, final_state=True,
        cu_seqlens=x.options.get("cu_seqlens"), schedule=schedule,
    )  # fmt: skip


@gpu
@needs_hopper
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    "T, HV, decay, near",
    [(17, 2, "random", False), (63, 2, "slow", False), (64, 4, "fast", False), (65, 2, "zero", False),
     (129, 6, "random", False), (200, 2, "saturated", False), (321, 2, "slow", True), (130, 2, "unit", True)],
)  # fmt: skip
def test_against_the_loop(schedule: Any, T: int, HV: int, decay: str, near: bool) -> None:
    x = bf16(T, T=T, H=2, HV=HV, decay=decay, near_equal_keys=near)
    want_o, want_S = truth(x)
    o, S = scheduled(x, schedule)
    check_close("output", o, want_o, OUTPUT)
    check_close("state", S, want_S, STATE)
    if schedule == "fused":
        assert all(torch.equal(a, b) for a, b in zip((o, S), scheduled(x, "two_pass"), strict=True)), "one arithmetic"


@gpu
@needs_hopper
@pytest.mark.parametrize("schedule", ["fused", "two_pass"])
@pytest.mark.parametrize("lengths", [(0, 1, 2, 63, 64, 65, 129), (1,), (0, 0, 5), (1, 1, 1, 1), (129, 0, 1)], ids=str)
def test_packs(schedule: str, lengths: tuple[int, ...]) -> None:
    x = bf16(7, H=2, lengths=lengths)
    o, S = scheduled(x, schedule)
    want_o, want_S = truth(x)
    check_close("output", o, want_o, OUTPUT)
    check_close("state", S, want_S, STATE)


@gpu
@needs_hopper
@pytest.mark.parametrize(
    "lengths", [(0, 1, 2, 63, 64, 65, 129), (321,), (0, 0, 5), (129, 0, 1), (0, 3, 0, 70) * 18], ids=len
)
def test_programs_that_walk(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """On three SMs every program goes on to further sequences and heads. The fused kernel is the same one then, to the bit;
    two passes take another scan."""
    from openkda.ops.kda.hopper import launch

    x = bf16(18, H=2, HV=6, lengths=lengths)
    want_o, want_S = truth(x)
    one_each = scheduled(x, "fused")
    monkeypatch.setattr(launch, "_sm_count", lambda index: 3)
    walked = scheduled(x, "fused")
    assert all(torch.equal(a, b) for a, b in zip(walked, one_each, strict=True))
    for o, S in (walked, scheduled(x, "two_pass")):
        check_close("output", o, want_o, OUTPUT)
        check_close("state", S, want_S, STATE)


@gpu
@needs_hopper
@pytest.mark.parametrize("sms", [3, 132])
def test_some_chains_of_a_pack_are_walked_again(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with near keys, be it in one tile: two passes, which walk nothing twice, give the same bits."""
    from openkda.ops.kda.hopper import launch

    lengths = (70, 0, 200, 131, 64, 9, 330, 1, 128)
    x, y = (bf16(21, H=2, HV=4, decay="slow", near_equal_keys=near, lengths=lengths) for near in (False, True))
    start = 0
    for i, n in enumerate(lengths):
        near = range(start, start + n)[(slice(0), slice(16), slice(n // 3, n // 3 + 40), slice(-16, None))[i % 4]]
        x.k[:, near.start : near.stop, i % 2] = y.k[:, near.start : near.stop, i % 2]
        start += n
    monkeypatch.setattr(launch, "_sm_count", lambda index: sms)
    found = [scheduled(x, schedule) for schedule in ("fused", "two_pass")]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    monkeypatch.setattr(launch, "APART", False)
    assert not torch.equal(scheduled(x, "fused")[0], found[0][0])


@gpu
@needs_hopper
@pytest.mark.parametrize("schedule", ["fused", "two_pass"])
def test_a_neighbour_in_the_pack_changes_nothing(schedule: str) -> None:
    lengths = (70, 100, 33)
    x = bf16(8, H=2, lengths=lengths)
    o, S = scheduled(x, schedule)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(x, name)[:, 70:170] = float("nan")
    poisoned, P = scheduled(x, schedule)
    assert torch.equal(poisoned[:, :70], o[:, :70]) and torch.equal(poisoned[:, 170:], o[:, 170:])
    assert torch.equal(P[[0, 2]], S[[0, 2]])


@gpu
@needs_hopper
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("t", [0, 15, 16, 40, 63, 64, 100])
def test_the_future_never_changes_the_past(schedule: Any, t: int) -> None:
    x = bf16(9, T=150, H=2)
    before, _ = scheduled(x, schedule)
    other = bf16(10, T=150, H=2)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(x, name)[:, t + 1 :] = getattr(other, name)[:, t + 1 :]
    after, _ = scheduled(x, schedule)
    assert torch.equal(after[:, : t + 1], before[:, : t + 1])


@gpu
@needs_hopper
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("t", [0, 13, 14, 15, 16, 30, 31, 40, 62, 63, 64, 94, 95, 100])
def test_the_future_never_changes_the_past_of_near_keys(gate: str, t: int) -> None:
    """Neither by making a tile near nor by ending it. All implementations of one arithmetic."""
    x, y = (bf16(9 + i, T=150, H=2, gate=gate, decay="slow", near_equal_keys=not i) for i in range(2))
    for first, second in ((x, y), (y, x), (x, x)):
        late = KDAInputs(**vars(first))
        for name in ("q", "k", "v", "g", "beta"):
            end = getattr(second, name)[:, t + 1 :]
            end = end.flip(1) if second is first else end
            setattr(late, name, torch.cat([getattr(first, name)[:, : t + 1], end], 1))
        for schedule in ("fused", "two_pass") if gate == "bounded" else (None,):
            outputs = []
            for z in (first, late):
                if schedule is None:
                    outputs.append(kda(z.q, z.k, z.v, z.g, z.beta, **z.kwargs(), impl="hopper").output)
                else:
                    outputs.append(scheduled(z, schedule)[0])
            assert torch.equal(outputs[0][:, : t + 1], outputs[1][:, : t + 1])


@gpu
@needs_hopper
def test_cut_anywhere_gives_the_same() -> None:
    """Each against the truth. Against each other bfloat16's rounding of two outputs, 1.7e-3 each and not the same one
    wherever the float32 values straddle a boundary, leaves up to sqrt(2) 1.7e-3; float32 states carry none."""
    x = bf16(11, T=300, H=2, decay="slow")
    whole, S = scheduled(x, "two_pass")
    want_o, want_S = truth(x)
    check_close("output", whole, want_o, OUTPUT)
    check_close("state", S, want_S, STATE)
    for cut in (1, 64, 150, 299):
        head, tail = (
            KDAInputs(**{**vars(x), **{n: getattr(x, n)[:, part].contiguous() for n in ("q", "k", "v", "g", "beta")}})
            for part in (slice(0, cut), slice(cut, None))
        )
        first, tail.initial_state = scheduled(head, "two_pass")
        second, end = scheduled(tail, "fused")
        check_close("output", torch.cat([first, second], 1), want_o, OUTPUT)
        check_close("state", end, want_S, STATE)
        check_close("state of cut and uncut", end, S, 1e-3)


@gpu
@needs_hopper
def test_long_sequences_go_through_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of one window, whether each has its own memory or every other one the same."""
    from openkda.ops.kda.hopper import launch, schedule

    x = bf16(16, T=330, H=2, decay="slow")
    whole = scheduled(x, "two_pass")
    monkeypatch.setattr(launch, "windows", lambda *sizes: tuple(schedule.Window(n, n == 1) for n in (3, 1, 2)))
    assert all(torch.equal(a, b) for a, b in zip(scheduled(x, "two_pass"), whole, strict=True))
    monkeypatch.setattr(schedule, "WORKSPACE", 2 * 2 * schedule.SLOT_BYTES)
    monkeypatch.setattr(launch, "windows", schedule.windows.__wrapped__)
    assert len(launch.windows(6, 2, 132)) > 1
    assert all(torch.equal(a, b) for a, b in zip(scheduled(x, "two_pass"), whole, strict=True))


@gpu
@needs_hopper
def test_windows_prepared_beside_scans_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large enough that the next window is prepared while this one is scanned: 200 calls, two at a time on two streams."""
    from openkda.ops.kda.hopper import launch, schedule

    plan = (schedule.Window(20, False), schedule.Window(17, False), schedule.Window(11, True))
    monkeypatch.setattr(launch, "windows", lambda *sizes: plan)
    x, y = (bf16(17 + i, T=48 * 64 - 5, H=64, decay="random") for i in range(2))
    want = [scheduled(z, "fused") for z in (x, y)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[Any] = []
    for _ in range(100):
        for stream, z in zip(streams, (x, y), strict=True):
            with torch.cuda.stream(stream):
                found.append(scheduled(z, "two_pass"))
        torch.cuda.synchronize()
        for got, right in zip(found, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
        found.clear()


@gpu
@needs_hopper
@pytest.mark.parametrize("value", [65536.0, 1e5, 1e-6])
def test_large_and_small_states(value: float) -> None:
    """float16 operands carry a power of two per row, so a state beyond 65504 neither overflows nor drowns its row."""
    x = bf16(12, T=64, H=2)
    x.initial_state = torch.zeros_like(x.initial_state)
    x.initial_state[0, 0, 0, 0] = value
    x.q[..., 0], x.k[..., 0] = 0, 0
    for schedule in ("fused", "two_pass"):
        o, S = scheduled(x, schedule)
        want_o, want_S = truth(x)
        check_close("output", o, want_o, OUTPUT)
        check_close("state", S, want_S, STATE)


@gpu
@needs_hopper
def test_through_the_contract() -> None:
    """Strided rows, a float32 beta, no A_log, int64 offsets, repeated runs, a CUDA graph and a full graph of torch.compile."""
    x = bf16(13, H=2, lengths=(100, 200))
    wide = torch.cat([x.q.flatten(2), x.k.flatten(2), x.v.flatten(2)], -1)
    q, k, v = (t.unflatten(-1, (2, 128)) for t in wide.chunk(3, -1))
    gate = BoundedGate(-5.0, None, None)
    options = x.kwargs() | {"gate": gate, "impl": "hopper"}
    beta = x.beta.float()

    def call(v: torch.Tensor) -> Any:
        return kda(q, k, v, x.g, beta, **options)

    got = call(v)
    x.gate, x.beta = BoundedGate(-5.0, torch.zeros(2, device="cuda"), torch.zeros(2, 128, device="cuda")), beta
    want_o, want_S = truth(x)
    check_close("output", got.output, want_o, OUTPUT)
    check_close("state", got.final_state, want_S, STATE)
    again = call(v)
    assert torch.equal(again.output, got.output) and torch.equal(again.final_state, got.final_state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(v)
    captured.output.zero_()
    graph.replay()
    assert torch.equal(captured.output, got.output)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(v).output, got.output)


@gpu
@needs_hopper
def test_awkward_memory_is_copied_not_misread() -> None:
    """Offsets that are a column of a table, and rows two bytes off what the copy engine can address."""
    x = bf16(17, H=2, lengths=(100, 200))
    options = x.kwargs() | {"impl": "hopper"}
    want = kda(x.q, x.k, x.v, x.g, x.beta, **options)
    options["cu_seqlens"] = torch.stack([options["cu_seqlens"], options["cu_seqlens"] + 7], 1)[:, 0]
    q = torch.empty(x.q.numel() + 1, dtype=x.q.dtype, device="cuda")[1:].view_as(x.q).copy_(x.q)
    got = kda(q, x.k, x.v, x.g, x.beta, **options)
    assert torch.equal(got.output, want.output) and torch.equal(got.final_state, want.final_state)


@gpu
@needs_hopper
@pytest.mark.parametrize("gate", ["softplus", None])
@pytest.mark.parametrize(
    "sizes", [{"T": 150, "H": 2}, {"T": 1500, "H": 1, "HV": 2}, {"lengths": (0, 1, 17, 64, 70), "H": 2}], ids=str
)
def test_gates_without_a_bound(gate: str | None, sizes: dict[str, Any]) -> None:
    """Chunks by levels (levels.py) in front of the scan, in one piece and in segments."""
    for decay, near in (("random", False), ("slow", False), ("fast", False), ("slow", True)):
        x = make_inputs(
            19, K=128, gate=gate, decay=decay, use_qk_l2norm=True, use_beta_sigmoid=True, unit_keys=False,
            near_equal_keys=near, **sizes,
        )  # fmt: skip
        x = x.to(dtype=torch.bfloat16, device="cuda")
        out = kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), impl="hopper")
        y = x.to(dtype=torch.float64)
        want = kda(y.q, y.k, y.v, y.g, y.beta, **y.kwargs(), impl="chunkwise")
        check_close(f"output {decay}", out.output, want.output, OUTPUT)
        check_close(f"state {decay}", out.final_state, want.final_state, STATE)


@gpu
@needs_hopper
def test_refusals_name_every_reason() -> None:
    x = bf16(14, T=64, H=1)
    with pytest.raises(NotImplementedError) as error:
        kda(x.q.half(), x.k.half(), x.v.half(), x.g.half(), x.beta.half(), gate=SoftplusGate(torch.zeros(1, device="cuda")),
            state_v_first=True, impl="hopper")  # fmt: skip
    for reason in ("bfloat16", "use_qk_l2norm", "use_beta_sigmoid", "states [.., K, V]"):
        assert reason in str(error.value)


def test_refused_without_a_gpu() -> None:
    x = make_inputs(15, T=64, K=128)
    with pytest.raises(NotImplementedError, match="needs CUDA tensors, received cpu"):
        kda(x.q, x.k, x.v, x.g, x.beta, gate=x.gate, impl="hopper")


# ---- compiled for sm_90 without a GPU -------------------------------------------------------------------------------


def _signature() -> dict[str, str]:
    from triton.experimental.gluon import language as gl

    rows = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    half = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    named = {n: f"tensordesc<bf16[64, 128],{rows!r}>" for n in ("q_desc", "k_desc", "g_desc")}
    named |= {n: f"tensordesc<bf16[64, 64],{half!r}>" for n in ("v_desc", "o_desc")}
    named |= {"x_desc": f"tensordesc<fp16[64, 128],{rows!r}>", "tm_desc": f"tensordesc<fp16[32, 32],{rows!r}>"}
    named |= {"o_ptr": "*bf16", "beta_ptr": "*bf16", "cu_ptr": "*i32", "ranks_ptr": "*i32"}
    floats = ("a_log_ptr", "dt_ptr", "s0_ptr", "st_ptr", "dec_ptr", "local_ptr", "transition_ptr")
    named |= {n: "*fp32" for n in (*floats, "m_ptr", "l_ptr", "init_ptr")}
    named["k_ptr"] = "*bf16"
    sizes = ("T", "rows", "first", "HV", "groups", "k_row", "n_seqs", "segments", "chains")
    return named | {n: "i32" for n in (*sizes, "enters", "ranges", "beside")} | {"scale": "fp32", "bound": "fp32"}


def _compile(kernel: Any, constants: dict[str, Any], **options: int) -> tuple[dict[str, int], int, str]:
    """ptxas's register and spill counts, bytes of shared memory, and ptxas's remarks. No register operand of a product may be
    written to before the product has been waited for, and no barrier's memory may be used for anything else."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    named = _signature()
    signature = {n: "constexpr" if n in constants else named[n] for n in kernel.arg_names}
    fixed = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    built = triton.compile(
        source(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | options
    )
    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w") as file:
            file.write(built.asm["ptx"])
        command = [
            os.path.join(tools, "ptxas"),
            "-v",
            "-arch=sm_90a",
            source,
            "-o",
            os.path.join(folder, "kernel.cubin"),
        ]
        remarks = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert not overwritten(command[-1])
    assert not shared_places(built.asm["ptx"])
    counts = {n: int(v) for v, n in re.findall(r"(\d+) bytes (spill stores|spill loads)", remarks)}
    return counts, built.metadata.shared, remarks


def test_an_overwritten_operand_is_found() -> None:
    product = "HGMMA.64x64x16.F32 R24, R8, gdesc[UR4], R24, gsb0"
    write, wait = "FMNMX R10, R3, R4, !PT", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    assert overwritten_in([product, write, wait]) == [(write, product)]
    assert not overwritten_in([product, wait, write]) and not overwritten_in([product, "FADD R12, R3, R4", wait])


def test_a_barrier_whose_memory_others_use_is_found() -> None:
    init = "add.s32 %r2, %r1, 512;\n@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;\n"
    for use in (
        "ld.shared.b32 %r3, [global_smem+512];",
        "st.shared.v2.b32 [%r7+512], {%r3, %r4};",
        "add.s32 %r9, %r8, 512;\n@%p3 st.shared.b32 [ %r9 + 0 ], %r3;",
    ):
        assert shared_places(init + use) == {512}
        assert not shared_places(init + use.replace("512", "520"))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("which, varlen", [(w, v) for w in ("fused", "prepare", "scan", "split") for v in (False, True)]
                         + [("prepare, long pack", True), ("ends", False), ("merge", False)])  # fmt: skip
def test_compiles_for_sm90_without_spilling(which: str, varlen: bool, apart: bool) -> None:
    """A spilled register costs hundreds of cycles here: shared memory leaves the L1 cache no room (docs/decisions.md)."""
    pytest.importorskip("triton", reason="triton is not installed")
    from openkda.ops.kda.hopper import TRITON_RELEASE, _triton_release

    if _triton_release() != TRITON_RELEASE:
        pytest.skip(f"Gluon of Triton {TRITON_RELEASE}")
    from openkda.ops.kda.hopper.forward import kda_forward_kernel
    from openkda.ops.kda.hopper.merge import merge_segments_kernel
    from openkda.ops.kda.hopper.prepare import kda_prepare_kernel
    from openkda.ops.kda.hopper.scan import kda_ends_kernel, kda_scan_kernel

    scan = {"VARLEN": varlen, "SPLIT": False}
    options = {"num_warps": 8} if which == "merge" else {}
    kernel, constants, spill, shared = {
        "fused": (kda_forward_kernel, {"STATE_IN": 1, "STATE_OUT": True, "VARLEN": varlen}, 224, 232448),
        "prepare": (
            kda_prepare_kernel,
            {"VARLEN": varlen, "NP": 64, "LAST_FIRST": not varlen},
            0,
            76458,
        ),  # three CTAs an SM
        "prepare, long pack": (kda_prepare_kernel, {"VARLEN": True, "NP": 1024, "LAST_FIRST": False}, 0, 76458),
        "scan": (kda_scan_kernel, scan, 16, 232448),
        "split": (kda_scan_kernel, scan | {"SPLIT": True}, 16, 232448),
        "ends": (kda_ends_kernel, {}, 16, 232448),
        "merge": (merge_segments_kernel, {"HAS_S0": True, "BV": 16}, 0, 232448),
    }[which]
    if which == "fused":
        constants = constants | {"AGAIN": apart}
    elif which.startswith("prepare"):
        constants = constants | {"APART": apart}
    elif apart:
        pytest.skip("only what prepares chunks knows of near keys")
    counts, used, remarks = _compile(kernel, constants, **options)
    assert counts["spill stores"] <= spill and counts["spill loads"] <= spill, remarks
    assert used <= shared
    if which.startswith("prepare"):
        assert int(re.findall(r"Used (\d+) registers", remarks)[0]) <= 168, remarks  # three CTAs an SM
    assert "serialized" not in remarks, remarks  # ptxas serialises wgmma when registers run out

"""The host side of the Triton kernels on a CPU: what a repeated call hands to its kernels, and when it is looked at anew."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from fake_cuda import Card, fake_card

import openkda.ops.kda.triton as kda_kernels
import openkda.ops.kda_block.triton as block_kernels
import openkda.ops.norm.triton as norm_kernels
import openkda.ops.short_conv.triton as conv_kernels
from openkda.ops.kda.api import KDAOutput, kda, kda_step
from openkda.ops.kda.call import CALLS as KDA_CALLS
from openkda.ops.kda.gate import BoundedGate, SoftplusGate
from openkda.ops.kda_block.api import BlockState, BlockWeights, kda_block
from openkda.ops.kda_block.call import CALLS as BLOCK_CALLS
from openkda.ops.norm.api import CALLS as NORM_CALLS
from openkda.ops.norm.api import gated_rms_norm, rms_norm
from openkda.ops.short_conv.api import CALLS as CONV_CALLS
from openkda.ops.short_conv.api import short_convs

BF16, F32 = torch.bfloat16, torch.float32
H, D = 2, 32
ALL_CALLS = (KDA_CALLS, BLOCK_CALLS, NORM_CALLS, CONV_CALLS)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A device on which launches are only listed."""
    for module in (kda_kernels, block_kernels, norm_kernels, conv_kernels):
        monkeypatch.setattr(module, "triton_refusals", lambda x: [])
    for known in ALL_CALLS:
        known.forget()
    with fake_card() as card, torch.inference_mode():
        yield card
    for known in ALL_CALLS:
        known.forget()


def z(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def prefill(T: int = 40, **changes: Any) -> dict[str, Any]:
    x = {n: z(1, T, H, D) for n in ("q", "k", "v", "g")} | {"beta": z(1, T, H)}
    gate = BoundedGate(-5.0, z(H, dtype=F32), z(H, D, dtype=F32))
    options = {"use_qk_l2norm": True, "use_beta_sigmoid": True, "output_final_state": True, "impl": "triton"}
    return {**x, "gate": gate, "initial_state": z(1, H, D, D, dtype=F32), **options, **changes}


def block() -> dict[str, Any]:
    tokens = {n: z(3, 1, H * D) for n in ("q", "k", "v")}
    tokens |= {"g": z(3, 1, H, D), "beta": z(3, 1, H), "out_gate": z(3, 1, H, D)}
    weights = BlockWeights(*(z(H * D, 4, dtype=F32) for _ in range(3)), z(D, dtype=F32), 1e-5)
    state = BlockState(z(5, H, D, D, dtype=F32), *(z(5, H * D, 3) for _ in range(3)))
    gate = BoundedGate(-5.0, z(H, dtype=F32), z(H, D, dtype=F32))
    return {
        **tokens,
        "weights": weights,
        "state": state,
        "gate": gate,
        "slots": torch.tensor([4, -1, 0]),
        "impl": "triton",
    }


def step(pool: bool) -> dict[str, Any]:
    x = {n: z(3, H, D) for n in ("q", "k", "v", "g")} | {"beta": z(3, H), "state": z(3, H, D, D, dtype=F32)}
    slots = {"state_indices": torch.tensor([2, -1, 0])} if pool else {}
    return {**x, "gate": SoftplusGate(z(H, dtype=F32)), "impl": "triton", **slots}


def convs(states: bool) -> dict[str, Any]:
    return {
        "xs": [z(2, 9, n) for n in (64, 64, 96)], "weights": [z(n, 4, dtype=F32) for n in (64, 64, 96)],
        "initial_states": [z(2, n, 3) for n in (64, 64, 96)] if states else None, "output_final_state": True,
        "impl": "triton",
    }  # fmt: skip


OPS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], int]] = {
    "prefill": (kda, prefill, 2),
    "pack": (kda, lambda: prefill(cu_seqlens=torch.tensor([0, 7, 40]), initial_state=z(2, H, D, D, dtype=F32)), 2),
    "pool": (kda, lambda: prefill(initial_state=z(4, H, D, D, dtype=F32), state_indices=torch.tensor([3])), 2),
    "without a state": (kda, lambda: prefill(initial_state=None, output_final_state=False), 2),
    "unscaled keys": (kda, lambda: prefill(use_qk_l2norm=False), 2),
    "step": (kda_step, lambda: step(False), 1),
    "step on a pool": (kda_step, lambda: step(True), 1),
    "block": (kda_block, block, 1),
    "convolutions": (short_convs, lambda: convs(False), 1),
    "convolutions with states": (short_convs, lambda: convs(True), 1),
    "norm": (rms_norm, lambda: {"x": z(9, 64), "weight": z(64), "eps": 1e-5, "impl": "triton"}, 1),
    "gated norm": (
        gated_rms_norm,
        lambda: {"x": z(9, 64), "gate": z(9, 64), "weight": z(64), "eps": 1e-5, "impl": "triton"},
        1,
    ),
}


def tensors(value: Any) -> list[Tensor]:
    """All tensors of arguments or results, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if hasattr(value, "__dataclass_fields__"):
        items = [getattr(value, n) for n in value.__dataclass_fields__]
    return [t for item in items for t in tensors(item)]


def named(log: Card, arguments: dict[str, Any], result: Any) -> list[tuple[str, tuple[int, ...], tuple[Any, ...]]]:
    """The launches with each address as the place of its tensor among arguments and results; workspace: where in its order."""
    memory = {t.data_ptr(): f"memory {i}" for i, t in enumerate([*tensors(arguments), *tensors(result)])}
    out = []
    first: int | None = None
    for name, grid, values in log.launches:
        seen = []
        for v in values:
            if type(v) is int and v > 1 << 32:
                if v not in memory and first is None:
                    first = v
                v = memory.get(v, f"workspace + {v - (first or 0)}")
            seen.append(v)
        out.append((name, grid, tuple(seen)))
    return out


@pytest.mark.parametrize("name", OPS)
def test_a_repeated_call_hands_over_what_the_first_did(log: Card, name: str) -> None:
    """Six calls on six sets of memory: looked at, recorded, repeated by key, then by guard. Kernels get the same of each."""
    op, make, count = OPS[name]
    runs, kept = [], []
    for _ in range(6):
        log.launches.clear()
        arguments = make()
        result = op(**arguments)
        kept.append((arguments, result))  # so that no address is used again
        runs.append(named(log, arguments, result))
    assert len(runs[0]) == count
    assert all(r == runs[0] for r in runs)
    assert log.direct == 4 * count  # from the third call on past Triton's launcher
    assert sum(len(c.replays) for c in ALL_CALLS) == 1
    shapes = [[(t.shape, t.dtype) for t in tensors(r)] for _, r in kept]
    assert all(s == shapes[0] for s in shapes)
    assert type(kept[0][1]) is type(kept[-1][1])


def test_the_pool_itself_comes_back(log: Card) -> None:
    for _ in range(4):
        x = step(True)
        assert kda_step(**x)[1] is x["state"]
        y = block()
        assert kda_block(**y).state is y["state"]
        p = prefill(initial_state=z(4, H, D, D, dtype=F32), state_indices=torch.tensor([3]))
        out = kda(**p)
        assert isinstance(out, KDAOutput) and out.final_state is p["initial_state"]


def test_repeated_launches_follow_the_stream(log: Card) -> None:
    for _ in range(3):
        kda(**prefill())
    log.stream = 12345
    kda(**prefill())
    log.stream = 0
    kda(**prefill())
    assert log.streams == [0, 0, 12345, 12345, 0, 0]


def test_a_kernel_laid_out_otherwise_is_launched_by_triton(log: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another release of Triton may do it; and a driver that cannot say."""
    for sizes in ([8, 8, 4], []):
        monkeypatch.setattr(log, "sizes", lambda function, found=sizes: found)
        for _ in range(4):
            kda(**prefill())
        assert log.direct == 0 and not KDA_CALLS.replays and len(log.launches) == 8
        log.launches.clear()


def test_every_thread_gets_a_context(log: Card) -> None:
    """A server's threads begin with launches from memory that torch had kept: nothing else would have given them one."""
    for _ in range(3):
        kda(**prefill())

    def serve() -> None:
        with torch.inference_mode():
            kda(**prefill()), kda(**prefill())

    for _ in range(2):
        before = log.entered
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
        assert log.entered == before + 1


def test_what_the_driver_refuses_is_an_error(log: Card) -> None:
    for _ in range(3):
        kda(**prefill())
    log.status = 700
    with pytest.raises(RuntimeError, match="error 700"):
        kda(**prefill())


def test_states_spread_too_far_are_refused(log: Card, tmp_path: Path) -> None:
    """Kernels count in 32 bits within a head; a pool that is written in place cannot be copied."""
    far = torch.from_file(str(tmp_path / "pool"), shared=True, size=(D + 1) << 27, dtype=F32)
    pool = far.as_strided((1, H, D, D), (D * D, D * D, 1 << 27, 1))
    with pytest.raises(NotImplementedError, match=r"2\^31"):
        kda(**prefill(initial_state=pool, state_indices=torch.tensor([0])))
    x = block()
    y = dataclasses.replace(x["state"], recurrent=pool.as_strided((5, H, D, D), (D * D * H, D * D, 1 << 27, 1)))
    with pytest.raises(NotImplementedError, match=r"2\^31"):
        kda_block(**{**x, "state": y})
    assert not log.launches


def test_listeners_hear_repeated_launches(log: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler hangs itself on Triton's launcher."""
    from triton import knobs

    for _ in range(4):
        kda(**prefill())
    assert log.direct == 4
    listening = SimpleNamespace(calls=[print])
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", listening)
    kda(**prefill())
    assert log.direct == 4 and log.listeners[-2:] == [listening, listening]


@pytest.mark.parametrize(
    "change",
    [
        {"q": z(1, 40, H, D + 1)[..., :D]}, {"g": z(1, 40, H, D, dtype=F32)}, {"scale": 0.5}, {"use_qk_l2norm": False},
        {"output_final_state": False}, {"gate": BoundedGate(-4.0)}, {"gate": SoftplusGate(z(H, dtype=F32))},
        {"initial_state": None}, {"state_dtype": BF16, "initial_state": z(1, H, D, D)}, {"state_v_first": True},
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_whatever_a_launch_depends_on_is_part_of_the_key(log: Card, change: dict[str, Any]) -> None:
    """A changed call after many equal ones launches what it would have launched as the first of all."""
    for _ in range(5):
        kda(**prefill())
    log.launches.clear()
    arguments = prefill(**change)
    after = kda(**arguments)
    got = named(log, arguments, after)
    KDA_CALLS.forget()
    log.launches.clear()
    arguments = prefill(**change)
    assert got == named(log, arguments, kda(**arguments))


WHOLE_NUMBERS: dict[str, tuple[Callable[..., Any], Callable[[float], dict[str, Any]], tuple[float, ...]]] = {
    "scale": (kda, lambda n: prefill(scale=n), (1, 0.5, 2)),
    "scale of few tokens": (kda, lambda n: prefill(T=2, scale=n), (1, 0.5, 2)),
    "scale of a step": (kda_step, lambda n: {**step(True), "scale": n}, (1, 0.5, 2)),
    "bound": (kda, lambda n: prefill(gate=BoundedGate(n, z(H, dtype=F32))), (-5, -4.5, -1)),
    "scale of a block": (kda_block, lambda n: {**block(), "scale": n}, (1, 0.5, 2)),
    "eps of a block": (
        kda_block,
        lambda n: {**(x := block()), "weights": dataclasses.replace(x["weights"], norm_eps=n)},
        (1, 0.5, 0),
    ),
    "eps": (rms_norm, lambda n: {"x": z(9, 64), "weight": z(64), "eps": n, "impl": "triton"}, (1, 1e-5, 0)),
}


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_a_number_without_a_fraction_is_no_constant(log: Card, name: str) -> None:
    """Of an integer 1 Triton makes a constant of the binary, which calls with other numbers share; what a kernel is handed is
    what it would get as the first call of all, through Triton and from tapes."""
    op, make, numbers = WHOLE_NUMBERS[name]
    runs: list[list[Any]] = []
    for n in (*numbers, *map(float, numbers)):
        for _ in range(4):
            log.launches.clear()
            arguments = make(n)
            runs.append(named(log, arguments, op(**arguments)))
    half = len(runs) // 2
    assert runs[:half] == runs[half:]
    assert len({str(r) for r in runs}) == len(numbers)
    assert len(log.kernels) == len(runs[0]) and not any(k.src.signature[p] == "constexpr" for k in log.kernels for p in (
        "scale", "bound", "eps", "norm_eps") if p in k.src.signature)  # fmt: skip


@pytest.mark.parametrize(
    "change, error",
    [
        ({"k": z(1, 40, H, D + 1)}, ValueError), ({"v": z(1, 40, H, D, dtype=F32)}, TypeError), ({"q": None}, TypeError),
        ({"scale": float("nan")}, ValueError), ({"scale": [1.0]}, TypeError), ({"impl": "fast"}, ValueError),
        ({"gate": BoundedGate(-5.0, z(H + 1, dtype=F32))}, ValueError), ({"gate": 3}, TypeError),
        ({"initial_state": z(1, H, D, D)}, TypeError), ({"cu_seqlens": torch.tensor([0.0, 40.0])}, TypeError),
        ({"state_indices": torch.tensor([0, 1])}, ValueError),
    ],
    ids=str,
)  # fmt: skip
def test_malformed_calls_are_refused_however_often_good_ones_ran(log: Card, change: dict[str, Any], error: Any) -> None:
    for _ in range(5):
        kda(**prefill())
    for _ in range(3):
        log.launches.clear()
        with pytest.raises(error):
            kda(**prefill(**change))
        assert not log.launches


def test_a_gated_norm_without_a_gate_is_no_norm(log: Card) -> None:
    for _ in range(3):
        rms_norm(z(9, 64), z(64), 1e-5, impl="triton")
    with pytest.raises(TypeError, match="gate"):
        gated_rms_norm(z(9, 64), None, z(64), 1e-5, impl="triton")  # type: ignore[arg-type]


def test_calls_with_shared_or_unaligned_memory_go_the_long_way(log: Card) -> None:
    """q as k: nothing may be repeated from it, because the next call's may differ. An address off by two bytes: as it comes."""
    x = prefill()
    for _ in range(3):
        kda(**{**x, "k": x["q"]})
    assert not KDA_CALLS.replays
    for _ in range(5):
        kda(**prefill())
    assert len(KDA_CALLS.replays) == 1
    odd = torch.zeros(40 * H * D + 1, dtype=BF16)[1:].view(1, 40, H, D)
    log.launches.clear()
    kda(**prefill(q=odd))
    assert log.launches[0][2][0] == odd.data_ptr()


def test_lazily_negated_tensors_are_resolved(log: Card) -> None:
    """The kernel reads memory: it must be that of the negated values."""
    c = torch.view_as_complex(torch.randn(9, 64, 2))
    x = torch.imag(c.conj())
    assert x.is_neg() and x.stride(-1) == 2
    for _ in range(3):
        rms_norm(x, z(64), 1e-5, impl="triton")
    assert not NORM_CALLS.replays and all(a[0] != x.data_ptr() for _, _, a in log.launches)


def test_lazily_negated_tensors_are_resolved_in_training_too(log: Card) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        q = torch._neg_view(z(1, 40, H, D)).requires_grad_()
        assert q.is_neg() and q.stride(-1) == 1
        kda(**prefill(q=q))
    assert log.launches and all(q.data_ptr() not in values for _, _, values in log.launches)


def test_watched_calls_are_not_repeated(log: Card) -> None:
    """A dispatch mode sees the registered operator, again and again; gradients are recorded."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for _ in range(5):
        kda(**prefill())
    with torch.inference_mode(False), torch.no_grad(), Mode():
        kda(**prefill())
    assert "openkda.kda.default" in seen
    with torch.inference_mode(False), torch.enable_grad():
        x = prefill()
        x["q"].requires_grad_()
        assert kda(**x).output.requires_grad

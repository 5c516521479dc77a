"""What a repeated training call hands to its kernels on Hopper, on a CPU: forward and backward, whole and in stages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")
sys.path.append(str(Path(__file__).parents[1]))
from fake_cuda import SMS, Card, fake_card

from openkda.ops.kda.api import BoundedGate, SoftplusGate, kda
from openkda.ops.kda.call import CALLS
from openkda.ops.triton import stages

BF16, F32 = torch.bfloat16, torch.float32


def inputs(H: int, HV: int, lengths: tuple[int, ...], gate: str, state: bool) -> dict[str, Any]:
    T, N = sum(lengths), len(lengths)
    new = lambda *shape, dtype=BF16: torch.zeros(shape, dtype=dtype).requires_grad_()  # noqa: E731
    parameters = new(HV, dtype=F32), new(HV, 128, dtype=F32)
    return {
        "q": new(1, T, H, 128), "k": new(1, T, H, 128), "v": new(1, T, HV, 128), "g": new(1, T, HV, 128), "beta": new(1, T, HV),
        "gate": BoundedGate(-5.0, *parameters) if gate == "bounded" else SoftplusGate(*parameters),
        "initial_state": new(N, HV, 128, 128, dtype=F32) if state else None,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0) if N > 1 else None,
    }  # fmt: skip


def labelled(card: Card, known: dict[int, str]) -> list[Any]:
    """Launches with every address as its tensor's name, or as which unknown one it is, in the order of their first use."""
    unknown: dict[int, str] = {}

    def label(a: Any) -> Any:
        if isinstance(a, bytes):
            return label(int.from_bytes(a[:8], "little")), a[8:]
        if type(a) is not int or a < 1 << 32:
            return a
        return known[a] if a in known else unknown.setdefault(a, f"workspace {len(unknown)}")

    return [(name, grid, *map(label, values)) for name, grid, values in card.launches]


@pytest.mark.parametrize("block", [stages.ONE_BLOCK, 0], ids=["one block", "stages"])
@pytest.mark.parametrize("keep", [False, True], ids=["computed again", "kept"])
@pytest.mark.parametrize("walks", [False, True], ids=["portable walks", "walks on Hopper"])
@pytest.mark.parametrize(
    "H, HV, lengths, gate, state",
    [(2, 2, (330,), "bounded", True), (2, 4, (30, 0, 300), "bounded", True), (2, 2, (30, 0, 300), "softplus", False),
     (12, 12, (4096,), "bounded", False)],
)  # fmt: skip
def test_a_repeated_call_hands_over_what_the_first_did(
    monkeypatch: pytest.MonkeyPatch, H: int, HV: int, lengths: tuple[int, ...], gate: str, state: bool, walks: bool,
    keep: bool, block: int,
) -> None:  # fmt: skip
    import openkda.ops.kda.hopper as hopper
    import openkda.ops.kda.hopper.backward as hopper_backward
    import openkda.ops.kda.hopper.launch as module
    import openkda.ops.kda.triton as portable
    import openkda.ops.triton.launch as tapes
    from openkda.ops.kda.triton import backward
    from openkda.ops.kda.triton.autograd import BACKWARDS

    monkeypatch.setattr(backward, "HOPPER_WALKS", walks)
    kept: list[Any] = []  # so that no address is used again
    empty, allocator = torch.empty, tapes._allocator

    def keeping(make: Any) -> Any:
        return lambda *a, **k: kept.append(make(*a, **k)) or kept[-1]

    monkeypatch.setattr(torch, "empty", keeping(empty))
    monkeypatch.setattr(tapes, "_allocator", lambda device: keeping(allocator(device)))
    monkeypatch.setattr(stages, "ONE_BLOCK", block)
    monkeypatch.setattr(hopper, "_device_refusals", lambda device: [])
    monkeypatch.setattr(portable, "triton_refusals", lambda x: [])
    monkeypatch.setattr(hopper_backward, "fits", lambda a: True)
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_sm_count", lambda index: SMS)
    monkeypatch.setattr("openkda.ops.kda.hopper.walks._sm_count", lambda index: SMS)
    CALLS.forget()
    BACKWARDS.forget()
    runs = []
    with fake_card() as card:
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=card))
        for _ in range(5):
            card.launches.clear()
            x = inputs(H, HV, lengths, gate, state)
            options = {"use_qk_l2norm": True, "use_beta_sigmoid": True, "output_final_state": state}
            out = kda(**x, **options, impl="hopper" if walks or not keep else "triton", recompute=not keep)
            own = {"A_log": x["gate"].A_log, "dt_bias": x["gate"].dt_bias}
            named = {n: t for n, t in (x | own).items() if isinstance(t, Tensor) and t.requires_grad}
            up = [t for t in out if t is not None]
            down = [torch.zeros_like(t) for t in up]
            found = torch.autograd.grad(up, list(named.values()), down)
            kept.append((x, out, up, down, found))
            known = {t.data_ptr(): n for n, t in (x | own).items() if isinstance(t, Tensor)}
            known |= {t.data_ptr(): f"output {i}" for i, t in enumerate(up)}
            known |= {t.data_ptr(): f"upstream {i}" for i, t in enumerate(down)}
            if HV == H:  # else they are sums of what the kernels wrote
                known |= {t.data_ptr(): f"gradient of {n}" for n, t in zip(named, found, strict=True)}
            runs.append(labelled(card, known))
            assert [t.shape for t in found] == [t.shape for t in named.values()]
    assert len(CALLS.replays) == len(BACKWARDS.replays) == 1 and card.direct == 3 * len(runs[0])
    prepares = sum("prepare" in name for name, *_ in runs[0])
    assert prepares == 1 if keep else prepares > 1  # the forward's own may be several
    CALLS.forget()
    BACKWARDS.forget()
    for i, (first, *others) in enumerate(zip(*runs, strict=True)):
        for other in others:
            assert first == other, f"launch {i}"


def test_without_its_walks_hopper_leaves_calls_that_keep_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import openkda.ops.kda.hopper as hopper
    from openkda.ops.kda.triton import backward

    monkeypatch.setattr(hopper, "_device_refusals", lambda device: [])
    x = inputs(2, 2, (330,), "bounded", True)
    options = {"use_qk_l2norm": True, "use_beta_sigmoid": True, "recompute": False, "impl": "hopper"}
    monkeypatch.setattr(backward, "HOPPER_WALKS", False)
    with pytest.raises(NotImplementedError, match="recompute other than False"):
        kda(**x, **options)

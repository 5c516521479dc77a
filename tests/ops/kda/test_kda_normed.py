"""KDA with its norm: what the two ops give, whoever runs it; which calls become one op; what is refused, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.layers.kda import KimiDeltaAttention
from openkda.models.presets import PRESETS
from openkda.ops.kda import normed
from openkda.ops.kda.api import BoundedGate, kda
from openkda.ops.kda.hopper import TRITON_RELEASE, _triton_release, schedule
from openkda.ops.kda.normed import kda_normed
from openkda.ops.norm.api import gated_rms_norm
from openkda.testing.inputs import KDAInputs, make_inputs

sys.path.append(str(Path(__file__).parents[1]))  # fake_cuda

SMS = 132
EPS = 1e-5
HOPPER = {"H": 1, "K": 128, "use_qk_l2norm": True, "use_beta_sigmoid": True, "unit_keys": False, "gate": "bounded"}
needs_gluon = pytest.mark.skipif(_triton_release() != TRITON_RELEASE, reason=f"Gluon of Triton {TRITON_RELEASE}")


def drawn(x: KDAInputs) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    V = x.v.shape[-1]
    return torch.randn(x.v.shape, generator=generator).to(x.v.dtype), 1 + 0.3 * torch.randn(V, generator=generator)


def separate(x: KDAInputs, gate: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    out = kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), **options)
    return gated_rms_norm(out.output, gate, weight, EPS), out.final_state


@pytest.mark.parametrize("sizes", [{"T": 70, "H": 2, "HV": 4}, {"lengths": (3, 0, 40), "H": 2}], ids=str)
def test_is_the_two_ops(sizes: dict[str, Any]) -> None:
    """With their gradients."""
    found = []
    for one in (True, False):
        x = make_inputs(1, K=16, V=24, gate="softplus", **sizes)
        gate, weight = drawn(x)
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.g, x.beta, gate, weight)]
        if one:
            y, state, _ = kda_normed(*leaves[:6], weight=weight, eps=EPS, **x.kwargs())
        else:
            y, state = separate(x, gate, weight)
        assert state is not None
        found.append((y, state, *torch.autograd.grad(y.square().sum() + state.sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"impl": "cuda"}, ValueError, "hopper, separate"),
        ({"impl": "hopper"}, NotImplementedError, "impl='hopper' cannot run this call: .*CUDA"),
        ({"impl": "separate", "weight": torch.ones(3)}, ValueError, r"weight\.shape"),
        ({"weight": torch.ones(3)}, ValueError, r"weight\.shape"),
        ({"impl": "hopper", "out_gate": torch.ones(1, 20, 2, 3)}, ValueError, r"gate\.shape"),
        ({"impl": "hopper", "eps": -1.0}, ValueError, "eps"),
        ({"impl": "hopper", "q": torch.ones(2, 3)}, ValueError, "q.shape"),
        ({"q": None}, TypeError, "q: expected a torch.Tensor"),
        ({"impl": "hopper", "q": None}, TypeError, "q: expected a torch.Tensor"),
    ],
)
def test_malformed_calls_raise(change: dict[str, Any], error: type[Exception], message: str) -> None:
    x = make_inputs(1, T=20, H=2, K=16)
    gate, weight = drawn(x)
    call = {n: getattr(x, n) for n in ("q", "k", "v", "g", "beta")} | x.kwargs()
    with pytest.raises(error, match=message):
        kda_normed(**call | {"out_gate": gate, "weight": weight, "eps": EPS} | change)


@needs_gluon
@pytest.mark.parametrize("sizes", [{"T": 130, "HV": 2}, {"T": 65, "B": 2}, {"lengths": (0, 66, 1)}], ids=str)
@pytest.mark.parametrize("gate_kind", ["bounded", "softplus"])
def test_hopper_on_a_cpu(sizes: dict[str, Any], gate_kind: str) -> None:
    """One op against two, both with the kernels' own source."""
    pytest.importorskip("triton")
    from hopper_on_cpu import hopper_on_cpu

    x = make_inputs(5, decay="random", **HOPPER | {"gate": gate_kind} | sizes).to(dtype=torch.bfloat16)
    gate, weight = drawn(x)
    tokens = (x.q, x.k, x.v, x.g, x.beta, gate)
    options = {"weight": weight, "eps": EPS, "impl": "hopper"} | x.kwargs()
    with hopper_on_cpu() as names:
        with torch.no_grad():
            y, state, _ = kda_normed(*tokens, **options)
            assert names[-1] == "kda_normed_scan_kernel"
            want, end = separate(x, gate, weight, impl="hopper")
        assert state is not None and end is not None and torch.equal(state, end)
        assert bool(((y.float() - want.float()).abs() <= 2**-7 * want.float().abs()).all())
        with pytest.raises(NotImplementedError, match="no gradients"):
            kda_normed(*tokens, **options | {"weight": weight.clone().requires_grad_()})
        with pytest.raises(NotImplementedError, match="out_gate in bfloat16"):
            kda_normed(*tokens[:5], gate.float(), **options)


def test_sizes_that_were_measured() -> None:
    """H200: separate 0.797 and one op 0.866 ms, 0.630 and 0.715, 0.567 and 0.705."""
    assert not any(schedule.norm_pays(8192, 1, heads, False, SMS) for heads in (96, 67, 64, 12))
    assert not schedule.norm_pays(65536, 32, 96, True, SMS), "a pack beyond the workspace is fused"


@needs_gluon
def test_a_call_chosen_by_sizes_is_repeated_from_its_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen without a word about impl; the long way, recorded, then from the tape, each time on other memory."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")
    from fake_cuda import fake_card
    from test_hopper_host import places

    import openkda.ops.kda.hopper as hopper
    import openkda.ops.kda.hopper.launch as module
    import openkda.ops.triton.launch as tapes

    made: list[Tensor] = []
    empty, allocator = torch.empty, tapes._allocator

    def keep(make: Any) -> Any:
        return lambda *a, **k: made.append(make(*a, **k)) or made[-1]

    monkeypatch.setattr(torch, "empty", keep(empty))
    monkeypatch.setattr(tapes, "_allocator", lambda device: keep(allocator(device)))
    monkeypatch.setattr(hopper, "_device_refusals", lambda device: [])
    monkeypatch.setattr(normed, "_may_be_one", lambda call: True)
    monkeypatch.setattr("openkda.ops.kda.hopper.normed.norm_pays", lambda *sizes: True)
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_sm_count", lambda index: SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(multi_processor_count=SMS))
    normed.CALLS.forget()
    runs, kept = [], []
    with fake_card() as card, torch.inference_mode():
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=card))
        for _ in range(5):
            card.launches.clear()
            q, k, v, g, gate = (torch.zeros(1, 100, 67, 128, dtype=torch.bfloat16) for _ in range(5))
            beta, a_log, dt, weight = torch.zeros(1, 100, 67), torch.zeros(67), torch.zeros(67, 128), torch.ones(128)
            made.clear()
            out = kda_normed(
                q, k, v, g, beta, gate, weight=weight, eps=EPS, gate=BoundedGate(-5.0, a_log, dt), use_qk_l2norm=True,
                use_beta_sigmoid=True, output_final_state=True,
            )  # fmt: skip
            memory = [q, k, v, g, gate, beta, a_log, dt, weight, *made]
            kept.append((memory, out))  # so that no address is used again
            runs.append([(name, grid, *places(values, memory)) for name, grid, values in card.launches])
            assert out.output.data_ptr() == made[0].data_ptr()
    names = [name for name, *_ in runs[0]]
    assert names == ["kda_prepare_kernel", "kda_normed_scan_kernel"] and runs[0][1][1][0] == 67
    assert len(normed.CALLS.replays) == 1 and card.direct == 3 * len(runs[0])
    normed.CALLS.forget()
    assert all(run == runs[0] for run in runs)


def test_a_layer_without_gradients_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in training, not with an implementation of its own, and not past somebody who looks at its norm."""
    layer = KimiDeltaAttention(PRESETS["tiny"], 0).eval()
    x = torch.randn(2, 9, PRESETS["tiny"].hidden_size)
    asked: list[Any] = []
    real = kda_normed
    monkeypatch.setattr("openkda.layers.kda.kda_normed", lambda *a, **k: asked.append(1) or real(*a, **k))
    want, _ = layer(x)
    assert not asked
    with torch.no_grad():
        y, _ = layer(x, return_state=True)
        assert len(asked) == 1 and torch.equal(y, want)
        layer.impl = "chunkwise"
        assert torch.equal(layer(x)[0], want) and len(asked) == 1
        layer.impl = None
        layer.train()
        assert torch.equal(layer(x)[0], want) and len(asked) == 1
        layer.eval()
        seen: list[Tensor] = []
        handle = layer.o_norm.register_forward_hook(lambda module, args, out: seen.append(out))
        assert torch.equal(layer(x)[0], want) and len(asked) == 1 and len(seen) == 1
        handle.remove()
        layer(x)
        assert len(asked) == 2

"""Which kernels a GPU's call takes, by card, release of Triton, gate and shape. The card is pretended; nothing is launched."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from openkda.ops.kda import api, hopper
from openkda.ops.kda.api import BoundedGate, KDACall, SoftplusGate

BF16, F32 = torch.bfloat16, torch.float32
GATE = BoundedGate(-5.0, torch.zeros(2), torch.zeros(256))


class Cuda(Tensor):
    is_cuda = True


def call(
    T: int = 64, K: int = 128, V: int = 128, dtype: torch.dtype = BF16, gate: Any = GATE, **options: Any
) -> KDACall:
    q, k, v, g = (torch.zeros(1, T, 2, n, dtype=dtype).as_subclass(Cuda) for n in (K, K, V, K))
    fields: dict[str, Any] = {
        "initial_state": None, "output_final_state": False, "cu_seqlens": None, "use_qk_l2norm": True,
        "use_beta_sigmoid": True, "state_indices": None, "state_positions": None, "state_v_first": False, "state_dtype": F32,
    }  # fmt: skip
    return KDACall(q, k, v, g, torch.zeros(1, T, 2, dtype=dtype).as_subclass(Cuda), gate, 0.1, **fields | options)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a card of some capability beside some release of Triton."""
    asked = hopper._device_refusals

    def put(capability: tuple[int, int] = (9, 0), release: str = hopper.TRITON_RELEASE) -> None:
        monkeypatch.setattr(hopper, "_INSTALLED_RELEASE", release)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(hopper, "_device_refusals", lambda device: asked(torch.device("cuda", 0)))

    return put


def test_hopper_takes_what_it_is_for(card: Any) -> None:
    card()
    cu = torch.tensor([0, 1, 1, 64])
    for taken in (call(), call(17), call(cu_seqlens=cu), call(initial_state=torch.zeros(1, 2, 128, 128)),
                  call(gate=SoftplusGate(torch.zeros(2))), call(gate=None)):  # fmt: skip
        assert api._choose(taken, None) is hopper and api._choose(taken, "hopper") is hopper


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"K": 64}, "128 channels a head, received 64 in q, k, g"),
        ({"V": 64}, "128 channels a head, received 64 in v"),
        ({"dtype": torch.float16}, "q, k, v, g in bfloat16, received torch.float16"),
        ({"T": 16}, "more than 16 tokens a sequence, received 16"),
        ({"use_qk_l2norm": False}, "use_qk_l2norm=True"),
        ({"use_beta_sigmoid": False}, "use_beta_sigmoid=True"),
        ({"state_v_first": True}, r"states \[.., K, V\]"),
        ({"state_dtype": BF16}, "float32 states"),
        ({"state_positions": torch.tensor([3])}, "no state_positions"),
        ({"initial_state": torch.zeros(3, 2, 128, 128), "state_indices": torch.tensor([1])}, "no state_indices"),
        ({"cu_seqlens": torch.arange(1026).clamp(max=64)}, "at most 1024 sequences in a pack, received 1025"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_hopper_refuses_is_named_and_goes_to_the_portable_kernels(
    changed: dict[str, Any], reason: str, card: Any, caplog: pytest.LogCaptureFixture
) -> None:
    card()
    with pytest.raises(NotImplementedError, match=f"impl='hopper' cannot run this call: .*{reason}"):
        api._choose(call(**changed), "hopper")
    api._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="openkda.ops.kda"):
        assert api._choose(call(**changed), None) is api._module("triton")
    (line,) = (r.getMessage() for r in caplog.records)
    assert "runs triton (not hopper: " in line and reason.replace("\\", "") in line


@pytest.mark.parametrize(
    "capability, release, reason",
    [
        ((9, 0), "3.8", r"Gluon of Triton 3\.6, received 3\.8"),
        ((9, 0), "", r"Gluon of Triton 3\.6, received no Triton"),
        ((8, 0), hopper.TRITON_RELEASE, r"compute capability 9\.0, received \(8, 0\)"),
        ((10, 0), hopper.TRITON_RELEASE, r"compute capability 9\.0, received \(10, 0\)"),
    ],
)
def test_other_cards_and_releases_decline(capability: tuple[int, int], release: str, reason: str, card: Any) -> None:
    card(capability, release)
    with pytest.raises(NotImplementedError, match=f"impl='hopper' cannot run this call: {reason}"):
        api._choose(call(), "hopper")
    assert api._choose(call(), None) is api._module("triton")

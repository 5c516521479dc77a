"""The backward's last kernel on Hopper: on a CPU with torch under its source, compiled ahead of time, and on the card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import gluon_on_cpu
from gluon_aot import compiled
from gradient_stage import make

from openkda.ops.kda.hopper import TRITON_RELEASE, _triton_release

if _triton_release() != TRITON_RELEASE:
    pytest.skip(f"Gluon of Triton {TRITON_RELEASE}", allow_module_level=True)
from openkda.ops.kda.hopper import gradient_tiles, gradients, instructions

CASES: dict[str, dict[str, Any]] = {
    "one chunk": {"T": 64},
    "grouped heads, partial chunk": {"T": 150, "HV": 2},
    "slow": {"T": 100, "shift": -6.0},
    "fast": {"T": 100, "shift": 6.0},
    "mixed": {"T": 64, "spread": 8.0},
    "pack with empty and partial members": {"T": 130, "cu": [0, 5, 5, 75, 130]},
    "batch, mild bound": {"T": 70, "B": 2, "HV": 2, "bound": -1.0},
    "no parameters, few channels": {"T": 20, "K": 16, "parameters": False},
    "softplus": {"T": 150, "HV": 2, "gate": 1},
    "softplus, fast": {"T": 64, "gate": 1, "shift": 6.0},
    "softplus, slow": {"T": 64, "gate": 1, "shift": -6.0},
    "softplus, mixed": {"T": 64, "gate": 1, "spread": 8.0},
    "log decays": {"T": 70, "gate": 0, "shift": -3.0, "parameters": False},
}
LIMITS = {"dq": 2.5e-3, "dk": 2.5e-3, "dz": 4e-3, "ddt": 4e-3, "dA_log": 6e-3}  # bfloat16's own rounding is 1.7e-3


@pytest.mark.parametrize("name", CASES)
def test_source_on_a_cpu(name: str) -> None:
    stage = make(**CASES[name])
    kernel = gluon_on_cpu.load(instructions, gradient_tiles, gradients)["gradients_kernel"]
    gluon_on_cpu.run(kernel, stage.programs, stage.tensors, stage.numbers, stage.constants)
    found = stage.errors()
    assert all(found[n] <= LIMITS[n] for n in found), found


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gate, words", [(2, 0), (1, 40), (0, 40)])
def test_three_programs_fit_an_sm(gate: int, words: int, packed: bool) -> None:
    from openkda.ops.kda.hopper.backward import REGISTERS

    constants = {
        "HV": 96,
        "GROUP": 1,
        "K": 128,
        "BK": 128,
        "GATE": gate,
        "HAS_A": gate > 0,
        "HAS_DT": gate > 0,
        "PACKED": packed,
    }
    types = dict.fromkeys(("q_p", "k_p", "g_p", "dq_p", "dk_p", "dz_p"), "*bf16") | {"d_p": "*fp16", "wide_p": "*fp16"}
    types |= {"bound": "fp32", "cu_p": "*i64"}
    steps = ("sqb", "sqt", "sqh", "skb", "skt", "skh", "sgb", "sgt", "sgh")
    moved, shared = compiled(gradients.gradients_kernel, constants, types, steps, maxnreg=REGISTERS)
    assert moved <= words and 3 * (shared + 1024) <= 228 * 1024, (moved, shared)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_the_card(name: str) -> None:
    from openkda.ops.kda.hopper.backward import REGISTERS

    stage = make(**CASES[name])
    tensors = tuple(None if t is None else t.cuda() for t in stage.tensors)
    kernel = gradients.gradients_kernel[(stage.programs,)]
    kernel(*tensors, *stage.numbers, *stage.constants.values(), num_warps=4, maxnreg=REGISTERS)
    stage.tensors = tensors
    found = stage.errors()
    assert all(found[n] <= LIMITS[n] for n in found), found

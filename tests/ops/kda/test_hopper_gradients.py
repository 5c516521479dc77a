"""The backward's last kernel on Hopper: on a CPU with torch under its source, compiled ahead of time, and on the card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import gluon_on_cpu
import gluon_roles_on_cpu
import test_hopper_products
from gluon_aot import compiled
from gradient_stage import Stage, make

from openkda.ops.kda.hopper import TRITON_RELEASE, _triton_release

if _triton_release() != TRITON_RELEASE:
    pytest.skip(f"Gluon of Triton {TRITON_RELEASE}", allow_module_level=True)
from openkda.ops.kda.hopper import gradient_tiles, gradients, instructions, products, state_terms

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


def alone(stage: Stage) -> tuple[Any, Any, dict[str, Any]]:
    """Tensors, numbers and constants of the kernel that is given what the states say."""
    numbers = (*stage.numbers[:9], 0, 0, 0, *stage.numbers[9:], 1.0)
    return (*stage.tensors, *(None,) * 9), numbers, stage.constants | {"STATES": False}


@pytest.mark.parametrize("name", CASES)
def test_source_on_a_cpu(name: str) -> None:
    stage = make(**CASES[name])
    kernel = gluon_on_cpu.load(instructions, gradient_tiles, products, state_terms, gradients)["gradients_kernel"]
    gluon_on_cpu.run(kernel, stage.programs, *alone(stage))
    found = stage.errors()
    assert all(found[n] <= LIMITS[n] for n in found), found


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "gate, words, states", [(2, 0, False), (1, 40, False), (0, 40, False), (2, 220, True), (1, 260, True)]
)
def test_three_programs_fit_an_sm(gate: int, words: int, states: bool, packed: bool) -> None:
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
        "STATES": states,
    }
    types = dict.fromkeys(("q_p", "k_p", "g_p", "dq_p", "dk_p", "dz_p"), "*bf16") | {"d_p": "*fp16", "wide_p": "*fp16"}
    types |= {"bound": "fp32", "scale": "fp32", "cu_p": "*i64", "do_p": "*bf16"}
    types |= dict.fromkeys(("u_p", "dd_p", "s_p", "ds_p"), "*fp16")
    steps = ("sqb", "sqt", "sqh", "skb", "skt", "skh", "sgb", "sgt", "sgh", "sob", "sot", "soh")
    moved, shared = compiled(gradients.gradients_kernel, constants, types, steps, maxnreg=REGISTERS)
    assert moved <= words and 3 * (shared + 1024) <= 228 * 1024, (moved, shared)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_the_card(name: str) -> None:
    from openkda.ops.kda.hopper.backward import REGISTERS

    stage = make(**CASES[name])
    stage.tensors = tuple(None if t is None else t.cuda() for t in stage.tensors)
    tensors, numbers, constants = alone(stage)
    kernel = gradients.gradients_kernel[(stage.programs,)]
    kernel(*tensors, *numbers, *constants.values(), num_warps=4, maxnreg=REGISTERS)
    found = stage.errors()
    assert all(found[n] <= LIMITS[n] for n in found), found


STATES = {"one chunk": {"T": 64}, "partial chunk, batch": {"T": 150, "B": 2}, "softplus": {"T": 100, "gate": 1},
          "pack with empty and partial members": {"T": 130, "cu": [0, 5, 5, 75, 130]}}  # fmt: skip


def joined(case: dict[str, Any], device: str) -> tuple[Stage, Any, list[tuple[Any, Any, dict[str, Any]]]]:
    """A stage, the kernel of the products that it follows with its arguments, and those of the last kernel in both ways."""
    stage = make(HV=2, **case)
    x = test_hopper_products.make(HV=2, **{n: v for n, v in case.items() if n != "gate"})
    for n, t in vars(x).items():
        if isinstance(t, torch.Tensor):
            setattr(x, n, t.to(device))
    q, k, z, A, dt, cu, d, _, _, unit, norm, rows, *out = (None if t is None else t.to(device) for t in stage.tensors)
    x.unit[..., 0] = unit[..., 0]
    ways = []
    for states in (False, True):
        new = [None if t is None else torch.full_like(t, float("nan")) for t in out]
        given = (x.do, x.u, x.dd, x.s, x.ds, x.u_unit, x.dd_unit, x.s_unit, x.ds_unit)
        tensors = (q, k, z, A, dt, cu, d, x.wide, x.both, x.unit, norm, rows, *new, *given)
        numbers = (*stage.numbers[:9], *x.do.stride()[:3], *stage.numbers[9:], x.scale)
        ways.append((tensors, numbers, stage.constants | {"STATES": states}))
    return stage, test_hopper_products.launches(x)[0], ways


def agree(ways: list[tuple[Any, Any, dict[str, Any]]]) -> None:
    """Both round to float16 once more or less."""
    for a, b in zip(ways[0][0][12:17], ways[1][0][12:17], strict=True):
        off = ((a.double() - b.double()).norm() / a.double().norm()).item()
        assert off < 1e-3, off


@pytest.mark.parametrize("name", STATES)
def test_states_inside_on_a_cpu(name: str) -> None:
    stage, (_, programs, tensors, numbers, constants), ways = joined(STATES[name], "cpu")
    names = gluon_roles_on_cpu.load(instructions, gradient_tiles, products, state_terms, gradients)
    gluon_on_cpu.run(names["states_kernel"], programs, tensors, numbers, constants)
    for way in ways:
        gluon_on_cpu.run(names["gradients_kernel"], stage.programs, *way)
    agree(ways)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", STATES)
def test_states_inside_on_the_card(name: str) -> None:
    from openkda.ops.kda.hopper.backward import REGISTERS

    stage, (_, programs, tensors, numbers, constants), ways = joined(STATES[name], "cuda")
    products.states_kernel[(programs,)](*tensors, *numbers, *constants.values(), num_warps=4, maxnreg=REGISTERS)
    for given, sizes, fixed in ways:
        kernel = gradients.gradients_kernel[(stage.programs,)]
        kernel(*given, *sizes, *fixed.values(), num_warps=4, maxnreg=REGISTERS)
    agree(ways)

"""Bad input is refused before anything runs, with what was expected and what came; and one can tell what ran."""

from __future__ import annotations

import logging
import re
import time
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.ops.kda import api
from openkda.ops.kda.api import kda, kda_step
from openkda.ops.kda.gate import BoundedGate, SoftplusGate


def good(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "q": torch.zeros(2, 5, 2, 8), "k": torch.zeros(2, 5, 2, 8), "v": torch.zeros(2, 5, 4, 6),
        "g": torch.zeros(2, 5, 4, 8), "beta": torch.zeros(2, 5, 4), "initial_state": torch.zeros(2, 4, 8, 6),
    }  # fmt: skip
    return base | changes


def packed(cu: Any, **changes: Any) -> dict[str, Any]:
    one = {n: t[:1] for n, t in good().items()}
    one["initial_state"] = None
    return one | {"cu_seqlens": cu} | changes


Z = torch.zeros
CASES = [
    ("q rank", good(q=Z(2, 5, 8)), ValueError, r"q.shape: expected \[B, T, H, K\], received \[2, 5, 8\]"),
    ("q dtype", good(q=Z(2, 5, 2, 8).long()), TypeError, r"q.dtype: expected float.*, received torch.int64"),
    ("k shape", good(k=Z(2, 5, 2, 7)), ValueError, r"k.shape: expected .*\[2, 5, 2, 8\], received \[2, 5, 2, 7\]"),
    ("k dtype", good(k=Z(2, 5, 2, 8).half()), TypeError, r"k.dtype: expected torch.float32 .*received torch.float16"),
    ("k device", good(k=Z(2, 5, 2, 8, device="meta")), ValueError, r"k.device: expected cpu.*received meta"),
    ("v length", good(v=Z(2, 6, 4, 6)), ValueError, r"v.shape: expected .*\[2, 5, HV, V\], received \[2, 6, 4, 6\]"),
    ("v heads", good(v=Z(2, 5, 3, 6)), ValueError, r"v heads HV: expected a multiple of the 2 .*received 3"),
    ("g shape", good(g=Z(2, 5, 2, 8)), ValueError, r"g.shape: expected .*\[2, 5, 4, 8\], received \[2, 5, 2, 8\]"),
    ("beta shape", good(beta=Z(2, 5, 4, 1)), ValueError, r"beta.shape: expected .*received \[2, 5, 4, 1\]"),
    ("not a tensor", good(v=[1.0]), TypeError, r"v: expected a torch.Tensor, received list"),
    ("no channels", good(q=Z(2, 5, 2, 0), k=Z(2, 5, 2, 0)), ValueError, r"at least one .*K=0"),
    (
        "flag as None",
        good(output_final_state=None),
        TypeError,
        r"output_final_state: expected True or False, received None",
    ),
    ("flag as number", good(use_qk_l2norm=2), TypeError, r"use_qk_l2norm: expected True or False, received 2"),
    (
        "flag as text",
        good(use_beta_sigmoid="no"),
        TypeError,
        r"use_beta_sigmoid: expected True or False, received 'no'",
    ),
    ("flag as tensor", good(state_v_first=torch.tensor(True)), TypeError, r"state_v_first: expected True or False"),
    ("recompute", good(recompute="no"), TypeError, r"recompute: expected None, True or False, received 'no'"),
    ("scale", good(scale=float("inf")), ValueError, r"scale: expected a finite number, received inf"),
    (
        "gate type",
        good(gate=lambda z: z),
        TypeError,
        r"gate: expected None, SoftplusGate or BoundedGate, received function",
    ),
    (
        "A_log missing",
        good(gate=SoftplusGate(None)),
        ValueError,
        r"A_log: expected a float tensor of HV = 4 values, received None",
    ),
    ("A_log size", good(gate=SoftplusGate(Z(2))), ValueError, r"gate.A_log: expected 4 values \(HV\), received \[2\]"),
    (
        "A_log dtype",
        good(gate=BoundedGate(-5.0, Z(4).half())),
        TypeError,
        r"A_log.dtype: expected float32.*received torch.float16",
    ),
    (
        "dt_bias size",
        good(gate=SoftplusGate(Z(4), Z(4))),
        ValueError,
        r"gate.dt_bias: expected 32 values.*received \[4\]",
    ),
    (
        "state shape",
        good(initial_state=Z(2, 4, 6, 8)),
        ValueError,
        r"initial_state.shape: expected .*\[2, 4, 8, 6\], received \[2, 4, 6, 8\]",
    ),
    ("state count", good(initial_state=Z(1, 4, 8, 6)), ValueError, r"initial_state.shape: .*received \[1, 4, 8, 6\]"),
    (
        "state dtype",
        good(initial_state=Z(2, 4, 8, 6).half()),
        TypeError,
        r"initial_state.dtype: expected torch.float32",
    ),
    (
        "state_dtype",
        good(state_dtype=torch.float16),
        TypeError,
        r"state_dtype: expected torch.float32 or torch.bfloat16, received torch.float16",
    ),
    (
        "batch in a pack",
        good(cu_seqlens=torch.tensor([0, 5]), initial_state=None),
        ValueError,
        r"batch with cu_seqlens: expected B = 1.*received B = 2",
    ),
    (
        "cu dtype",
        packed(torch.tensor([0.0, 5.0])),
        TypeError,
        r"cu_seqlens.dtype: expected int32 or int64, received torch.float32",
    ),
    ("cu rank", packed(torch.tensor([[0, 5]])), ValueError, r"cu_seqlens.shape: expected \[N \+ 1\]"),
    ("cu empty", packed(torch.tensor([0])), ValueError, r"cu_seqlens.shape: .*received \[1\]"),
    ("cu start", packed(torch.tensor([1, 5])), ValueError, r"first value 0 and last value T = 5, received 1 and 5"),
    ("cu end", packed(torch.tensor([0, 6])), ValueError, r"last value T = 5, received 0 and 6"),
    ("cu falls", packed(torch.tensor([0, 4, 3, 5])), ValueError, r"never decrease, received 4 then 3 at index 1"),
    (
        "slots without pool",
        good(initial_state=None, state_indices=torch.tensor([0, 1])),
        ValueError,
        r"state_indices: expected initial_state to be the pool",
    ),
    (
        "slots count",
        good(state_indices=torch.tensor([0])),
        ValueError,
        r"state_indices.shape: expected \[N\] = \[2\], received \[1\]",
    ),
    (
        "slot range",
        good(state_indices=torch.tensor([0, 2])),
        ValueError,
        r"state_indices: expected values in \[-1, 2\), received 2",
    ),
    ("slot twice", good(state_indices=torch.tensor([1, 1])), ValueError, r"each slot at most once.*received \[1, 1\]"),
    (
        "slots dtype",
        good(state_indices=torch.tensor([0.0, 1.0])),
        TypeError,
        r"state_indices.dtype: expected int32 or int64",
    ),
    (
        "slots and gradients",
        good(state_indices=torch.tensor([0, 1]), q=Z(2, 5, 2, 8, requires_grad=True)),
        ValueError,
        r"state_indices: expected no gradients",
    ),
    (
        "positions range",
        good(state_positions=torch.tensor([10])),
        ValueError,
        r"state_positions: expected values in \[0, 10\), received 10",
    ),
    (
        "positions rank",
        good(state_positions=torch.tensor([[1]])),
        ValueError,
        r"state_positions: expected int32 or int64 of shape \[P\]",
    ),
    (
        "impl unknown",
        good(impl="fast"),
        ValueError,
        r"impl: expected one of .*chunkwise, reference or None, received 'fast'",
    ),
    # A tensor as a number: its gradient would be lost without a word.
    (
        "scale tensor",
        good(scale=torch.tensor(0.5, requires_grad=True)),
        TypeError,
        "scale: expected a number, .*Tensor",
    ),
    ("scale text", good(scale="0.5"), TypeError, "scale: expected a number, received str"),
    ("scale complex", good(scale=1j), TypeError, "scale: expected a number, received complex"),
    # As many values as it should have, in another order.
    (
        "dt_bias turned",
        good(gate=BoundedGate(-5.0, None, Z(8, 4))),
        ValueError,
        r"gate.dt_bias: expected \[HV, K\] = \[4, 8\] or \[HV \* K\] .*received \[8, 4\]",
    ),
    (
        "sparse",
        good(q=Z(2, 5, 2, 8).to_sparse()),
        TypeError,
        "q.layout: expected torch.strided, received torch.sparse_coo",
    ),
    ("8 bit", good(q=Z(2, 5, 2, 8).to(torch.float8_e4m3fn)), TypeError, "q.dtype: expected float16, .*float8_e4m3fn"),
    (
        "pool overlapping",
        good(initial_state=Z(300).as_strided((3, 4, 8, 6), (10, 48, 6, 1)), state_indices=torch.tensor([0, 1])),
        ValueError,
        r"initial_state: expected a pool whose slots are memory of their own, received .*overlapping",
    ),
    (
        "pool empty",
        good(initial_state=Z(0, 4, 8, 6), state_indices=torch.tensor([-1, -1])),
        ValueError,
        r"initial_state: expected a pool of at least one slot",
    ),
    (
        "checked nan",
        good(v=Z(2, 5, 4, 6).index_fill(1, torch.tensor([3]), float("nan")), check_inputs=True),
        ValueError,
        r"v: expected finite values, received nan at \[0, 3, 0, 0\]",
    ),
    (
        "checked gate",
        good(gate=BoundedGate(-5.0, Z(4).index_fill(0, torch.tensor([2]), float("inf"))), check_inputs=True),
        ValueError,
        r"gate\.A_log: expected finite values, received inf at \[2\]",
    ),
    (
        "checked slots",
        good(
            initial_state=Z(3, 4, 8, 6).index_fill(0, torch.tensor([1]), float("nan")),
            state_indices=torch.tensor([1, -1]),
            check_inputs=True,
        ),
        ValueError,
        r"initial_state: expected finite values, received nan",
    ),
    (
        "checked decay",
        good(g=Z(2, 5, 4, 8) + 0.5, check_inputs=True),
        ValueError,
        r"g: expected log decay <= 0 .*received maximum 0.5",
    ),
    ("checked beta", good(beta=Z(2, 5, 4) + 2, check_inputs=True), ValueError, r"beta: expected values in \[0, 1\]"),
    ("checked keys", good(k=Z(2, 5, 2, 8) + 1, check_inputs=True), ValueError, r"k: expected keys of length <= 1"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_refused_with_expected_and_received(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kda(**arguments)


def test_the_good_call_is_good() -> None:
    pool = Z(3, 4, 8, 6).index_fill(0, torch.tensor([1]), float("nan"))  # whatever is left in a slot that nobody uses
    unused = good(initial_state=pool, state_indices=torch.tensor([2, -1]), check_inputs=True)
    for arguments in (good(), good(check_inputs=True), packed(torch.tensor([0, 0, 5])), unused):
        assert kda(**arguments).output.shape[2:] == (4, 6)


@pytest.mark.parametrize("bound", [torch.tensor(-5.0), "-5", None, torch.zeros(4)])
def test_a_bound_is_a_number(bound: Any) -> None:
    with pytest.raises(TypeError, match=r"BoundedGate\.lower_bound: expected a number, received"):
        BoundedGate(bound)


def test_shapes_and_strides_that_a_bias_may_have() -> None:
    """[HV, K] and [HV * K], with axes of one in front, whatever the strides: the same gate."""
    bias = torch.randn(4, 8)
    x = good()
    want = kda(**{**x, "gate": BoundedGate(-5.0, None, bias)}).output
    turned = bias.t().contiguous().t()
    for same in (
        bias.flatten(),
        bias.view(1, 1, 4, 8),
        bias.view(1, 32),
        turned,
        torch.stack([bias, bias], -1)[..., 0],
    ):
        assert torch.equal(kda(**{**x, "gate": BoundedGate(-5.0, None, same)}).output, want)


@pytest.mark.parametrize("name", ["q", "v", "beta"])
def test_a_step_says_what_it_expects_without_the_axis_that_it_adds(name: str) -> None:
    token = dict(q=Z(2, 4, 8), k=Z(2, 4, 8), v=Z(2, 4, 6), g=Z(2, 4, 8), beta=Z(2, 4), state=Z(2, 4, 8, 6))
    token[name] = token[name].unsqueeze(1)  # as `kda` takes it
    shape = re.escape(str(list(token[name].shape)))
    with pytest.raises(ValueError, match=rf"{name}\.shape: expected \[N, .*without a T axis, received {shape}$"):
        kda_step(**token)


def test_step_refuses_too() -> None:
    token = {n: t[:, 0] for n, t in good().items() if n != "initial_state"}
    with pytest.raises(ValueError, match=r"initial_state.shape: .*received \[3, 4, 8, 6\]"):
        kda_step(**token, state=Z(3, 4, 8, 6))
    with pytest.raises(ValueError, match="state dtype: expected float32, bfloat16"):
        kda_step(**token, state=Z(2, 4, 8, 6).half())
    with pytest.raises(ValueError, match=r"state_indices: expected values in \[-1, 3\), received 7"):
        kda_step(**token, state=Z(3, 4, 8, 6), state_indices=torch.tensor([7, 0]))


def test_options_are_keywords_only_and_unknown_ones_fail() -> None:
    tensors = [good()[n] for n in ("q", "k", "v", "g", "beta")]
    with pytest.raises(TypeError, match="positional"):
        kda(*tensors, None)  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword"):
        kda(*tensors, head_first=False)  # type: ignore[call-arg]


@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_a_named_kernel_never_falls_back(impl: str) -> None:
    """On the CPU a kernel is refused by name, with its reasons; it does not quietly run something else."""
    try:
        api._module(impl)
    except ImportError:
        pytest.skip(f"{impl} is not part of this installation")
    with pytest.raises(NotImplementedError, match=f"impl='{impl}' cannot run this call"):
        kda(**good(impl=impl))


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    api._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="openkda.ops.kda"):
        kda(**good())
        kda(**good())
    assert [r.getMessage() for r in caplog.records] == ["kda on cpu runs chunkwise"]


def test_a_gpu_call_that_no_kernel_takes_warns_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """With the reason of each kernel, at a level that is shown by default."""

    class Cuda(Tensor):
        is_cuda = True

    def refuse(call: Any) -> list[str]:
        return ["triton is not installed"]

    kernel, chunkwise = types.SimpleNamespace(refusals=refuse), api._module("chunkwise")
    monkeypatch.setattr(api, "_module", lambda name: chunkwise if name == "chunkwise" else kernel)
    api._log_once.cache_clear()
    call = api.KDACall(
        *(good()[n].as_subclass(Cuda) for n in ("q", "k", "v", "g", "beta")), None, 1.0, None, False, None, False, False,
        None, None, False, torch.float32,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="openkda.ops.kda"):
        assert api._choose(call, None) is chunkwise and api._choose(call, None) is chunkwise
    said = "not hopper: triton is not installed; not triton: triton is not installed; not triton_exact"
    assert len(caplog.records) == 1 and said in caplog.records[0].getMessage()


def test_validation_and_choice_are_cheap() -> None:
    """Best of many, so that a busy machine does not matter: well under the cost of the smallest call."""
    call = api.KDACall(
        *(good()[n] for n in ("q", "k", "v", "g", "beta")), None, 1.0, None, False, None, False, False, None, None, False,
        torch.float32,
    )  # fmt: skip
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        api._choose(api.validate(call, False), None)
        best = min(best, time.perf_counter() - start)
    assert best < 60e-6, f"{best * 1e6:.0f} microseconds"

"""fla-core 0.6.0's names, order and defaults on `openkda.compat.fla`, whole; and the ways a call may be made there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from openkda.compat import fla
from openkda.ops.kda import chunkwise
from openkda.testing.inputs import make_inputs

NONE, NO, F32 = None, False, torch.float32
TOKENS: dict[str, Any] = dict.fromkeys(("q", "k", "v", "g", "beta"), inspect.Parameter.empty)
INSIDE = dict.fromkeys(
    ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"), NO
)
NAIVE = TOKENS | {"scale": NONE, "initial_state": NONE, "output_final_state": NO}
SIGNATURES: dict[str, dict[str, Any]] = {  # by position; what fla takes as further keywords stands below
    "chunk_kda": NAIVE | INSIDE | {
        "safe_gate": NO, "lower_bound": NONE, "disable_recompute": NO, "return_intermediate_states": NO, "state_v_first": NO,
        "cu_seqlens": NONE, "cu_seqlens_cpu": NONE, "cp_context": NONE, "use_graph": NO, "max_num_seqs": NONE,
    },
    "fused_recurrent_kda": TOKENS | {
        "A_log": NONE, "dt_bias": NONE, "scale": NONE, "initial_state": NONE, "output_final_state": NO, **INSIDE,
        "lower_bound": NONE, "state_v_first": NO, "cu_seqlens": NONE,
    },
    "fused_recurrent_kda_fwd": TOKENS | {
        "A_log": NONE, "dt_bias": NONE, "initial_state": NONE, "scale": NONE, "output_final_state": NO,
        "inplace_final_state": True, "state_v_first": NO, "cu_seqlens": NONE, "ssm_state_indices": NONE,
        "num_accepted_tokens": NONE, **INSIDE, "lower_bound": NONE, "out": NONE,
    },
    "fused_kda_gate": {
        "g": TOKENS["g"], "A_log": NONE, "dt_bias": NONE, "lower_bound": NONE, "output_dtype": F32,
    },
    "naive_kda_gate": {"g": TOKENS["g"], "A_log": TOKENS["g"], "dt_bias": NONE, "output_dtype": F32},
    "naive_kda_lowerbound_gate": {
        "g": TOKENS["g"], "A_log": NONE, "dt_bias": NONE, "lower_bound": -5.0, "output_dtype": F32,
    },
    "naive_recurrent_kda": NAIVE,
    "naive_chunk_kda": NAIVE | {"chunk_size": 64},
}  # fmt: skip
BY_NAME: dict[str, dict[str, Any]] = {
    "chunk_kda": {"A_log": NONE, "dt_bias": NONE, "chunk_size": 64, "transpose_state_layout": NONE},
    "fused_recurrent_kda": {"transpose_state_layout": NONE},
    "fused_kda_gate": {"head_k_dim": NONE, "g_bias": NONE, "beta": 1.0, "threshold": 20.0},  # 0.4
}


@pytest.mark.parametrize("name", fla.__all__)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(fla, name)).parameters.values()
    by_position = [(p.name, p.default) for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    by_name = {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY}
    assert by_position == list(SIGNATURES[name].items()) and by_name == BY_NAME.get(name, {})
    assert len(by_position) + len(by_name) == len(parameters), "nothing may vanish in *args or **kwargs"


def model_call(op: Callable[..., Any]) -> Callable[..., Any]:
    """As fla's layers call it."""

    def call(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, A_log: Any, dt_bias: Any) -> Any:
        return op(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
            transpose_state_layout=False,
        )  # fmt: skip

    return call


@pytest.mark.filterwarnings("ignore:transpose_state_layout")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("op", [fla.chunk_kda, fla.fused_recurrent_kda], ids=lambda f: f.__name__)
def test_in_one_graph_of_torch_compile(op: Callable[..., Any], mode: Any) -> None:
    x = make_inputs(B=2, T=20, H=2, HV=4, K=16, V=24, gate="bounded")
    assert x.gate is not None and x.gate.dt_bias is not None
    given = (x.q, x.k, x.v, x.g, x.beta, x.initial_state, x.gate.A_log, x.gate.dt_bias.flatten())
    call = model_call(op)
    with mode():
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(*given)
        for a, b in zip(got, call(*given), strict=True):
            assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:transpose_state_layout")
@pytest.mark.parametrize("op", [fla.chunk_kda, fla.fused_recurrent_kda], ids=lambda f: f.__name__)
def test_a_cpu_runs_the_chunkwise_form(op: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_inputs(T=9, K=16, gate="bounded")
    assert x.gate is not None and x.gate.dt_bias is not None
    calls, run = [], chunkwise.run
    monkeypatch.setattr(chunkwise, "run", lambda call: (calls.append(1), run(call))[1])
    model_call(op)(x.q, x.k, x.v, x.g, x.beta, x.initial_state, x.gate.A_log, x.gate.dt_bias.flatten())
    assert calls

"""`kda_normed` as what it means: the op, and the norm behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openkda.ops.kda.api import kda
from openkda.ops.kda.call import KDAOutput
from openkda.ops.norm.api import gated_rms_norm

if TYPE_CHECKING:
    from openkda.ops.kda.normed import NormedCall


def refusals(call: NormedCall) -> list[str]:
    """Runs everything."""
    return []


def run(call: NormedCall, key: object) -> KDAOutput:
    c = call.kda
    o, final, _ = kda(
        c.q, c.k, c.v, c.g, c.beta, gate=c.gate, scale=c.scale, initial_state=c.initial_state,
        output_final_state=c.output_final_state, cu_seqlens=c.cu_seqlens, use_qk_l2norm=c.use_qk_l2norm,
        use_beta_sigmoid=c.use_beta_sigmoid,
    )  # fmt: skip
    return KDAOutput(gated_rms_norm(o, call.out_gate, call.weight, call.eps), final)

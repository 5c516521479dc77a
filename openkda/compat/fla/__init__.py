"""KDA under the names, defaults and layouts of fla-core 0.6.0: change the import, keep the call.

    from openkda.compat.fla import chunk_kda, fused_recurrent_kda, fused_kda_gate

Everything runs through `openkda.kda`, so it also runs on a CPU, has gradients wherever that has them, and needs no
fla. What is not supported raises; see the docstrings for what is accepted and changes nothing.
"""

from openkda.compat.fla.gates import fused_kda_gate, naive_kda_gate, naive_kda_lowerbound_gate
from openkda.compat.fla.ops import (
    chunk_kda,
    fused_recurrent_kda,
    fused_recurrent_kda_fwd,
    naive_chunk_kda,
    naive_recurrent_kda,
)

__all__ = [
    "chunk_kda",
    "fused_kda_gate",
    "fused_recurrent_kda",
    "fused_recurrent_kda_fwd",
    "naive_chunk_kda",
    "naive_kda_gate",
    "naive_kda_lowerbound_gate",
    "naive_recurrent_kda",
]

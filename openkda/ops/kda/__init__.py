"""Kimi Delta Attention: `kda` for whole sequences, `kda_step` for one token, and the two decay gates."""

from openkda.ops.kda.api import KDAOutput, kda, kda_step
from openkda.ops.kda.gate import BoundedGate, Gate, SoftplusGate

__all__ = ["BoundedGate", "Gate", "KDAOutput", "SoftplusGate", "kda", "kda_step"]

"""RMSNorm, its sigmoid-gated form, and the L2 norm of query and key heads."""

from openkda.ops.norm.api import gated_rms_norm, l2norm, rms_norm

__all__ = ["gated_rms_norm", "l2norm", "rms_norm"]

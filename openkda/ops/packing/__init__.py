"""Sequences packed along the token axis."""

from openkda.ops.packing.api import check_cu_seqlens

__all__ = ["check_cu_seqlens"]

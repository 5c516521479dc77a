"""Sequences packed along the token axis."""

from openkda.ops.packing.api import check_cu_seqlens, declare_longest, longest_sequence, move, move_offsets

__all__ = ["check_cu_seqlens", "declare_longest", "longest_sequence", "move", "move_offsets"]

"""The block around the KDA recurrence, as one op for decoding: short convolutions, gates, recurrence, gated norm."""

from openkda.ops.kda_block.api import BlockOutput, BlockState, BlockWeights, kda_block, kda_block_commit

__all__ = ["BlockOutput", "BlockState", "BlockWeights", "kda_block", "kda_block_commit"]

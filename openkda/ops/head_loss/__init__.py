"""Cross-entropy of a linear head, without the logits of all tokens at once."""

from openkda.ops.head_loss.api import head_loss

__all__ = ["head_loss"]

"""Named real shapes of the KDA op, shared by tests, benchmarks and tuning tables."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KDAShape:
    """Heads and head sizes of one layer, and how its tokens are packed (lengths of the sequences)."""

    num_heads: int
    lengths: tuple[int, ...]
    head_dim: int = 128


MIXED = (1300, 547, 2048, 963, 271, 3063)  # the varlen set of FlashKDA's benchmark, 8192 tokens in all

SHAPES = {
    "k3": KDAShape(96, (8192,)),
    "k3-8x1024": KDAShape(96, (1024,) * 8),
    "k3-mixed": KDAShape(96, MIXED),
    "k3-tp8": KDAShape(12, (8192,)),
    "k3-tp8-long": KDAShape(12, (65536,)),
    "h64": KDAShape(64, (8192,)),
    "h64-8x1024": KDAShape(64, (1024,) * 8),
    "h64-mixed": KDAShape(64, MIXED),
    "h16-long": KDAShape(16, (65536,)),
    "kimi-linear": KDAShape(32, (8192,)),
    "cpu": KDAShape(4, (1024,)),
}

DECODE_BATCHES = (1, 8, 32, 128, 256)

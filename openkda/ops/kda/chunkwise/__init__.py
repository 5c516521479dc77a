"""KDA as matrix products in plain torch: the CPU path, exact for any gate, with its own backward.

A sequence is cut into chunks of 64 tokens. Inside a chunk everything is a product of small matrices; only the state walks
from chunk to chunk. With P_i the decay from the chunk's start to token i (inclusive), F_j the decay after token j up to the
chunk's end, and S the entering state:

    A_ij = sum_k x_ik y_jk (decay between j and i)_k     x = q (j <= i) or k (j < i)         tiles.py
    E    = (I + A_k Diag(b))^-1 (V - (P K) S)            the errors that the tokens write    solve.py
    O    = (P Q) S + A_q (b E)                                                               forward.py
    S   <- P_last S + (F K)^T (b E)
                                                         gradients by hand                   backward.py
                                                         which token lies in which chunk     plan.py
                                                         a block of sequences, cut in time   segments.py

Source: Kimi Linear report (arXiv 2510.26692), section 3; Kimi K3 report, section 2.1.1 (the bounded gate's tile).
"""

from openkda.ops.kda.chunkwise.entry import refusals, run, step

__all__ = ["refusals", "run", "step"]

"""Block Attention Residuals: what stands between the sublayers instead of `x = x + sublayer(norm(x))`.

    bank = [], x = embedding                                     x is the running sum of the current block
    for each layer L:
        a = attention(norm(read(bank + [x])))                    read: softmax mix, openkda/ops/attn_res/api.py
        if L starts a block:  bank += [x];  x = a                the sum so far is finished; it was still a source above
        else:                 x = x + a
        x = x + mlp(norm(read(bank + [x])))
    out = norm(read(bank + [x]))

The block size counts decoder layers. Layer 0 reads the embedding alone. Source: Kimi K3 report, section 2.2;
Attention Residuals (arXiv 2603.15031), which counts sublayers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from openkda.layers.norm import RMSNorm
from openkda.layers.parameters import fill_constant
from openkda.ops.attn_res.api import BankPartials, attn_res_bank, attn_res_merge, attn_res_mix

TWO_PHASE_TOKENS = 256
"""Up to here the two-phase form is faster (CPU, 8 rows of 1024: 6.7x at 1 token, 3.3x at 64; 0.9x at 512)."""


class PseudoQuery(nn.Module):
    """The learned query of one sublayer, weight [1, D]. Starts at zero: a uniform mix of all sources."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))

    def init_parameters(self, generator: torch.Generator | None) -> None:
        fill_constant(self.weight, 0.0)


def residual_query(norm: Tensor, query: Tensor) -> Tensor:
    """Norm weight [D] (or [S, D]) times pseudo-query of the same shape, in float32 or wider."""
    wide = torch.promote_types(norm.dtype, torch.float32)
    return norm.to(wide) * query.to(wide)


@dataclass(frozen=True)
class ResidualBank:
    """Finished rows of the stream, immutable: `push` returns a new bank.

    rows: embedding and finished block sums, [B, T, D] each. queries: [S, D] of all sublayers in order (two a layer, then the
    output's), where the two-phase form is to be used; partials: its first phase, for `queries[first:]`.
    """

    eps: float
    block: int
    rows: tuple[Tensor, ...] = ()
    queries: Tensor | None = None
    partials: BankPartials | None = None
    first: int = 0

    def read(self, x: Tensor, sublayer: int, norm: RMSNorm, query: PseudoQuery) -> Tensor:
        """What sublayer number `sublayer` sees of the bank and the running sum x [B, T, D]."""
        if not self.rows:
            return x
        if self.partials is not None and self.queries is not None:
            return attn_res_merge(self.partials, sublayer - self.first, x, self.queries[sublayer], self.eps)
        return attn_res_mix([*self.rows, x], residual_query(norm.weight, query.weight[0]), self.eps)

    def push(self, x: Tensor, layer: int) -> ResidualBank:
        """The bank with x as its newest row; `layer` (0-based) begins a block."""
        rows = (*self.rows, x)
        if self.queries is None:
            return replace(self, rows=rows)
        first = (
            2 * layer + 1
        )  # the next reader is this layer's MLP, the last one the attention of the next block's start
        queries = self.queries[first : first + 2 * self.block]
        return replace(self, rows=rows, first=first, partials=attn_res_bank(rows, queries, self.eps))

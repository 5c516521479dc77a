"""Scores inside a chunk, A_ij = sum_k x_ik y_jk exp(log decay between j and i)_k, exact for any log decay <= 0.

No exponential ever has a positive exponent and no sum of logarithms is ever the difference of two longer ones. Tokens are
joined in a binary tree. At block size s, two neighbouring blocks meet at their border m; for a row i of the later block
and a column j of the earlier one

    decay(j, i) = P_i F_j        log P_i = g_{m+1} + .. + g_i        log F_j = g_{j+1} + .. + g_m

so their s x s scores are one plain matmul of (P x) and (F y). Six sizes, 1 to 32, fill a 64-token chunk. The border lies
between j and i: a token's score never reads a later token, not even in its rounding, and nothing needs a mask.

A bounded gate (every log decay >= -80/16) replaces the four smallest sizes by one matmul a 16-token tile, because there
P >= exp(-80) can be divided out in float32: (P x)(y / P), masked above the diagonal. This is the bounded gate's reason to
exist (Kimi K3 report, section 2.1.1). There P is held times 2^58, so that P and 1 / P both range from exp(-40) to exp(40).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openkda.ops.kda.chunkwise.plan import TILE

TILE_SHIFT = 2.0**58  # about exp(40)
TILE_RANGE = -80.0
"""Smallest summed log decay of a tile that may be divided out in float32."""

# Log decays below these count as -inf. A CPU multiplies numbers that are, or become, denormal up to 400x slower (measured),
# so a product of two factors must not get there: -43 for scores (two decays), -75 against a state, -86 on the state alone.
SCORE_FLOOR = {torch.float32: -43.0, torch.float64: -340.0}
STATE_FLOOR = {torch.float32: -75.0, torch.float64: -600.0}
TOTAL_FLOOR = {torch.float32: -86.0, torch.float64: -700.0}


def decay(log_a: Tensor, floor: dict[torch.dtype, float]) -> Tensor:
    """exp(log_a), and exactly 0 below the floor; a fresh contiguous tensor."""
    low = floor[log_a.dtype]
    a = torch.clamp_min(log_a, low, out=log_a.new_empty(log_a.shape)).exp_()
    return torch.threshold_(a, math.exp(low + 1e-3), 0.0)


class Sums:
    """log P (`head`) and log F (`tail`) of all blocks of one size; starts at single tokens and doubles."""

    def __init__(self, log_a: Tensor) -> None:
        """log_a: [n, C, K], taken over: it becomes `head`."""
        self.head, self.tail, self.size = log_a, torch.zeros_like(log_a), 1

    def halves(self, x: Tensor) -> Tensor:
        """[.., C, K] -> [.., pairs of blocks, 2, size, K]."""
        return x.unflatten(-2, (-1, 2, self.size))

    def double(self) -> None:
        head, tail = self.halves(self.head), self.halves(self.tail)
        tail[:, :, 0] += head[:, :, 1, -1:]
        head[:, :, 1] += head[:, :, 0, -1:]
        self.size *= 2

    def double_to(self, size: int) -> None:
        while self.size < size:
            self.double()

    def row_decay(self) -> Tensor:
        """P of the later blocks, [n, pairs, size, K]."""
        return decay(self.halves(self.head)[:, :, 1], SCORE_FLOOR)

    def tile_decay(self) -> Tensor:
        """2^58 P of each 16-token tile, [n, tiles, 16, K]; at size 16 and for a bounded gate."""
        return self.head.exp().mul_(TILE_SHIFT).unflatten(1, (-1, TILE))

    def column_decay(self) -> Tensor:
        """F of the earlier blocks, [n, pairs, size, K]."""
        return decay(self.halves(self.tail)[:, :, 0], SCORE_FLOOR)


def _rows(x: Tensor, sums: Sums, P: Tensor) -> Tensor:
    """P x of the later blocks: x [n, 2, C, K] -> [n * pairs, 2 size, K]."""
    x = sums.halves(x)[:, :, :, 1]
    n, two, pairs, s, K = x.shape
    out = x.new_empty(n, pairs, two, s, K)
    torch.mul(x, P.unsqueeze(1), out=out.transpose(1, 2))
    return out.view(n * pairs, two * s, K)


def _columns(k: Tensor, sums: Sums, F: Tensor) -> Tensor:
    """F k of the earlier blocks: k [n, C, K] -> [n * pairs, size, K]."""
    return torch.mul(sums.halves(k)[:, :, 0], F, out=torch.empty_like(F)).flatten(0, 1)


def _blocks(A: Tensor, size: int) -> Tensor:
    """View of A [n, 2, C, C]: the scores of the later against the earlier blocks, [n, pairs, 2, size, size]."""
    n, two, C, _ = A.shape
    strides = (A.stride(0), 2 * size * (C + 1), A.stride(1), C, 1)
    return A.as_strided((n, C // (2 * size), two, size, size), strides, A.storage_offset() + size * C)


def _tiles(A: Tensor) -> Tensor:
    """View of A [n, 2, C, C]: its diagonal tiles, [n, tiles, 2, 16, 16]."""
    n, two, C, _ = A.shape
    strides = (A.stride(0), TILE * (C + 1), A.stride(1), C, 1)
    return A.as_strided((n, C // TILE, two, TILE, TILE), strides, A.storage_offset())


def _tile_factors(x: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
    """(P x [n * tiles, 32, K], k / P [n * tiles, 16, K]); x = (q, k) [n, 2, C, K], P [n, tiles, 16, K]."""
    n, two, C, K = x.shape
    X = x.new_empty(n, C // TILE, two, TILE, K)
    torch.mul(x.unflatten(2, (-1, TILE)), P.unsqueeze(1), out=X.transpose(1, 2))
    Y = torch.div(x[:, 1].unflatten(1, (-1, TILE)), P, out=torch.empty_like(P))
    return X.view(-1, two * TILE, K), Y.flatten(0, 1)


def scores(x: Tensor, sums: Sums, bounded: bool) -> Tensor:
    """A [n, 2, C, C] of x = (q, k) [n, 2, C, K]: row 0 the lower triangle with diagonal, row 1 the one without.

    bounded: every log decay is proven >= -80/16. Leaves `sums` at size C: P and F of the whole chunk.
    """
    n, two, C, _ = x.shape
    A = x.new_zeros(n, two, C, C)
    if bounded:
        sums.double_to(TILE)
        X, Y = _tile_factors(x, sums.tile_decay())
        _tiles(A).copy_(torch.bmm(X, Y.transpose(1, 2)).view(n, -1, two, TILE, TILE).tril_())
    while sums.size < C:
        s = sums.size
        X, Y = _rows(x, sums, sums.row_decay()), _columns(x[:, 1], sums, sums.column_decay())
        _blocks(A, s).copy_(torch.bmm(X, Y.transpose(1, 2)).view(n, -1, two, s, s))
        sums.double()
    A[:, 0].diagonal(dim1=-2, dim2=-1).copy_((x[:, 0] * x[:, 1]).sum(-1))
    A[:, 1].diagonal(dim1=-2, dim2=-1).zero_()
    return A


def scores_backward(x: Tensor, sums: Sums, bounded: bool, dA: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `scores` but for its diagonal: (dx [n, 2, C, K], gradient of the log decay [n, C, K]).

    dA is 0 above the diagonal. A token's log decay gets its gradient from the pairs that straddle it and from no others: later
    rows of its own block or earlier columns of its own block, summed as they are. The shorter way, one reverse sum of
    (rows minus columns), is a difference of large sums; behind a softplus gate its rounding drowns the gradient of
    tokens that forget hard (measured: dA_log off by 40 % where all of them do).
    """
    n, two, C, K = x.shape
    dx, dlog = torch.zeros_like(x), x.new_zeros(n, C, K)
    if bounded:
        sums.double_to(TILE)
        _tiles_backward(x, sums.tile_decay(), dA, dx, dlog)
    while sums.size < C:
        s = sums.size
        P, F = sums.row_decay(), sums.column_decay()
        d = _blocks(dA, s).reshape(-1, two * s, s)
        X, Y = _rows(x, sums, P), _columns(x[:, 1], sums, F)
        dX, dY = torch.bmm(d, Y), torch.bmm(d.transpose(1, 2), X)
        weight = x.new_empty(n, C // (2 * s), 2, s, K)  # what each column and each row carries across the border
        torch.mul(Y.view_as(F), dY.view_as(F), out=weight[:, :, 0])
        torch.sum(X.mul_(dX).view(n, -1, two, s, K), 2, out=weight[:, :, 1])
        dlog.view(-1, 2 * s, K).baddbmm_(_straddle(s, x).expand(X.shape[0], -1, -1), weight.view(-1, 2 * s, K))
        sums.halves(dx)[:, :, :, 1].addcmul_(dX.view(n, -1, two, s, K).transpose(1, 2), P.unsqueeze(1))
        sums.halves(dx)[:, 1, :, 0].addcmul_(dY.view_as(F), F)
        sums.double()
    return dx, dlog


def _straddle(size: int, like: Tensor) -> Tensor:
    """[2 size, 2 size]: which weights reach a token's log decay; of the earlier block those before it, of the later block
    its own and those after it."""
    ones = like.new_ones(size, size)
    return torch.block_diag(ones.tril(-1), ones.triu())


def _tiles_backward(x: Tensor, P: Tensor, dA: Tensor, dx: Tensor, dlog: Tensor) -> None:
    """The bounded gate's tiles; fills dx and dlog. Rows minus columns is fine here: the tile's decays cannot differ much."""
    n, two, _, K = x.shape
    X, Y = _tile_factors(x, P)
    d = _tiles(dA).clone(memory_format=torch.contiguous_format)
    d.diagonal(dim1=-2, dim2=-1).zero_()
    d = d.view(-1, two * TILE, TILE)
    rows = torch.bmm(d, Y).view(n, -1, two, TILE, K).transpose(1, 2)
    torch.mul(rows, P.unsqueeze(1), out=dx.unflatten(2, (-1, TILE)))
    columns = torch.bmm(d.transpose(1, 2), X).view_as(P).div_(P).flatten(1, 2)
    weight = (x[:, 0] * dx[:, 0]).addcmul_(x[:, 1], dx[:, 1]).addcmul_(x[:, 1], columns, value=-1).view(-1, TILE, K)
    later = x.new_ones(TILE, TILE).triu().expand(len(weight), TILE, TILE)
    torch.bmm(later, weight, out=dlog.view(-1, TILE, K))
    dx[:, 1] += columns

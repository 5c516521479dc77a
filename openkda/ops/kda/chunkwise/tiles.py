"""Scores inside a chunk, A_ij = sum_k x_ik y_jk prod_{j < t <= i} a_tk, exact for any decay a in [0, 1].

A product of decays is only ever built by multiplying decays: nothing is divided out and no exponential has a positive
exponent. Tokens are joined in a binary tree. At block size s, two neighbouring blocks meet at their border m; for a row i of
the later block and a column j of the earlier one

    decay(j, i) = P_i F_j        P_i = a_{m+1} .. a_i     F_j = a_{j+1} .. a_m       both <= 1

so their s x s scores are one plain matmul of (P x) and (F y). Six sizes, 1 to 32, fill a 64-token chunk. The border lies
between j and i: a token's score never reads a later token, not even in its rounding, and nothing needs a mask.

A bounded gate (every log decay >= -80/16) replaces the four smallest sizes by one matmul a 16-token tile, because there
P >= exp(-80) can be divided out in float32: (P x)(y / P), masked above the diagonal. This is the bounded gate's reason to
exist (Kimi K3 report, section 2.1.1). y / P is held times 2^-58, so that its range, exp(-40) to exp(40), is centred.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.kda.chunkwise.plan import TILE

TILE_SHIFT = 2.0**58  # about exp(40)
TILE_RANGE = -80.0
"""Smallest summed log decay of a tile that may be divided out in float32."""

_FLUSH = {torch.float32: 2.0**-93, torch.float64: 2.0**-900}
"""A product of decays below this counts as 0. A denormal factor makes a CPU's matmul 400x slower (measured)."""

_FLOOR = {torch.float32: -80.0, torch.float64: -640.0}
"""Log decay is clamped here (below the flush anyway): exp of anything lower gives denormals, 80x slower (measured)."""


def decay_from_log(log_a: Tensor) -> Tensor:
    """exp of a log decay <= 0, in place, with everything below the flush limit exactly 0."""
    log_a.clamp_min_(_FLOOR[log_a.dtype]).exp_()
    return flush(log_a)


def flush(p: Tensor) -> Tensor:
    return torch.threshold_(p, _FLUSH[p.dtype], 0.0)


class Products:
    """P and F of all blocks of one size; starts at single tokens with P = a, F = 1, and doubles. Owns both tensors."""

    def __init__(self, a: Tensor, bounded: bool) -> None:
        """a: [n, C, K]. bounded: every product within a tile stays above exp(-80); those are kept unflushed."""
        self.P, self.F, self.size, self.bounded = a, torch.ones_like(a), 1, bounded

    def halves(self, x: Tensor) -> Tensor:
        """[.., C, K] -> [.., pairs of blocks, 2, size, K]."""
        return x.unflatten(-2, (-1, 2, self.size))

    def double(self) -> None:
        P, F_ = self.halves(self.P), self.halves(self.F)
        F_[:, :, 0] *= P[:, :, 1, -1:]
        P[:, :, 1] *= P[:, :, 0, -1:]
        self.size *= 2
        if not self.bounded or self.size > TILE:
            flush(self.P), flush(self.F)

    def grow_to_tile(self) -> None:
        while self.size < TILE:
            self.double()

    def leave_tile(self) -> None:
        """After the tile's own scores: from here on the tiny products are as good as 0."""
        flush(self.P), flush(self.F)


def _rows(x: Tensor, prod: Products) -> Tensor:
    """P x of the later blocks: x [n, 2, C, K] -> [n * pairs, 2 size, K]."""
    x, P = prod.halves(x)[:, :, :, 1], prod.halves(prod.P)[:, None, :, 1]
    n, two, pairs, s, K = x.shape
    out = x.new_empty(n, pairs, two, s, K)
    torch.mul(x, P, out=out.transpose(1, 2))
    return out.view(n * pairs, two * s, K)


def _columns(k: Tensor, prod: Products) -> Tensor:
    """F k of the earlier blocks: k [n, C, K] -> [n * pairs, size, K]."""
    return (prod.halves(k)[:, :, 0] * prod.halves(prod.F)[:, :, 0]).flatten(0, 1)


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


def _tile_factors(x: Tensor, prod: Products) -> tuple[Tensor, Tensor]:
    """(P x [n * tiles, 32, K], 2^-58 k / P [n * tiles, 16, K]) of a bounded gate; x = (q, k) [n, 2, C, K]."""
    n, two, C, K = x.shape
    X = x.new_empty(n, C // TILE, two, TILE, K)
    P = prod.P.unflatten(1, (-1, TILE))
    torch.mul(x.unflatten(2, (-1, TILE)), P.unsqueeze(1), out=X.transpose(1, 2))
    Y = torch.div(x[:, 1].unflatten(1, (-1, TILE)), P).mul_(1 / TILE_SHIFT)
    return X.view(-1, two * TILE, K), Y.flatten(0, 1)


def scores(x: Tensor, prod: Products) -> Tensor:
    """A [n, 2, C, C] of x = (q, k) [n, 2, C, K]: row 0 the lower triangle with diagonal, row 1 the one without.

    Leaves `prod` at size C: P and F of the whole chunk.
    """
    n, two, C, _ = x.shape
    A = x.new_zeros(n, two, C, C)
    if prod.bounded:
        prod.grow_to_tile()
        X, Y = _tile_factors(x, prod)
        tile = torch.baddbmm(X.new_empty(()), X, Y.transpose(1, 2), beta=0, alpha=TILE_SHIFT)
        _tiles(A).copy_(tile.view(n, -1, two, TILE, TILE).tril_())
        prod.leave_tile()
    while prod.size < C:
        block = torch.bmm(_rows(x, prod), _columns(x[:, 1], prod).transpose(1, 2))
        _blocks(A, prod.size).copy_(block.view(n, -1, two, prod.size, prod.size))
        prod.double()
    A[:, 0].diagonal(dim1=-2, dim2=-1).copy_((x[:, 0] * x[:, 1]).sum(-1))
    A[:, 1].diagonal(dim1=-2, dim2=-1).zero_()
    return A


def scores_backward(x: Tensor, prod: Products, dA: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `scores` but for its diagonal: (dx [n, 2, C, K], gradient of the log decay [n, C, K]).

    dA is 0 above the diagonal. A token's log decay gets its gradient from the pairs that straddle it and from no others: later
    rows of its own block or earlier columns of its own block, summed as they are. The shorter way, one reverse sum of
    (rows minus columns), is a difference of large sums; behind a softplus gate its rounding drowns the gradient of
    tokens that forget hard (measured: dA_log off by 40 % where all of them do).
    """
    n, two, C, K = x.shape
    dx, dlog = torch.zeros_like(x), x.new_zeros(n, C, K)
    if prod.bounded:
        prod.grow_to_tile()
        _tiles_backward(x, prod, dA, dx, dlog)
        prod.leave_tile()
    while prod.size < C:
        s = prod.size
        d = _blocks(dA, s).reshape(-1, two * s, s)
        X, Y = _rows(x, prod), _columns(x[:, 1], prod)
        dX, dY = torch.bmm(d, Y), torch.bmm(d.transpose(1, 2), X)
        weight = x.new_empty(n, C // (2 * s), 2, s, K)  # what each column and each row carries across the border
        torch.mul(Y.view(n, -1, s, K), dY.view(n, -1, s, K), out=weight[:, :, 0])
        torch.sum(X.mul_(dX).view(n, -1, two, s, K), 2, out=weight[:, :, 1])
        dlog.view(-1, 2 * s, K).baddbmm_(_straddle(s, x).expand(X.shape[0], -1, -1), weight.view(-1, 2 * s, K))
        rows = dX.view(n, -1, two, s, K).transpose(1, 2)
        prod.halves(dx)[:, :, :, 1].addcmul_(rows, prod.halves(prod.P)[:, None, :, 1])
        prod.halves(dx)[:, 1, :, 0].addcmul_(dY.view(n, -1, s, K), prod.halves(prod.F)[:, :, 0])
        prod.double()
    return dx, dlog


def _straddle(size: int, like: Tensor) -> Tensor:
    """[2 size, 2 size]: which weights reach a token's log decay; of the earlier block those before it, of the later block
    its own and those after it."""
    ones = like.new_ones(size, size)
    return torch.block_diag(ones.tril(-1), ones.triu())


def _tiles_backward(x: Tensor, prod: Products, dA: Tensor, dx: Tensor, dlog: Tensor) -> None:
    """The bounded gate's tiles; fills dx and dlog. Rows minus columns is fine here: the tile's decays cannot differ much."""
    n, two, _, K = x.shape
    X, Y = _tile_factors(x, prod)
    d = _tiles(dA).clone(memory_format=torch.contiguous_format)
    d.diagonal(dim1=-2, dim2=-1).zero_()
    d = d.view(-1, two * TILE, TILE)
    P = prod.P.unflatten(1, (-1, TILE))
    rows = torch.bmm(d, Y).view(n, -1, two, TILE, K).transpose(1, 2)
    torch.mul(rows, (P * TILE_SHIFT).unsqueeze(1), out=dx.unflatten(2, (-1, TILE)))
    columns = torch.bmm(d.transpose(1, 2), X).view(n, -1, TILE, K).div_(P).flatten(1, 2)
    weight = (x[:, 0] * dx[:, 0]).addcmul_(x[:, 1], dx[:, 1]).addcmul_(x[:, 1], columns, value=-1).view(-1, TILE, K)
    later = x.new_ones(TILE, TILE).triu().expand(len(weight), TILE, TILE)
    torch.bmm(later, weight, out=dlog.view(-1, TILE, K))
    dx[:, 1] += columns

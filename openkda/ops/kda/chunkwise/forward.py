"""Forward of one segment: from token rows to outputs, and the state carried through its chunks.

Axes of a segment: c chunks, N sequences side by side, HV value heads, C tokens a chunk. Batched products run over
n = c * N * HV matrices; the loop over c carries the states of NH = N * HV heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from openkda.ops.device.api import has_values, transform_refusals
from openkda.ops.kda.chunkwise.plan import TILE
from openkda.ops.kda.chunkwise.solve import causal_product, unit_lower_inverse
from openkda.ops.kda.chunkwise.tiles import STATE_FLOOR, TILE_RANGE, TOTAL_FLOOR, Sums, decay, scores
from openkda.ops.kda.gate import Gate
from openkda.ops.norm.api import L2NORM_EPS

LONGEST = {torch.float32: 1e10, torch.float64: 1e100}
"""Up to this length of a row the dtype holds its squares and, for the gradient, the cube of its inverse length."""


class Tokens(NamedTuple):
    """The op's token inputs as rows: q, k [R, H, K], v [R, HV, V], g [R, HV, K], beta [R, HV]; then the gate's tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None


@dataclass(frozen=True)
class Settings:
    """What is not a tensor. gate: its tensors are taken from `Tokens` instead. dtype: of all arithmetic."""

    gate: Gate | None
    scale: float
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    dtype: torch.dtype

    @property
    def bounded(self) -> bool:
        """Whether the gate object proves that a tile's summed log decay stays in range; a given log decay never does."""
        bound = None if self.gate is None else self.gate.lower_bound
        return bound is not None and bound * TILE >= TILE_RANGE


def prologue(t: Tokens, opts: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised scaled q, normalised k, log decay and write strength, in the arithmetic's dtype; torch's autograd."""
    q, k, g, beta = (x.to(opts.dtype) for x in (t.q, t.k, t.g, t.beta))
    scale: float | Tensor = opts.scale
    if opts.use_qk_l2norm:
        (q, inverse), (k, of_k) = _inverse_length(q), _inverse_length(k)
        scale, k = opts.scale * inverse, k * of_k
    if opts.gate is not None:
        g = replace(opts.gate, A_log=t.A_log, dt_bias=t.dt_bias)(g)  # type: ignore[arg-type]
    return q * scale, k, g, torch.sigmoid(beta) if opts.use_beta_sigmoid else beta


def _inverse_length(x: Tensor) -> tuple[Tensor, Tensor]:
    """x and 1 / sqrt(sum x^2 + 1e-6) over the last axis, kept; vector_norm is one pass where square and sum are two. Rows too
    long for that come back divided by their largest value, which changes neither the product nor its gradient."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    eps: float | Tensor = L2NORM_EPS
    values_unknown = not has_values(x) or bool(transform_refusals())
    if values_unknown or (length.numel() and bool(length.detach().max() > LONGEST[x.dtype])):
        largest = x.detach().abs().amax(-1, keepdim=True)
        unit = torch.where(length.detach() > LONGEST[x.dtype], largest, 1.0)
        x, eps = x / unit, L2NORM_EPS / unit / unit
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x, torch.rsqrt(length.square() + eps)


def heads_first(x: Tensor, HV: int) -> Tensor:
    """View [c, N, C, H, ...] as [c, N, H, HV / H, C, ...], heads repeated."""
    x = x.transpose(2, 3).unsqueeze(3)
    return x.expand(*x.shape[:3], HV // x.shape[2], *x.shape[4:])


def rows_first(x: Tensor, H: int, shape: tuple[int, int, int]) -> Tensor:
    """Inverse for gradients: [n, C, ...] -> [c, N, C, H, ...], summed over the value heads of a group."""
    c, N, _ = shape
    x = x.view(c, N, H, -1, *x.shape[1:])
    x = x.squeeze(3) if x.shape[3] == 1 else x.sum(3)
    return x.transpose(2, 3)


@dataclass(frozen=True)
class Factors:
    """All matrices of a segment's chunks that do not depend on the state.

    x: [n, 2, C, K] q and k. A: [n, 2, C, C] scores. Ab: A with column j times b_j. T: [n, C, C] (I + Ab_k)^-1.
    P, F: [n, C, K] decay from the chunk's start to each token, and from it to the chunk's end. total: [n, K] over the chunk.
    Px: [n, 2, C, K] and Fk: [n, C, K] products with x and k. b: [n, C]. V: [n, C, V].
    """

    x: Tensor
    A: Tensor
    Ab: Tensor
    T: Tensor
    P: Tensor
    F: Tensor
    Px: Tensor
    Fk: Tensor
    total: Tensor
    b: Tensor
    V: Tensor


def stack(q: Tensor, k: Tensor, HV: int) -> Tensor:
    """q, k [c, N, C, H, K] -> x [n, 2, C, K]."""
    q, k = heads_first(q, HV), heads_first(k, HV)
    x = q.new_empty(*q.shape[:4], 2, *q.shape[4:])
    x[..., 0, :, :].copy_(q)
    x[..., 1, :, :].copy_(k)
    return x.flatten(0, 3)


def log_decays(log_a: Tensor) -> Tensor:
    """log_a [c, N, C, HV, K] -> [n, C, K], a fresh tensor."""
    return heads_first(log_a, log_a.shape[3]).clone(memory_format=torch.contiguous_format).flatten(0, 3)


def factors(t: Tokens, opts: Settings, q: Tensor, k: Tensor, log_a: Tensor, b: Tensor) -> Factors:
    """From the prologue's results (padding of log_a cleared) and the segment's v rows."""
    HV = log_a.shape[3]
    x = stack(q, k, HV)
    sums = Sums(log_decays(log_a))
    A = scores(x, sums, opts.bounded)
    P, F = decay(sums.head, STATE_FLOOR), decay(sums.tail, STATE_FLOOR)
    b = heads_first(b, HV).flatten(0, 3)
    Ab = A * b[:, None, None, :]
    return Factors(
        x=x, A=A, Ab=Ab, T=unit_lower_inverse(Ab[:, 1]), P=P, F=F, Px=x * P.unsqueeze(1), Fk=x[:, 1] * F,
        total=decay(sums.head[:, -1], TOTAL_FLOOR), b=b, V=heads_first(t.v, HV).to(opts.dtype).contiguous().flatten(0, 3),
    )  # fmt: skip


def walk(f: Factors, S: Tensor, c: int) -> tuple[Tensor, Tensor, Tensor]:
    """The states through the chunks: S [NH, K, V] -> (O [c, NH, C, V], E [c, NH, C, V], states [c + 1, NH, K, V])."""
    O, E, states = _walk(f, S, c, careful=False)
    if not bool(torch.isfinite(O.sum())):
        O, E, states = _walk(f, S, c, careful=True)
    return O, E, states


def _walk(f: Factors, S: Tensor, c: int, careful: bool) -> tuple[Tensor, Tensor, Tensor]:
    """careful: a token that overflows must not reach earlier ones (see `causal_product`); twice the work, rarely needed."""
    Ab = f.Ab.tril() if careful else f.Ab  # a zero above the diagonal times a later token's infinite b is NaN
    T = unit_lower_inverse(Ab[:, 1], careful=True) if careful else f.T
    T, Px, V = (m.unflatten(0, (c, -1)) for m in (T, f.Px, f.V))
    Fb = (f.Fk * f.b.unsqueeze(-1)).unflatten(0, (c, -1)).transpose(-1, -2)
    total = f.total.unflatten(0, (c, -1)).unsqueeze(-1)
    states, E = S.new_empty(c + 1, *S.shape), torch.empty_like(V)
    states[0] = S
    for i in range(c):
        rest = torch.baddbmm(V[i], Px[i, :, 1], states[i], alpha=-1)  # what the state does not predict
        if careful:
            E[i] = causal_product(T[i], rest, careful=True)
        else:
            torch.bmm(T[i], rest, out=E[i])
        torch.mul(states[i], total[i], out=states[i + 1])
        states[i + 1].baddbmm_(Fb[i], E[i])
    read = torch.bmm(f.Px[:, 0], states[:-1].flatten(0, 1))
    O = causal_product(Ab[:, 0], E.flatten(0, 1), read, careful)
    return O.view_as(E), E, states

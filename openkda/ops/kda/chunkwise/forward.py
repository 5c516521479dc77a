"""Forward of one segment: from token rows to outputs, and the state carried through its chunks.

Axes of a segment: c chunks, N sequences side by side, HV value heads, C tokens a chunk. Batched products run over
n = c * N * HV matrices; the loop over c carries the states of NH = N * HV heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from openkda.ops.kda.chunkwise.plan import TILE, Segment
from openkda.ops.kda.chunkwise.solve import unit_lower_inverse
from openkda.ops.kda.chunkwise.tiles import TILE_RANGE, Products, decay_from_log, scores
from openkda.ops.kda.gate import Gate


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
    if opts.use_qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if opts.gate is not None:
        g = replace(opts.gate, A_log=t.A_log, dt_bias=t.dt_bias)(g)  # type: ignore[arg-type]
    return q * opts.scale, k, g, torch.sigmoid(beta) if opts.use_beta_sigmoid else beta


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
    Px: [n, 2, C, K]. Fk: [n, C, K]. total: [n, K] decay of the chunk. b: [n, C]. V: [n, C, V]. P, F: [n, C, K].
    """

    x: Tensor
    A: Tensor
    Ab: Tensor
    T: Tensor
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


def decays(log_a: Tensor) -> tuple[Tensor, Tensor]:
    """log_a [c, N, C, HV, K] -> (decay [n, C, K], decay of the whole chunk [n, K]).

    The chunk's decay comes from the summed logarithm: a product of 64 rounded decays near 1 would be off by the same sign
    every chunk, 1e-4 after 4096 tokens at -8e-5.
    """
    log_a = heads_first(log_a, log_a.shape[3]).clone(memory_format=torch.contiguous_format).flatten(0, 3)
    total = decay_from_log(log_a.sum(1))
    return decay_from_log(log_a), total


def factors(seg: Segment, t: Tokens, opts: Settings, q: Tensor, k: Tensor, log_a: Tensor, b: Tensor) -> Factors:
    """From the prologue's results (padding of log_a cleared) and the segment's v rows."""
    HV = log_a.shape[3]
    x = stack(q, k, HV)
    a, total = decays(log_a)
    prod = Products(a, opts.bounded)
    A = scores(x, prod)
    b = heads_first(b, HV).flatten(0, 3)
    Ab = A * b[:, None, None, :]
    V = heads_first(t.v, HV).to(opts.dtype).contiguous().flatten(0, 3)
    return Factors(
        x=x, A=A, Ab=Ab, T=unit_lower_inverse(Ab[:, 1]), Px=x * prod.P.unsqueeze(1), Fk=x[:, 1] * prod.F,
        total=total, b=b, V=V,
    )  # fmt: skip


def walk(f: Factors, S: Tensor, c: int) -> tuple[Tensor, Tensor, Tensor]:
    """The states through the chunks: S [NH, K, V] -> (O [c, NH, C, V], E [c, NH, C, V], states [c + 1, NH, K, V])."""
    O, E, states = _walk(f, S, c, careful=False)
    if not bool(torch.isfinite(O.sum())):
        O, E, states = _walk(f, S, c, careful=True)
    return O, E, states


def _walk(f: Factors, S: Tensor, c: int, careful: bool) -> tuple[Tensor, Tensor, Tensor]:
    """careful: also where a token overflows. A coefficient 0 of a later token times its infinity would be NaN in an earlier
    row; rows before the first bad one then come from a product that leaves the bad ones out."""
    Px, T, Ab = (m.unflatten(0, (c, -1)) for m in (f.Px, f.T, f.Ab))
    Fb = (f.Fk * f.b.unsqueeze(-1)).unflatten(0, (c, -1)).transpose(-1, -2)
    total = f.total.unflatten(0, (c, -1)).unsqueeze(-1)
    V = f.V.unflatten(0, (c, -1))
    states, E = S.new_empty(c + 1, *S.shape), torch.empty_like(V)
    states[0] = S
    for i in range(c):
        rest = torch.baddbmm(V[i], Px[i, :, 1], states[i], alpha=-1)  # what the state does not predict
        if careful:
            E[i] = torch.linalg.solve_triangular(Ab[i, :, 1], rest, upper=False, unitriangular=True)
        else:
            torch.bmm(T[i], rest, out=E[i])
        torch.mul(states[i], total[i], out=states[i + 1])
        states[i + 1].baddbmm_(Fb[i], E[i])
    e = E.flatten(0, 1)
    O = torch.bmm(f.Px[:, 0], states[:-1].flatten(0, 1))
    Ob = _causal_product(f.Ab[:, 0], e, O) if careful else O.baddbmm_(f.Ab[:, 0], e)
    return Ob.view_as(E), E, states


def _causal_product(A: Tensor, e: Tensor, O: Tensor) -> Tensor:
    """O + A e, with bad (not finite) rows of e reaching only rows from the first bad one on."""
    bad = (~torch.isfinite(e).all(-1, keepdim=True)).cumsum(1) > 0
    return torch.where(bad, torch.baddbmm(O, A, e), torch.baddbmm(O, A, torch.where(bad, 0.0, e)))

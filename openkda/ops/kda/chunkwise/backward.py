"""Backward of one segment, by hand; the prologue's (norms, gate) through torch's autograd.

The forward of `forward.py`, read backwards. With D = (dO, -dV) stacked and dS the gradient of the state that leaves:

    dE  = Ab_q^T dO + (F k b) dS        dV = T^T dE        dS <- Diag(total) dS + (P x)^T D
    d(P x) = D S^T        d(F k b) = E dS^T        dAb = D E^T

Every decay is a product over the tokens between two places, so the gradient of one token's log decay is the sum of
(value times gradient) over the products that contain it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.kda.chunkwise.forward import (
    Factors,
    Settings,
    Tokens,
    factors,
    heads_first,
    log_decays,
    prologue,
    rows_first,
)
from openkda.ops.kda.chunkwise.plan import Segment
from openkda.ops.kda.chunkwise.tiles import Sums, scores_backward


def segment_backward(
    seg: Segment, t: Tokens, opts: Settings, E: Tensor, states: Tensor, do: Tensor, dS: Tensor
) -> tuple[list[Tensor | None], Tensor]:
    """Gradients of one segment.

    t: the segment's rows, [c, N, C, ...], padding zero. E, states [c, NH, ..]: from the forward. do: [c, N, C, HV, V].
    dS: [NH, K, V] of the state that leaves.
    Returns the gradients of t in its order (rows; A_log and dt_bias summed) and dS of the state that entered.

    What no gradient reaches may have overflowed, and infinity times a gradient of 0 is NaN. If anything comes out that is not
    finite, it is computed again without those tokens: equal to the bit for all others, and exactly 0 for them.
    """
    results, entering, finite = _segment_backward(seg, t, opts, E, states, do, dS)
    if not finite:
        t, E, states = _without_unread(t, E, states, do, dS)
        results, entering, _ = _segment_backward(seg, t, opts, E, states, do, dS)
    return results, entering


def _without_unread(t: Tokens, E: Tensor, states: Tensor, do: Tensor, dS: Tensor) -> tuple[Tokens, Tensor, Tensor]:
    """t, E and states with zeros for every token, query head by query head, after which all gradients are 0."""
    c, N, C, H, _ = t.q.shape
    group = t.g.shape[3] // H
    read = do.ne(0).any(-1).unflatten(3, (H, group)).any(-1).transpose(1, 0).flatten(1, 2)  # [N, c C, H]
    later = read.flip(1).cumsum(1).flip(1) > 0
    later |= dS.ne(0).view(N, 1, H, -1).any(-1)
    later = later.unflatten(1, (c, C)).transpose(1, 0)  # [c, N, C, H]
    values = later.repeat_interleave(group, 3)
    q, k = (torch.where(later.unsqueeze(-1), x, 0) for x in (t.q, t.k))
    v, g = (torch.where(values.unsqueeze(-1), x, 0) for x in (t.v, t.g))
    rows = Tokens(q, k, v, g, torch.where(values, t.beta, 0), t.A_log, t.dt_bias)
    heads = values.transpose(2, 3).flatten(1, 2)  # [c, NH, C]
    return rows, torch.where(heads.unsqueeze(-1), E, 0), torch.where(heads.any(-1)[..., None, None], states, 0)


def _segment_backward(
    seg: Segment, t: Tokens, opts: Settings, E: Tensor, states: Tensor, do: Tensor, dS: Tensor
) -> tuple[list[Tensor | None], Tensor, bool]:
    """See `segment_backward`; also whether all is finite: a NaN or infinity anywhere also stands in one of these sums."""
    leaves = Tokens(*(None if x is None else x.detach().requires_grad_() for x in t))  # type: ignore[arg-type]
    with torch.enable_grad():
        prepared = prologue(leaves, opts)
    q, k, log_a, b = (x.detach() for x in prepared)
    H, HV = q.shape[3], log_a.shape[3]
    f = factors(t, opts, q, k, seg.clear_padding(log_a), b)
    do = heads_first(do, HV).to(opts.dtype).flatten(0, 3)
    D, dSs = _walk_back(f, do, dS, E.shape[0])
    dx, dlog, db = _chunks_backward(f, Sums(log_decays(log_a)), opts.bounded, E, states, D, dSs)
    upstream = (
        rows_first(dx[:, 0], H, seg.shape),
        rows_first(dx[:, 1], H, seg.shape),
        seg.clear_padding(rows_first(dlog, HV, seg.shape).contiguous()),
        rows_first(db, HV, seg.shape),
    )
    inputs = [x for name, x in leaves._asdict().items() if x is not None and name != "v"]
    given = iter(torch.autograd.grad(prepared, inputs, upstream))
    dv = rows_first(D[:, 1], HV, seg.shape).neg()
    grads = [None if x is None else dv if name == "v" else next(given) for name, x in leaves._asdict().items()]
    sums = [x.sum() for x in (dlog, db, dSs[0], *grads[5:]) if x is not None]
    finite = bool(torch.isfinite(torch.stack(sums)).all())
    return grads, dSs[0], finite


def _walk_back(f: Factors, do: Tensor, dS: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """D [n, 2, C, V] and the gradient of every state [c + 1, NH, K, V], the last one given."""
    n, C, V = do.shape
    D = do.new_empty(c, n // c, 2, C, V)
    D[:, :, 0] = do.view(c, n // c, C, V)
    dE = torch.bmm(f.Ab[:, 0].transpose(1, 2), do).view(c, -1, C, V)
    Fb = (f.Fk * f.b.unsqueeze(-1)).unflatten(0, (c, -1))
    T = f.T.unflatten(0, (c, -1)).transpose(-1, -2)
    Px = f.Px.flatten(1, 2).unflatten(0, (c, -1)).transpose(-1, -2)
    total = f.total.unflatten(0, (c, -1)).unsqueeze(-1)
    dSs = dS.new_empty(c + 1, *dS.shape)
    dSs[c] = dS
    for i in reversed(range(c)):
        dE[i].baddbmm_(Fb[i], dSs[i + 1])
        torch.neg(torch.bmm(T[i], dE[i]), out=D[i, :, 1])
        torch.mul(dSs[i + 1], total[i], out=dSs[i])
        dSs[i].baddbmm_(Px[i], D[i].flatten(1, 2))
    return D.flatten(0, 1), dSs


def _chunks_backward(
    f: Factors, sums: Sums, bounded: bool, E: Tensor, states: Tensor, D: Tensor, dSs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [n, 2, C, K], gradient of the log decay [n, C, K], db [n, C]. sums: fresh, of this segment's log decays."""
    S, e, dS = states.flatten(0, 1), E.flatten(0, 1), dSs[1:].flatten(0, 1)
    n, _, C, K = f.x.shape
    dAb = torch.bmm(D.flatten(1, 2), e.transpose(1, 2)).view(n, 2, C, C)
    db = (f.A * dAb).sum((1, 2))
    dA = dAb.mul_(f.b[:, None, None, :])
    dA[:, 0].tril_(), dA[:, 1].tril_(-1)
    dx, dlog = scores_backward(f.x, sums, bounded, dA)
    dPx = torch.bmm(D.flatten(1, 2), S.transpose(1, 2)).view(n, 2, C, K)
    dFk = torch.bmm(e, dS.transpose(1, 2))
    dx.addcmul_(dPx, f.P.unsqueeze(1))
    weight = f.Fk * dFk  # what each column carries out of the chunk
    db += weight.sum(-1)
    dx[:, 1].addcmul_(dFk.mul_(f.b.unsqueeze(-1)), f.F)
    ones = dlog.new_ones(C, C)
    dlog.baddbmm_(ones.tril(-1).expand(n, C, C), weight.mul_(f.b.unsqueeze(-1)))
    dlog.baddbmm_(ones.triu().expand(n, C, C), (f.Px * dPx).sum(1))  # what each row brought in
    dlog += (f.total * (S * dS).sum(-1)).unsqueeze(1)
    diagonal = dA[:, 0].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # a token reads its own write undecayed
    dx[:, 0].addcmul_(diagonal, f.x[:, 1])
    dx[:, 1].addcmul_(diagonal, f.x[:, 0])
    return dx, dlog, db

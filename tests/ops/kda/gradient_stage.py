"""The backward's last stage by itself: random inputs of its kernel, and its results in float64, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

FORGOTTEN = -57.7 * math.log(2.0)
NAMES = ("dq", "dk", "dz", "ddt", "dA_log")


@dataclass
class Stage:
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    programs: int
    want: tuple[Tensor, ...]

    def errors(self) -> dict[str, float]:
        """Of what a kernel has written, relative to float64."""
        dq, dk, dz, ddt, dA = self.tensors[-5:]
        got = (dq, dk, dz, None if ddt is None else ddt.sum(0), None if dA is None else dA.sum((0, 2)))
        pairs = [(n, g, w) for n, g, w in zip(NAMES, got, self.want, strict=True) if g is not None]
        return {n: ((g.cpu().double() - w).norm() / w.norm()).item() for n, g, w in pairs}


def spans(T: int, B: int, cu: list[int] | None, c: int) -> list[tuple[int, int, int, int]]:
    """(batch, first row, row behind the last, slot) of every chunk of c tokens."""
    if cu is None:
        per = -(-T // c)
        return [(b, i * c, min(T, i * c + c), b * per + i) for b in range(B) for i in range(per)]
    members = list(pairwise(cu))
    return [
        (0, s + i * c, min(e, s + i * c + c), s // c + n + i)
        for n, (s, e) in enumerate(members)
        for i in range(-(-(e - s) // c))
    ]


def make(
    T: int = 150, B: int = 1, H: int = 1, HV: int = 1, K: int = 128, shift: float = 0.0, spread: float = 1.0, gate: int = 2,
    bound: float = -5.0, cu: list[int] | None = None, parameters: bool = True, seed: int = 0,
) -> Stage:  # fmt: skip
    gen = torch.Generator().manual_seed(seed)
    rand: Callable[..., Tensor] = lambda *shape: torch.randn(shape, generator=gen)  # noqa: E731
    bf16, N = torch.bfloat16, B if cu is None else len(cu) - 1
    slots, tiles = (B * -(-T // c) if cu is None else T // c + N for c in (64, 16))
    BK = max(64, 1 << (K - 1).bit_length())
    q, k, z = rand(B, T, H, K).to(bf16), rand(B, T, H, K).to(bf16), (spread * rand(B, T, HV, K) + shift).to(bf16)
    z = -z.abs() if gate == 0 else z
    A_log, dt = (0.3 * rand(HV), 0.3 * rand(HV, K)) if parameters else (None, None)
    d, wide, both = torch.zeros(HV, slots, 2, 64, 64), torch.zeros(HV, slots, 3, 64, BK), rand(HV, slots, BK)
    norm, rows = torch.zeros(HV, tiles, 3, 16), rand(2, B, T, HV)
    unit = torch.tensor([2.0**2, 2.0**-7, 2.0**-8, 2.0**-6]).expand(HV, slots, BK // 64, 4).contiguous()
    for _, s, e, slot in spans(T, B, cu, 64):
        n = e - s
        d[:, slot, 0, :n, :n], d[:, slot, 1, :n, :n] = rand(HV, n, n).tril(), rand(HV, n, n).tril(-1)
        wide[:, slot, :, :n, :K] = 3.0 * rand(HV, 3, n, K)
    d, wide = (0.25 * d).half(), torch.stack([(wide[:, :, i] / unit[0, 0, 0, i + 1]).half() for i in range(3)], 2)
    nq, nk = (x.float().square().sum(-1).add(1e-6).rsqrt().repeat_interleave(HV // H, 2) for x in (q, k))
    for b, s, e, tile in spans(T, B, cu, 16):
        norm[:, tile, 0, : e - s], norm[:, tile, 1, : e - s] = nk[b, s:e].T, nq[b, s:e].T
    out = [torch.full((B, T, HV, K), float("nan"), dtype=t) for t in [bf16 if HV == H else torch.float32] * 2 + [bf16]]
    sums = [torch.full((slots, HV, K), float("nan")) if parameters else None for _ in range(2)]
    offsets = None if cu is None else torch.tensor(cu)
    tensors = (q, k, z, A_log, dt, offsets, d, wide, both, unit, norm, rows, *out, *sums)
    strides = [n for x in (q, k, z) for n in x.stride()[:3]]
    constants = {"HV": HV, "GROUP": HV // H, "K": K, "BK": BK, "GATE": gate, "HAS_A": parameters, "HAS_DT": parameters,
                 "PACKED": cu is not None}  # fmt: skip
    want = [torch.zeros(B, T, HV, K, dtype=torch.float64) for _ in range(3)]
    want += [torch.zeros(HV, K, dtype=torch.float64), torch.zeros(HV, dtype=torch.float64)]
    for b, s, e, slot in spans(T, B, cu, 64):
        for h in range(HV):
            rate, bias = (1.0, 0.0) if A_log is None or dt is None else (A_log[h].double().exp(), dt[h].double())
            units = unit[h, slot, 0].double()
            qh, kh = (x[b, s:e, h // (HV // H)].double() * n[b, s:e, h, None] for x, n in ((q, nq), (k, nk)))
            states = wide[h, slot, :, : e - s, :K].double() * units[1:, None, None]
            scores, through = d[h, slot].double() * units[0], both[h, slot, :K].double()
            dq, dk, dz, dA = _chunk(qh, kh, z[b, s:e, h].double() + bias, rate, bound, gate, scores, states, through)
            want[0][b, s:e, h] = nq[b, s:e, h, None] * (dq - qh * rows[0, b, s:e, h, None])
            want[1][b, s:e, h] = nk[b, s:e, h, None] * (dk - kh * rows[1, b, s:e, h, None])
            want[2][b, s:e, h] = dz
            want[3][h] += dz.sum(0)
            want[4][h] += dA.sum()
    return Stage(tensors, (*strides, B, T, N, slots, tiles, bound), constants, BK // 64 * slots * HV, tuple(want))


def _chunk(
    q: Tensor, k: Tensor, z: Tensor, rate: Any, bound: float, gate: int, d: Tensor, wide: Tensor, both: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq and dk of unit rows, the gradient of the raw gate input and of A_log, each element's."""
    n = q.shape[0]
    softplus, s = torch.nn.functional.softplus(z), torch.sigmoid(rate * z)
    g = (z, -rate * softplus, bound * s)[gate].clamp(min=FORGOTTEN)
    P, M, A = g.cumsum(0), d[0, :n, :n], d[1, :n, :n]
    decay = torch.exp((P[:, None] - P[None, :]).clamp(max=0.0))
    near, far = P.exp(), (P[-1] - P).exp()
    dq = near * wide[0] + torch.einsum("ij,ijc,jc->ic", M, decay, k)
    row = near * wide[1] + torch.einsum("ij,ijc,jc->ic", A, decay, k)
    column = far * wide[2] + torch.einsum("ij,ijc,ic->jc", M, decay, q) + torch.einsum("ij,ijc,ic->jc", A, decay, k)
    dP = q * dq + k * (row - column)
    dg = dP.flip(0).cumsum(0).flip(0) + (k * far * wide[2]).sum(0) + both * P[-1].exp()
    dg = torch.where(g <= FORGOTTEN, 0.0, dg)
    dz = (dg, -dg * rate * torch.sigmoid(z), dg * bound * s * (1.0 - s) * rate)[gate]
    return dq, row + column, dz, (dg * 0.0, dg * g, dz * z)[gate]

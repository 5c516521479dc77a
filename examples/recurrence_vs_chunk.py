"""The same function twice: KDA token by token, as the formula reads, and in chunks of matrix products, as it is computed.

python examples/recurrence_vs_chunk.py
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from openkda import BoundedGate, kda

HEADS, KEY, VALUE = 2, 32, 48


def by_the_formula(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """q, k, log_decay [T, H, K], v [T, H, V], beta [T, H] -> [T, H, V]."""
    state = torch.zeros(HEADS, KEY, VALUE, dtype=q.dtype)
    out = []
    for t in range(q.shape[0]):
        state = log_decay[t].exp()[:, :, None] * state  # forget, every key channel at its own rate
        predicted = torch.einsum("hkv,hk->hv", state, k[t])
        error = v[t] - predicted  # the delta rule writes only what is new
        state = state + beta[t][:, None, None] * k[t][:, :, None] * error[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * KEY**-0.5)
    return torch.stack(out)


def main() -> None:
    rng = torch.Generator().manual_seed(0)
    gate = BoundedGate(-5.0)  # log decay = -5 * sigmoid(raw): Kimi K3's gate
    kda(
        *torch.zeros(4, 1, 1, 1, 1), torch.zeros(1, 1, 1), gate=gate
    )  # the first call of a process imports what it runs

    print(f"{'tokens':>8}  {'loop':>9}  {'chunks':>9}  {'largest difference':>18}")
    for T in (64, 256, 1024, 4096):
        q, k = (torch.randn(1, T, HEADS, KEY, generator=rng) for _ in range(2))
        k = torch.nn.functional.normalize(k, dim=-1)  # keys of length one keep the recurrence stable
        v = torch.randn(1, T, HEADS, VALUE, generator=rng)
        raw = torch.randn(1, T, HEADS, KEY, generator=rng) - 3
        beta = torch.rand(1, T, HEADS, generator=rng)

        start = time.perf_counter()
        loop = by_the_formula(q[0], k[0], v[0], gate(raw)[0], beta[0])
        middle = time.perf_counter()
        chunks = kda(q, k, v, raw, beta, gate=gate).output[0]
        end = time.perf_counter()

        difference = float((loop - chunks).abs().max())
        print(f"{T:8}  {middle - start:8.4f}s  {end - middle:8.4f}s  {difference:18.1e}")
        if difference > 1e-4:
            raise SystemExit("the two forms disagree")
    print("\nThe loop does T small steps; the chunks do the same arithmetic in T / 64 large ones.")


if __name__ == "__main__":
    main()

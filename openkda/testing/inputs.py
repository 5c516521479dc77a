"""Random inputs of the KDA op, drawn in one fixed order from one CPU generator so that every test sees the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.ops.kda.gate import BoundedGate, Gate, SoftplusGate


@dataclass
class KDAInputs:
    """Arguments of `openkda.kda` and the upstream gradients (do of the output, dS of the final state)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    gate: Gate | None
    initial_state: Tensor | None
    do: Tensor
    dS: Tensor
    options: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """Every differentiable input by name, the gate's parameters included."""
        named: dict[str, Tensor | None] = {n: getattr(self, n) for n in ("q", "k", "v", "g", "beta", "initial_state")}
        if self.gate is not None:
            named |= {"A_log": self.gate.A_log, "dt_bias": self.gate.dt_bias}
        return {n: t for n, t in named.items() if t is not None}

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `openkda.kda` beside q, k, v, g, beta."""
        return {
            "gate": self.gate,
            "initial_state": self.initial_state,
            "output_final_state": True,
            **self.options,
        }

    def to(self, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None) -> KDAInputs:
        """Token tensors in `dtype`; states, gate parameters and dS in float32 (float64 for float64). Fresh leaves."""
        wide = None if dtype is None else torch.promote_types(dtype, torch.float32)

        def cast(t: Tensor | None, kind: torch.dtype | None) -> Tensor | None:
            return None if t is None else t.detach().to(device=device, dtype=kind or t.dtype, copy=True)

        gate = self.gate
        if gate is not None:
            gate = replace(gate, A_log=cast(gate.A_log, wide), dt_bias=cast(gate.dt_bias, wide))  # type: ignore[arg-type]
        tokens = {n: cast(getattr(self, n), dtype) for n in ("q", "k", "v", "g", "beta", "do")}
        options = {n: o.to(device) if isinstance(o, Tensor) and device else o for n, o in self.options.items()}
        return KDAInputs(
            **tokens,  # type: ignore[arg-type]
            gate=gate,
            initial_state=cast(self.initial_state, wide),
            dS=cast(self.dS, wide),  # type: ignore[arg-type]
            options=options,
        )

    def requires_grad_(self) -> KDAInputs:
        for t in self.tensors().values():
            t.requires_grad_(True)
        return self


def make_gate(kind: str | None, HV: int, K: int, gen: torch.Generator) -> Gate | None:
    """Gate parameters as published: A_log = log U(1, 16) for softplus and 0 for bounded; dt_bias = inverse softplus of
    a log-uniform draw in [1e-3, 1e-1]. kind: "softplus", "bounded", or None for a given log decay."""
    dt = torch.exp(torch.rand(HV, K, generator=gen) * math.log(100.0) + math.log(1e-3))
    dt_bias = dt + torch.log(-torch.expm1(-dt))
    A_log = torch.empty(HV).uniform_(1.0, 16.0, generator=gen).log()
    if kind is None:
        return None
    if kind == "softplus":
        return SoftplusGate(A_log, dt_bias)
    if kind == "bounded":
        return BoundedGate(-5.0, torch.zeros(HV), dt_bias)
    raise ValueError(f"gate kind: expected 'softplus', 'bounded' or None, received {kind!r}")


DECAYS = ("random", "zero", "slow", "unit", "fast", "hard", "saturated")


def _decay(kind: str, z: Tensor, gate: str | None, gen: torch.Generator) -> Tensor:
    """Raw gate input (with a gate) or log decay (without) of the named regime."""
    if kind == "random":
        return z if gate else -F.softplus(z)
    if gate is not None:  # shift the raw input: the same regimes, seen through the gate's own nonlinearity
        return z + {"zero": -30.0, "slow": -9.0, "unit": 0.0, "fast": 6.0, "hard": 0.0, "saturated": 60.0}[kind]
    if kind == "hard":
        return torch.where(torch.rand(z.shape, generator=gen) < 0.05, -1000.0, -0.01)
    noise = 0.75 + 0.5 * torch.rand(z.shape, generator=gen)
    return -noise * {"zero": 0.0, "slow": 1e-4, "unit": 1.0, "fast": 64.0, "saturated": 5.0}[kind]


def make_inputs(
    seed: int = 0,
    *,
    B: int = 1,
    T: int = 64,
    H: int = 1,
    HV: int | None = None,
    K: int = 32,
    V: int | None = None,
    gate: str | None = "bounded",
    decay: str = "random",
    lengths: tuple[int, ...] | None = None,
    initial_state: bool = True,
    near_equal_keys: bool = False,
    unit_keys: bool = True,
    **options: Any,
) -> KDAInputs:
    """Float32 inputs on the CPU. lengths packs sequences along T (then B = 1 and T = sum). near_equal_keys makes all keys
    of a head nearly one direction and beta about 1, the triangular system's worst case. options go to `openkda.kda`."""
    gen = torch.Generator().manual_seed(seed)
    HV, V = HV or H, V or K
    if lengths is not None:
        B, T = 1, sum(lengths)
        options["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    N = B if lengths is None else len(lengths)
    q, k = (torch.randn(B, T, H, K, generator=gen) for _ in "qk")
    if near_equal_keys:
        k = torch.randn(1, 1, H, K, generator=gen) + 0.01 * k
    if unit_keys:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    v = 0.5 * torch.randn(B, T, HV, V, generator=gen)
    z = torch.randn(B, T, HV, K, generator=gen)
    logits = torch.randn(B, T, HV, generator=gen) + (6.0 if near_equal_keys else 0.0)
    gate_object = make_gate(gate, HV, K, gen)
    S0 = 0.1 * torch.randn(N, HV, K, V, generator=gen)
    do = torch.randn(B, T, HV, V, generator=gen)
    dS = 0.1 * torch.randn(N, HV, K, V, generator=gen)
    beta = logits if options.get("use_beta_sigmoid") else torch.sigmoid(logits)
    g = _decay(decay, z, gate, gen)
    return KDAInputs(q, k, v, g, beta, gate_object, S0 if initial_state else None, do, dS, options)

"""Inputs and clocks of `benchmarks/kda.py`: prefill and decoding, ours and the peers' calls on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from openkda import kda
from openkda.ops.kda.api import BoundedGate, Gate, SoftplusGate
from openkda.ops.kda_block.api import BlockState, BlockWeights, kda_block

D, BF16 = 128, torch.bfloat16


def median(f: Callable[[], Any], rep: int = 60) -> float:
    """Milliseconds."""
    return float(triton.testing.do_bench(f, warmup=20, rep=rep, return_mode="median"))


def graph_median(f: Callable[[], Any], calls: int = 1) -> float:
    """Milliseconds a call, replayed from a CUDA graph of `calls` calls."""
    f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return median(graph.replay) / calls


def attempt(f: Callable[[], float]) -> float | str:
    """A peer that cannot run says why in the table."""
    try:
        return f()
    except Exception as e:
        torch.cuda.synchronize()
        return f"{type(e).__name__}: {str(e).splitlines()[0][:60] if str(e) else ''}"


def bandwidth() -> float:
    x = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / median(lambda: y.copy_(x)) * 1e3


class Prefill:
    """Inputs of one row: H heads, the given sequence lengths, raw gates N(0, 1) + shift."""

    def __init__(self, H: int, lengths: tuple[int, ...], gate: str, shift: float) -> None:
        gen = torch.Generator("cuda").manual_seed(0)
        T, N = sum(lengths), len(lengths)

        def draw(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
            return torch.randn(shape, generator=gen, device="cuda").to(dtype)

        self.q, self.k, self.v = (draw(1, T, H, D) for _ in range(3))
        self.g = (torch.randn(1, T, H, D, generator=gen, device="cuda") + shift).to(BF16)
        self.beta = draw(1, T, H)
        self.A_log, self.dt_bias = torch.zeros(H, device="cuda"), 0.1 * draw(H, D, dtype=torch.float32)
        self.bound = -5.0 if gate == "bounded" else None
        self.state: torch.Tensor | None = 0.1 * draw(N, H, D, D, dtype=torch.float32)
        self.cu = torch.tensor([0, *lengths], device="cuda").cumsum(0) if N > 1 else None
        self.bytes = 5 * self.q.numel() * 2 + self.beta.numel() * 2 + 2 * self.state.numel() * 4

    @property
    def gate(self) -> Gate:
        if self.bound is None:
            return SoftplusGate(self.A_log, self.dt_bias)
        return BoundedGate(self.bound, self.A_log, self.dt_bias)

    def ours(self, impl: str | None, recompute: bool | None = None) -> Any:
        return kda(
            self.q, self.k, self.v, self.g, self.beta, gate=self.gate, initial_state=self.state, output_final_state=True,
            cu_seqlens=self.cu, use_qk_l2norm=True, use_beta_sigmoid=True, impl=impl, recompute=recompute,
        )  # fmt: skip

    def fla(self) -> Any:
        from fla.ops.kda import chunk_kda

        return chunk_kda(
            self.q, self.k, self.v, self.g, self.beta, initial_state=self.state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            safe_gate=self.bound is not None, lower_bound=self.bound, cu_seqlens=self.cu,
            A_log=self.A_log, dt_bias=self.dt_bias.flatten(),
        )  # fmt: skip

    def cudnn(self) -> Callable[[], Any]:
        from cudnn.linear_attention.ops import kimi_delta_attention

        if self.bound is None:
            raise NotImplementedError("the softplus gate")
        T = self.q.shape[1]
        cu = torch.tensor([0, T], device="cuda") if self.cu is None else self.cu
        g, first = self.g[0].float(), self.state.transpose(-1, -2).contiguous()
        q, k, v, beta, cu = self.q[0], self.k[0], self.v[0], self.beta[0], cu.int()
        return lambda: kimi_delta_attention(
            q, k, v, g, beta, cu, initial_state=first, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, safe_gate=True, gate_lower_bound=self.bound, a_log=self.A_log,
            dt_bias=self.dt_bias, plan_name="kda_hopper_cuda",
        )  # fmt: skip


class Decode:
    """One token for B sequences, over `sets` sets of states in turn: 6 MB a sequence, always more than the cache holds."""

    def __init__(self, H: int, B: int) -> None:
        self.sets = sets = max(1, 192 // B)
        gen = torch.Generator("cuda").manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
            return torch.randn(shape, generator=gen, device="cuda").to(dtype)

        f32 = torch.float32
        self.state = BlockState(draw(B * sets, H, D, D, dtype=f32), *(draw(B * sets, H * D, 3) for _ in range(3)))
        self.weights = BlockWeights(*(draw(H * D, 4, dtype=f32) for _ in range(3)), draw(D, dtype=f32), 1e-5)
        self.tokens = (*(draw(B, 1, H * D) for _ in range(3)), draw(B, 1, H, D), draw(B, 1, H), draw(B, 1, H, D))
        self.gate = BoundedGate(-5.0, torch.zeros(H, device="cuda"), torch.zeros(H, D, device="cuda"))
        self.slots = [torch.arange(i * B, (i + 1) * B, dtype=torch.int32, device="cuda") for i in range(sets)]
        self.heads = [t.view(B, 1, H, D) for t in self.tokens[:3]]
        self.states = self.state.recurrent.view(sets, B, H, D, D)

    def ours_once(self, i: int = 0) -> None:
        kda_block(*self.tokens, weights=self.weights, state=self.state, gate=self.gate, slots=self.slots[i])

    def fla_once(self, i: int = 0) -> None:
        from fla.ops.kda import fused_recurrent_kda

        fused_recurrent_kda(
            *self.heads, self.tokens[3], self.tokens[4], self.gate.A_log, self.gate.dt_bias, initial_state=self.states[i],
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
        )  # fmt: skip

    def in_a_graph(self, once: Callable[[int], None]) -> float:
        """Microseconds a call."""
        return graph_median(lambda: [once(i) for i in range(self.sets)], self.sets) * 1e3

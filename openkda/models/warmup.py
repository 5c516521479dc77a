"""Compiling a model's GPU kernels before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from openkda.layers.kda import KimiDeltaAttention
from openkda.layers.mla import GatedMLA
from openkda.layers.mlp import glu
from openkda.layers.moe import SparseMoE
from openkda.layers.norm import RMSNorm
from openkda.layers.state import KDAState
from openkda.models.config import ModelConfig
from openkda.ops.attn_res.api import attn_res_bank, attn_res_merge, attn_res_mix
from openkda.ops.kda_block.api import BlockState, BlockWeights, kda_block, kda_block_commit

TOKENS = 24  # more than one chunk; no kernel is specialised on a length


def warmup(
    config: ModelConfig, *, device: str | torch.device = "cuda", dtype: torch.dtype = torch.bfloat16
) -> list[tuple[str, float]]:
    """Compile every kernel that a model of `config` can ask for in `dtype` at inference: prefill, continued, packed, decoding,
    also in a pool, drafted tokens; decoding steps of latent attention, experts for few and many tokens, Attention Residuals.

    Runs one layer of each kind with the config's heads and experts and a hidden size of 64, so it costs little memory.
    Compiled kernels land in Triton's cache folder (TRITON_CACHE_DIR) and serve later processes too.
    Returns: (step, seconds) in order. Raises: ValueError without a CUDA device.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError("warmup: expected a CUDA device, found none (a CPU compiles nothing)")
    small = replace(config, hidden_size=64)
    layer = KimiDeltaAttention(small, 0).to(device=device, dtype=dtype).eval()
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps).to(device=device, dtype=dtype)
    x = torch.randn(1, TOKENS, 64, device=device, dtype=dtype)
    cu = torch.tensor([0, 5, TOKENS], device=device)
    states: dict[str, KDAState] = {}

    def prefill(name: str, state: str | None, packed: bool, keep: bool) -> None:
        old = None if state is None else states[state]
        _, new = layer(x, state=old, cu_seqlens=cu if packed else None, return_state=keep)
        if new is not None:
            states[name] = new

    steps: list[tuple[str, Callable[[], object]]] = [
        ("prefill", lambda: prefill("one", None, False, True)),
        ("prefill without a state out", lambda: prefill("", None, False, False)),
        ("continued prefill", lambda: prefill("", "one", False, True)),
        ("packed prefill", lambda: prefill("two", None, True, True)),
        ("continued packed prefill", lambda: prefill("", "two", True, True)),
        ("decoding", lambda: layer(x[:, :1], state=states["one"], return_state=True)),
        ("decoding in a pool", lambda: _in_a_pool(layer, states["one"], 1)),
        ("several tokens in a pool", lambda: _in_a_pool(layer, states["one"], 2)),
        ("drafted tokens in a pool", lambda: _in_a_pool(layer, states["one"], 2, keep="all")),
        ("norms", lambda: norm(torch.randn(1, TOKENS, config.hidden_size, device=device, dtype=dtype))),
    ]
    steps += _of_other_layers(config, small, device, dtype)
    taken = []
    with torch.inference_mode():
        for name, step in steps:
            start = time.perf_counter()
            step()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()
            taken.append((name, time.perf_counter() - start))
    return taken


def _of_other_layers(
    config: ModelConfig, small: ModelConfig, device: str | torch.device, dtype: torch.dtype
) -> list[tuple[str, Callable[[], object]]]:
    """Latent attention, experts and Attention Residuals, where the config has them."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    activation = glu(config.hidden_act, config.activation_situ_beta, config.activation_situ_linear_beta)
    steps: list[tuple[str, Callable[[], object]]] = [("activation", lambda: activation(random(8, 64), random(8, 64)))]
    if config.full_attn_layers:
        attention = GatedMLA(small, 0).to(device=device, dtype=dtype).eval()

        def decode() -> None:
            _, state = attention(random(1, TOKENS, 64), return_state=True)
            attention(random(1, 1, 64), state=state, return_state=True)

        steps.append(("decoding of latent attention", decode))
    if config.num_experts is not None:
        E, k = config.num_experts, config.num_experts_per_token
        width = None if config.routed_expert_hidden_size is None else 64
        experts = (
            SparseMoE(replace(small, moe_intermediate_size=64, routed_expert_hidden_size=width))
            .to(device=device, dtype=dtype)
            .eval()
        )
        for tokens in (1, 4, max(5, 16 * E // k), max(6, 66 * E // k)):  # few rows an expert, and more
            steps.append((f"experts, {tokens} tokens", partial(experts, random(tokens, 64))))
        if config.routed_expert_hidden_size is not None:
            norm = RMSNorm(config.routed_expert_hidden_size, config.rms_norm_eps).to(device=device, dtype=dtype)
            steps.append(("norm of experts", partial(norm, random(TOKENS, config.routed_expert_hidden_size))))
    if config.attn_res_block_size is not None:
        most = -(-config.num_hidden_layers // config.attn_res_block_size) + 1
        rows = [random(1, TOKENS, config.hidden_size) for _ in range(most)]
        queries = torch.zeros(2, config.hidden_size, device=device)

        def mix(n: int) -> None:
            attn_res_mix(rows[:n], queries[0], config.rms_norm_eps)
            first = [row[:, :1] for row in rows[:n]]
            parts = attn_res_bank(first, queries, config.rms_norm_eps)
            for i in (0, 1):  # of one token the second query's numbers are not aligned
                attn_res_merge(parts, i, first[0], queries[i], config.rms_norm_eps)

        for n in range(1, most + 1):
            steps.append((f"Attention Residuals, {n} sources", partial(mix, n)))
    return steps


def _in_a_pool(layer: KimiDeltaAttention, state: KDAState, tokens: int, keep: str = "last") -> None:
    """A server's step: the state in slot 0 of a pool."""
    old = BlockState(state.recurrent.clone(), state.conv_q.clone(), state.conv_k.clone(), state.conv_v.clone())
    HV, K, V = state.recurrent.shape[1:]
    slots = torch.zeros(1, dtype=torch.int32, device=old.recurrent.device)
    q, k, v = (t.new_zeros(1, tokens, t.shape[1]) for t in (old.conv_q, old.conv_k, old.conv_v))
    g, beta, gate = q.new_zeros(1, tokens, HV, K), q.new_zeros(1, tokens, HV), q.new_zeros(1, tokens, HV, V)
    wq, wk, wv = (c.weight[:, 0] for c in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d))
    weights = BlockWeights(wq, wk, wv, layer.o_norm.weight, layer.o_norm.eps)
    _, _, every = kda_block(
        q, k, v, g, beta, gate, weights=weights, state=old, gate=layer.gate(), slots=slots, keep=keep
    )
    if every is not None:
        kda_block_commit(every, q, k, v, torch.ones_like(slots), state=old, slots=slots)

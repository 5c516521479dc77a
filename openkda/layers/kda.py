"""The Kimi Delta Attention layer: projections, short convolutions, gates, the op, gated norm.

    q, k = silu(conv(W_q x)), silu(conv(W_k x))     l2-normalised per head       v = silu(conv(W_v x))
    log a = gate(W_f2 W_f1 x)                       per key channel; W_f1 is a bottleneck of kda_head_dim
    b     = sigmoid(W_b x)                          per head
    o     = KDA(q, k, v, log a, b)                  openkda/ops/kda/api.py
    y     = W_o [RMSNorm(o) * sigmoid(W_g x)]       W_g one matrix (Kimi K3) or two (Kimi Linear)

Source: Kimi Linear report (arXiv 2510.26692), section 3; Kimi K3 report, section 2.1. Parameter names are those of the
published checkpoints.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from openkda.layers.config import KDAConfig, require
from openkda.layers.norm import GatedRMSNorm
from openkda.layers.parameters import Float32Parameters, fill, fill_constant, fill_uniform, init_weights
from openkda.layers.sequence import SequenceLayer
from openkda.layers.short_conv import ShortConvolution
from openkda.layers.state import KDAState
from openkda.ops.device.api import is_watched
from openkda.ops.kda.api import kda, kda_step
from openkda.ops.kda.gate import BoundedGate, Gate, SoftplusGate
from openkda.ops.kda_block.api import BlockState, BlockWeights, kda_block
from openkda.ops.short_conv.api import short_conv_step, short_convs

DT_RANGE = (1e-3, 1e-1)  # dt_bias starts as the inverse softplus of a log-uniform draw from here
A_RANGE = (1.0, 16.0)  # exp(A_log) of the softplus gate starts uniform here; A_log of the bounded gate starts at 0


class KimiDeltaAttention(SequenceLayer, Float32Parameters):
    """KDA on [B, T, hidden_size]. A_log, dt_bias, the convolutions and o_norm stay float32 under every cast.

        layer = KimiDeltaAttention(config, layer_idx=0)
        y, _ = layer(x)                                                # training
        y, state = layer(prompt, return_state=True)                    # prefill, then any number of:
        y, state = layer(token, state=state, return_state=True)        # [N, 1, hidden_size]

    config: `openkda.ModelConfig`, or any object with the attributes of `openkda.layers.config.KDAConfig`. layer_idx: for
    messages. impl: which implementation of the op runs (see `openkda.kda`); None chooses. `forward` is that of
    `SequenceLayer`, with batches, packs (`cu_seqlens`), left padding and states.
    Source: Kimi Linear report (arXiv 2510.26692), section 3; Kimi K3 report, section 2.1.
    """

    state_type = KDAState

    def __init__(self, config: KDAConfig, layer_idx: int, *, impl: str | None = None) -> None:
        super().__init__()
        require(config, KDAConfig)
        self.layer_idx, self.impl, self.lower_bound = layer_idx, impl, config.gate_lower_bound
        self.heads, self.key_dim = config.kda_num_heads, config.kda_head_dim
        self.v_heads, self.v_dim = config.kda_v_heads, config.kda_v_dim
        hidden, width = config.hidden_size, config.short_conv_kernel_size
        self.hidden_size = hidden
        keys, values, decays = self.heads * self.key_dim, self.v_heads * self.v_dim, self.v_heads * self.key_dim

        self.q_proj = nn.Linear(hidden, keys, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.q_conv1d = ShortConvolution(keys, width)
        self.k_conv1d = ShortConvolution(keys, width)
        self.v_conv1d = ShortConvolution(values, width)
        self.f_a_proj = nn.Linear(hidden, self.key_dim, bias=False)
        self.f_b_proj = nn.Linear(self.key_dim, decays, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(decays, dtype=torch.float32))
        self.b_proj = nn.Linear(hidden, self.v_heads, bias=False)
        self.full_rank_gate, self.gate_bias = config.use_full_rank_gate, config.output_gate_bias
        if self.full_rank_gate:
            self.g_proj = nn.Linear(hidden, values, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden, self.key_dim, bias=False)
            self.g_b_proj = nn.Linear(self.key_dim, values, bias=config.output_gate_bias)
        self.o_norm = GatedRMSNorm(self.v_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(values, hidden, bias=False)
        init_weights(self, config.initializer_range)

    def init_parameters(self, generator: torch.Generator | None) -> None:
        """A_log and dt_bias as published."""
        if self.lower_bound is None:
            fill(self.A_log, lambda t: t.uniform_(*A_RANGE, generator=generator).log_(), generator)
        else:
            fill_constant(self.A_log, 0.0)
        fill_uniform(self.dt_bias, math.log(DT_RANGE[0]), math.log(DT_RANGE[1]), generator)
        with torch.no_grad():
            dt = self.dt_bias.exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt

    def gate(self) -> Gate:
        """The decay gate with this layer's parameters."""
        if self.lower_bound is None:
            return SoftplusGate(self.A_log, self.dt_bias)
        return BoundedGate(self.lower_bound, self.A_log, self.dt_bias)

    def _inference(self) -> bool:
        """Whether nothing could be trained through this call: only then may a path without gradients run."""
        return not self.training and not torch.is_grad_enabled()

    def _sequences(
        self, x: Tensor, state: KDAState | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, KDAState | None]:
        if state is not None and cu_seqlens is None and x.shape[1] == 1 and self._inference():
            y, new = self._step(x, state)
            return y, new if return_state else None
        if state is not None and state.slots is not None:
            raise ValueError(
                f"state.slots: expected None but for single tokens without gradients, received T = {x.shape[1]}"
            )
        (q, k, v), tails = short_convs(  # one launch for all three
            (self.q_proj(x), self.k_proj(x), self.v_proj(x)),
            [conv.weight[:, 0] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)],
            initial_states=None if state is None else (state.conv_q, state.conv_k, state.conv_v),
            output_final_state=return_state,
            cu_seqlens=cu_seqlens,
        )
        o, recurrent, _ = kda(
            self._split(q, self.key_dim),
            self._split(k, self.key_dim),
            self._split(v, self.v_dim),
            self._split(self.f_b_proj(self.f_a_proj(x)), self.key_dim),
            self.b_proj(x),
            gate=self.gate(),
            initial_state=None if state is None else state.recurrent,
            output_final_state=return_state,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm=True,
            use_beta_sigmoid=True,
            impl=self.impl,
        )
        y = self._output(o, x)
        if not return_state:
            return y, None
        assert recurrent is not None and tails is not None  # for the type checker
        return y, KDAState(recurrent, *tails)

    def _step(self, x: Tensor, state: KDAState) -> tuple[Tensor, KDAState]:
        """One token for every sequence: x [N, 1, hidden_size]."""
        # A DTensor has rules for the ops, not for what is written out.
        plain = x.is_cuda or (type(x) is Tensor and not is_watched())
        if state.slots is not None or (self.impl is None and plain):
            return self._fused_step(x, state)
        x = x[:, 0]
        # One convolution of all channels: three would cost three times the calls (0.3 ms a layer on a CPU).
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        mixed, tails = short_conv_step(
            torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], 1),
            torch.cat([conv.weight[:, 0] for conv in convs]),
            torch.cat([state.conv_q, state.conv_k, state.conv_v], 1),
        )
        channels = [conv.weight.shape[0] for conv in convs]
        q, k, v = mixed.split(channels, 1)
        o, recurrent = kda_step(
            self._split(q, self.key_dim),
            self._split(k, self.key_dim),
            self._split(v, self.v_dim),
            self._split(self.f_b_proj(self.f_a_proj(x)), self.key_dim),
            self.b_proj(x),
            state.recurrent,
            gate=self.gate(),
            use_qk_l2norm=True,
            use_beta_sigmoid=True,
            impl=self.impl,
        )
        return self._output(o, x).unsqueeze(1), KDAState(recurrent, *tails.split(channels, 1))

    def _fused_step(self, x: Tensor, state: KDAState) -> tuple[Tensor, KDAState]:
        """The same step as one op between the projections: one launch on a GPU, few calls on a CPU."""
        rows = x if x.is_cuda else x[:, 0]  # a linear layer turns three axes into two and back: on a CPU 2 us each
        tokens = (
            self.q_proj(rows),
            self.k_proj(rows),
            self.v_proj(rows),
            self._split(self.f_b_proj(self.f_a_proj(rows)), self.key_dim),
            self.b_proj(rows),
            self._output_gate(rows),
        )
        weights = BlockWeights(
            self.q_conv1d.weight[:, 0],
            self.k_conv1d.weight[:, 0],
            self.v_conv1d.weight[:, 0],
            self.o_norm.weight,
            self.o_norm.eps,
        )
        y, new, _ = kda_block(
            *(tokens if x.is_cuda else [t.unsqueeze(1) for t in tokens]),
            weights=weights,
            state=BlockState(state.recurrent, state.conv_q, state.conv_k, state.conv_v),
            gate=self.gate(),
            slots=state.slots,
        )
        assert new is not None  # for the type checker: only keep="all" returns none
        out = self.o_proj(y.flatten(-2) if x.is_cuda else y.flatten(1))
        after = KDAState(*new.tensors()) if state.slots is None else state
        return out if x.is_cuda else out.unsqueeze(1), after

    def _output_gate(self, x: Tensor) -> Tensor:
        return self._split(self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x)), self.v_dim)

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.o_norm(o, self._output_gate(x)).flatten(-2))

    @staticmethod
    def _split(x: Tensor, head_dim: int) -> Tensor:
        return x.unflatten(-1, (-1, head_dim))

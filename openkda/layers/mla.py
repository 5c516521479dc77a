"""The Gated MLA layer: softmax attention over a latent of 512 + 64 values a token, no position encoding, gated output.

    q     = W_qb RMSNorm(W_qa x)   or   W_q x         [H, nope + shared]
    c | p = W_kva x                                   the cache keeps RMSNorm(c) | p
    o     = MLA(q, RMSNorm(c) | p)                    openkda/ops/mla/api.py
    y     = W_o [o * sigmoid(W_g x)]   or   W_o o

Source: Kimi K3 report, section 2.1.2; Kimi Linear report (arXiv 2510.26692). Parameter names are those of the
published checkpoints ("rope" dims included: they are not rotated).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openkda.layers import latent_cache
from openkda.layers.config import MLAConfig, require
from openkda.layers.norm import RMSNorm
from openkda.layers.parameters import init_weights
from openkda.layers.sequence import SequenceLayer
from openkda.layers.state import MLAState
from openkda.ops.mla.api import mla
from openkda.ops.mla.max_logits import max_logits
from openkda.ops.moe.activation import SigmoidGLU

OUTPUT_GATE = SigmoidGLU()


class GatedMLA(SequenceLayer):
    """Gated MLA on [B, T, hidden_size]: softmax attention over a latent of kv_lora_rank + qk_rope_head_dim values a token.

    config: `openkda.ModelConfig`, or any object with the attributes of `openkda.layers.config.MLAConfig`. impl: form of the
    attention (see `openkda.ops.mla.mla`); None takes the cheaper one. `forward` is that of `SequenceLayer`, used as
    `KimiDeltaAttention` is. watch_logits: in training, keep each head's largest score in `largest_logits` (`QKClip` sets it).
    Source: Kimi K3 report, section 2.1.2; Kimi Linear report (arXiv 2510.26692).
    """

    state_type = MLAState

    def __init__(self, config: MLAConfig, layer_idx: int, *, impl: str | None = None) -> None:
        super().__init__()
        require(config, MLAConfig)
        self.layer_idx, self.impl = layer_idx, impl
        self.fp32_output = config.mla_fp32_output
        self.watch_logits = False
        self.largest_logits: Tensor | None = None  # [H]
        self.heads, self.kv_lora_rank = config.num_attention_heads, config.kv_lora_rank
        hidden, shared, eps = config.hidden_size, config.qk_rope_head_dim, config.mla_norm_eps
        self.hidden_size = hidden
        self.q_dim, self.v_dim = config.qk_nope_head_dim + shared, config.v_head_dim
        queries, values = self.heads * self.q_dim, self.heads * self.v_dim

        self.low_rank_q = config.q_lora_rank is not None
        if config.q_lora_rank is not None:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, queries, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_lora_rank + shared, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, self.heads * config.qk_nope_head_dim + values, bias=False)
        self.gated = config.mla_use_output_gate
        if self.gated:
            self.g_proj = nn.Linear(hidden, values, bias=False)
        self.o_proj = nn.Linear(values, hidden, bias=False)
        init_weights(self, config.initializer_range)

    def _sequences(
        self, x: Tensor, state: MLAState | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, MLAState | None]:
        rows = x[:, 0] if x.shape[1] == 1 and x.is_cpu else x  # a linear layer would do it each time, and back
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(rows))) if self.low_rank_q else self.q_proj(rows)
        c_p = self.kv_a_proj_with_mqa(rows)
        if rows is not x:
            q, c_p = q.unsqueeze(1), c_p.unsqueeze(1)
        q = q.unflatten(-1, (self.heads, -1))
        c, p = c_p.split([self.kv_lora_rank, c_p.shape[-1] - self.kv_lora_rank], dim=-1)
        latent = torch.cat([self.kv_a_layernorm(c), p], dim=-1)
        if self.watch_logits and self.training and state is None:
            seen = max_logits(q, latent, self.kv_b_proj.weight, cu_seqlens=cu_seqlens)
            self.largest_logits = seen if self.largest_logits is None else torch.maximum(self.largest_logits, seen)
        if state is None:
            keys, lengths = latent, None
            new = latent_cache.start(latent, cu_seqlens) if return_state else None
        else:
            new = latent_cache.append(state, latent, cu_seqlens, keep=return_state)
            keys, lengths = new.latent[:, : new.longest], new.length
        o = mla(
            q,
            keys,
            self.kv_b_proj.weight,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
            fp32_output=self.fp32_output and self.training,
            impl=self.impl,
        )
        return self._output(o.flatten(-2), x), new if return_state else None

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        """Gate in float32 (so neither o nor the sigmoid is rounded before their product), one cast."""
        if self.gated:
            o = OUTPUT_GATE(self.g_proj(x), o)
        return self.o_proj(o.to(x.dtype))

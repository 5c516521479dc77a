"""The hybrid language model: Kimi Delta Attention layers with a Gated MLA layer after every few of them.

    x = embedding(ids)
    for each layer:   x = x + attention(RMSNorm(x));   x = x + mlp(RMSNorm(x))
    logits = head(RMSNorm(x))

With Attention Residuals every sublayer reads a mix of earlier sums in place of x (openkda/layers/attn_res.py).
Which layer is which, and every other feature, stands in `ModelConfig`. Module names mirror the published checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from openkda.layers.attn_res import TWO_PHASE_TOKENS, PseudoQuery, ResidualBank, residual_query
from openkda.layers.kda import KimiDeltaAttention
from openkda.layers.mla import GatedMLA
from openkda.layers.mlp import MLP, glu
from openkda.layers.moe import SparseMoE
from openkda.layers.norm import RMSNorm
from openkda.layers.packing import pack, padding_of, unpack
from openkda.layers.parameters import init_weights
from openkda.layers.state import LayerState, ModelState
from openkda.models.config import ModelConfig
from openkda.ops.head_loss.api import head_loss
from openkda.ops.packing.api import check_cu_seqlens


@dataclass
class LMOutput:
    """logits [B, T, vocab], or of each sequence's last token only, or empty with `targets`; state: one entry a layer, or None
    unless asked for; loss: with `targets`, the cross-entropy summed over them, in nats."""

    logits: Tensor
    state: ModelState | None = None
    loss: Tensor | None = None


def build_attention(config: ModelConfig, layer_idx: int) -> nn.Module:
    """The attention sublayer of the 0-based layer."""
    return (KimiDeltaAttention if config.is_kda(layer_idx) else GatedMLA)(config, layer_idx)


def build_mlp(config: ModelConfig, layer_idx: int) -> nn.Module:
    """The feed-forward sublayer of the 0-based layer."""
    if config.is_moe(layer_idx):
        return SparseMoE(config)
    activation = glu(config.hidden_act, config.activation_situ_beta, config.activation_situ_linear_beta)
    return MLP(config.hidden_size, config.intermediate_size, activation)


class DecoderLayer(nn.Module):
    """One attention and one feed-forward sublayer, each behind its norm."""

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, eps, block = config.hidden_size, config.rms_norm_eps, config.attn_res_block_size
        self.layer_idx = layer_idx
        self.starts_block = block is not None and layer_idx % block == 0
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = build_attention(config, layer_idx)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp_name = "block_sparse_moe" if config.is_moe(layer_idx) else "mlp"  # as published
        self.add_module(self.mlp_name, build_mlp(config, layer_idx))
        init_weights(getattr(self, self.mlp_name), config.initializer_range)
        if block is not None:
            self.self_attention_res_norm, self.self_attention_res_proj = RMSNorm(hidden, eps), PseudoQuery(hidden)
            self.mlp_res_norm, self.mlp_res_proj = RMSNorm(hidden, eps), PseudoQuery(hidden)

    def forward(
        self,
        x: Tensor,
        due: Tensor | None,
        bank: ResidualBank | None,
        *,
        state: LayerState | None,
        cu_seqlens: Tensor | None,
        return_state: bool,
    ) -> tuple[Tensor, Tensor, ResidualBank | None, LayerState | None]:
        """x [B, T, D] running sum, due [B, T, D] what the sublayer before has still to add to it (norms do, in the same pass),
        bank of finished sums (None: plain residuals) -> all three after this layer, and its state."""
        x, h = self._read(x, due, bank, 0)
        a, state = self.self_attn(h, state=state, cu_seqlens=cu_seqlens, return_state=return_state)
        if bank is not None and self.starts_block:
            bank, x, a = (
                bank.push(x, self.layer_idx),
                a.to(x.dtype),
                None,
            )  # autocast: the stream stays as wide as it began
        x, h = self._read(x, a, bank, 1)
        return x, getattr(self, self.mlp_name)(h), bank, state

    def _read(self, x: Tensor, due: Tensor | None, bank: ResidualBank | None, which: int) -> tuple[Tensor, Tensor]:
        """The sum x + due, and what the attention (which = 0) or feed-forward sublayer (1) reads."""
        norm = self.post_attention_layernorm if which else self.input_layernorm
        if bank is None:
            return (x, norm(x)) if due is None else norm(x, due)
        x = x if due is None else x + due
        return x, norm(bank.read(x, 2 * self.layer_idx + which, *self.residual_reader(which)))

    def residual_reader(self, which: int) -> tuple[RMSNorm, PseudoQuery]:
        if which == 0:
            return self.self_attention_res_norm, self.self_attention_res_proj
        return self.mlp_res_norm, self.mlp_res_proj


class HybridModel(nn.Module):
    """Embedding, layers, final norm: token ids to hidden states.

    gradient_checkpointing: set it, and training recomputes each layer in the backward pass instead of keeping it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = PseudoQuery(config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False

    def forward(
        self, input_ids: Tensor, *, state: ModelState | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, ModelState | None]:
        x = input_ids if input_ids.is_floating_point() else self.embed_tokens(input_ids)
        bank, due = self._bank(x), None
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        states: list[LayerState] = []
        for i, layer in enumerate(self.layers):
            before = None if state is None else state[i]
            run = partial(layer, state=before, cu_seqlens=cu_seqlens, return_state=return_state)
            x, due, bank, after = checkpoint(run, x, due, bank, use_reentrant=False) if recompute else run(x, due, bank)
            states.append(after)
        if bank is not None:
            x = x if due is None else x + due
            x, due = bank.read(x, 2 * len(self.layers), self.output_attn_res_norm, self.output_attn_res_proj), None
        return self.norm(x) if due is None else self.norm(x, due)[1], tuple(states) if return_state else None

    def _bank(self, x: Tensor) -> ResidualBank | None:
        """An empty bank; with the queries of all sublayers where the two-phase form of Attention Residuals pays."""
        block = self.config.attn_res_block_size
        if block is None:
            return None
        queries = None
        if not torch.is_grad_enabled() and 0 < x.shape[:-1].numel() <= TWO_PHASE_TOKENS:
            layers = [cast(DecoderLayer, layer) for layer in self.layers]
            readers = [layer.residual_reader(which) for layer in layers for which in (0, 1)]
            readers.append((self.output_attn_res_norm, self.output_attn_res_proj))
            queries = residual_query(
                torch.stack([norm.weight for norm, _ in readers]), torch.cat([query.weight for _, query in readers])
            )
        return ResidualBank(self.config.rms_norm_eps, block, queries=queries)


class HybridLM(nn.Module):
    """The language model: token ids [B, T] in, `LMOutput` out (logits [B, T, vocab], state, loss).

        model = HybridLM(PRESETS["tiny"])                            # `init_weights(seed)` makes it reproducible
        loss = model(ids, targets=next_ids).loss / next_ids.numel()  # nats a token
        out = model(prompt, return_state=True)                       # and on: model(token, state=out.state, ...)

    Built under `torch.device("meta")` it costs nothing; `to_empty(device=...)` and `init_weights(seed)` then fill it.
    With `tie_word_embeddings` there is no `lm_head`: the embedding matrix is read twice, and saved once.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = HybridModel(config)
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        init_weights(self.model.embed_tokens, config.initializer_range)
        if self.lm_head is not None:
            init_weights(self.lm_head, config.initializer_range)

    def init_weights(self, seed: int) -> None:
        """Every parameter anew: matrices N(0, initializer_range), norms 1, gates and convolutions as in their modules. The
        same seed gives the same values on every device and after every way of building."""
        init_weights(self, self.config.initializer_range, torch.Generator().manual_seed(seed))

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(
        self,
        input_ids: Tensor,
        *,
        state: ModelState | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_state: bool = False,
        last_only: bool = False,
        targets: Tensor | None = None,
    ) -> LMOutput:
        """input_ids [B, T] -> logits [B, T, vocab].

        input_ids may also be the embeddings themselves, float [B, T, D]: so images enter a text.
        state: of an earlier call, to continue its sequences (row n is row n of the batch or member n of the pack).
        cu_seqlens: [N + 1], sequences packed along T (then B = 1). attention_mask: [B, T] bool, left padding only;
        padded positions are never computed and their logits are 0.
        last_only: logits of each sequence's last token, [B, 1, vocab], or [1, N, vocab] of a pack (0 for an empty one).
        targets: [B, T] int64, the token to predict at each position: the loss in place of logits, which a GPU then never
            holds all at once (openkda/ops/head_loss). Not with attention_mask or last_only.
        Raises: ValueError or TypeError for malformed input, before anything runs.
        """
        N = self._check(input_ids, state, cu_seqlens)
        mask = padding_of(attention_mask, (input_ids.shape[0], input_ids.shape[1]), cu_seqlens)
        packed, cu = (input_ids, cu_seqlens) if mask is None else pack(input_ids, mask)
        if targets is not None and (attention_mask is not None or last_only or targets.shape != input_ids.shape[:2]):
            raise ValueError(
                f"targets: expected {list(input_ids.shape[:2])}, without attention_mask and last_only, received "
                f"{list(targets.shape)}, attention_mask {attention_mask is not None}, last_only {last_only}"
            )
        h, new = self.model(packed, state=state, cu_seqlens=cu, return_state=return_state)
        if targets is not None:
            return LMOutput(h.new_empty(0), new, head_loss(h.flatten(0, 1), self._head_weight(), targets.flatten()))
        if last_only:
            h = h[:, -1:] if cu is None else _last_of_each(h, cu)
        logits = self._head(h)
        if mask is not None:
            logits = logits.view(N, 1, -1) if last_only else unpack(logits, mask)
        return LMOutput(logits, new)

    def _head(self, h: Tensor) -> Tensor:
        return F.linear(h, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(h)

    def _head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def _check(self, input_ids: Tensor, state: ModelState | None, cu_seqlens: Tensor | None) -> int:
        if isinstance(input_ids, Tensor) and input_ids.is_floating_point() and input_ids.dim() == 3:
            self._check_embeddings(input_ids)
        else:
            self.check_ids(input_ids)
        if state is not None and len(state) != self.config.num_hidden_layers:
            raise ValueError(f"state: expected one of {self.config.num_hidden_layers} layers, received {len(state)}")
        return check_cu_seqlens(cu_seqlens, input_ids.shape[0], input_ids.shape[1])

    def _check_embeddings(self, x: Tensor) -> None:
        if x.shape[2] != self.config.hidden_size:
            raise ValueError(f"embeddings: expected [B, T, {self.config.hidden_size}], received {list(x.shape)}")

    def check_ids(self, input_ids: Tensor) -> None:
        """TypeError or ValueError for anything but token ids [B, T] of this model (values are read on a CPU only)."""
        if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
            got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise TypeError(f"input_ids: expected an int64 or int32 tensor, received {got}")
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids.shape: expected [B, T], received {list(input_ids.shape)}")
        here = self.model.embed_tokens.weight.device
        if input_ids.device != here:  # torch's own lookup reads stray memory for ids on meta
            raise ValueError(f"input_ids.device: expected {here} (that of the embedding), received {input_ids.device}")
        if input_ids.device.type == "cpu" and input_ids.numel() and not torch.compiler.is_compiling():
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(f"input_ids: expected ids in [0, {self.config.vocab_size}), received {low}..{high}")


def _last_of_each(h: Tensor, cu_seqlens: Tensor) -> Tensor:
    """h [1, T, D] -> [1, N, D], the last token of each packed sequence; zeros where a sequence is empty."""
    if h.shape[1] == 0:
        return h.new_zeros(1, cu_seqlens.numel() - 1, h.shape[2])
    last = h[:, (cu_seqlens[1:] - 1).clamp(min=0).long()]
    return last * (cu_seqlens.diff() > 0).view(1, -1, 1)

"""QK-clip: after a step, weights of heads whose attention scores grew beyond tau are scaled back to it.

    S_h > tau:   gamma = tau / S_h;   rows of q and of k times gamma^0.5;   q's rows on the shared key times gamma

The shared key belongs to all heads, so q's rows alone carry its part. Only Gated MLA has such scores: KDA's queries and keys
are normalised. Source: Kimi K2 report, taken over by Kimi K3 (section 2.5) together with Per-Head Muon.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openkda.layers.mla import GatedMLA

TAU = 100.0


class QKClip:
    """Watches every Gated MLA layer below `root` while it trains. Call `step()` after the optimizer's, once a step:

        clip = QKClip(model); ...backward of each micro-batch...; optimizer.step(); clip.step()

    For one process. Raises: ValueError for a tau that is not positive, or where there is nothing to watch.
    """

    def __init__(self, root: nn.Module, tau: float = TAU) -> None:
        if not tau > 0:
            raise ValueError(f"tau: expected a positive number, received {tau}")
        self.tau = tau
        self.layers = {name: m for name, m in root.named_modules() if isinstance(m, GatedMLA)}
        if not self.layers:
            raise ValueError("QKClip: expected a model with Gated MLA layers, received one without")
        for layer in self.layers.values():
            layer.watch_logits, layer.largest_logits = True, None

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Scale what is too large, and start watching anew. Returns: for each layer, the largest score since the last call."""
        largest: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            if layer.largest_logits is not None:
                largest[name] = layer.largest_logits.max()
                gamma = (self.tau / layer.largest_logits.clamp(min=self.tau)).view(-1, 1, 1)
                shared = layer.kv_a_proj_with_mqa.out_features - layer.kv_lora_rank
                queries = (layer.q_b_proj if layer.low_rank_q else layer.q_proj).weight.unflatten(0, (layer.heads, -1))
                nope = queries.shape[1] - shared
                keys = layer.kv_b_proj.weight.unflatten(0, (layer.heads, -1))[:, :nope]
                queries[:, :nope].mul_(gamma.sqrt())
                queries[:, nope:].mul_(gamma)
                keys.mul_(gamma.sqrt())
            layer.largest_logits = None
        if not largest:
            return {}
        device = next(iter(largest.values())).device
        read = torch.stack([t.to(device) for t in largest.values()]).tolist()  # a GPU is waited for once
        return dict(zip(largest, read, strict=True))

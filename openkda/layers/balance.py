"""Quantile Balancing of a whole model: counts while it trains, one integer all-reduce a step, new biases for the next step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from openkda.layers.moe import Router
from openkda.ops.moe.balance import BINS, histogram_bias


class QuantileBalancer:
    """Balances every router below `root`. Call `step()` once an optimizer step, after any number of micro-batches:

        balancer = QuantileBalancer(model)
        ...backward of each micro-batch...; optimizer.step(); balancer.step()

    Routers count in training mode only; padding is never counted (the model does not compute it), nor is what
    activation checkpointing recomputes. The bias is part of the model's state, the counts are not: checkpoint after `step()`.

    group: ranks whose tokens count together, the data-parallel ones; None = all of a running process group. Ranks that
    hold the same tokens (tensor parallelism) must not be in one group. Source: Kimi K3 report, section 2.3.3.
    Raises: ValueError where nothing can be balanced.
    """

    def __init__(self, root: nn.Module, *, bins: int = BINS, group: dist.ProcessGroup | None = None) -> None:
        if bins < 2:
            raise ValueError(f"bins: expected at least 2, received {bins}")
        self.routers = {name: m for name, m in root.named_modules() if isinstance(m, Router)}
        if not self.routers:
            raise ValueError("QuantileBalancer: expected a model with routed experts, received one without")
        self.group = group
        for name, router in self.routers.items():
            if router.k >= router.weight.shape[0]:
                raise ValueError(f"{name}: expected fewer experts a token than experts, received {router.k} of each")
            router.balance_bins, router.counts = bins, None

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Set every bias from the counts since the last call, and start counting anew.

        Returns: for each router, the largest expert load over the target load in that time (1 is perfect; 0: no tokens).
        """
        counts = self._all_reduce()
        ratios = []
        for router, count in zip(self.routers.values(), counts, strict=True):
            bias = router.e_score_correction_bias
            bias.copy_(histogram_bias(count[:, :-1].contiguous(), bias, router.k))
            load = count[:, -1]
            ratios.append((load.max() * load.numel() / load.sum().clamp(min=1)).to(counts[0].device))
            router.counts = None
        return dict(zip(self.routers, torch.stack(ratios).tolist(), strict=True))  # a GPU is waited for once

    def _all_reduce(self) -> list[torch.Tensor]:
        counts = []
        for router in self.routers.values():
            shape = (router.weight.shape[0], (router.balance_bins or 0) + 1)
            empty = torch.zeros(shape, dtype=torch.int64, device=router.e_score_correction_bias.device)
            counts.append(empty if router.counts is None else router.counts)
        if dist.is_available() and dist.is_initialized():
            flat = torch.cat([c.flatten() for c in counts])
            dist.all_reduce(flat, group=self.group)
            parts = flat.split([c.numel() for c in counts])
            counts = [part.view_as(c) for part, c in zip(parts, counts, strict=True)]
        return counts

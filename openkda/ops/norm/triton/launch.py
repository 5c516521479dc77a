"""Launch and registration of the norm kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.norm.triton.rows import norm_kernel
from openkda.ops.triton.api import ceil_div, launch, padded

_LIBRARY = torch.library.Library("openkda", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor x, Tensor? gate, Tensor weight, float eps) -> Tensor")


def _norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    D = x.shape[-1]
    flat = x.reshape(-1, D)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    gates = flat if gate is None else gate.reshape(-1, D)
    gates = gates if gates.stride(-1) == 1 else gates.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    BD = padded(D)
    R = max(1, 2048 // BD)
    rows = flat.shape[0]
    if rows and D:
        tensors, steps = (flat, gates, weight.contiguous(), y), (flat.stride(0), gates.stride(0), D)
        warps = 4 if BD <= 4096 else 8
        launch(norm_kernel, ceil_div(rows, R), tensors, steps, (rows, eps), (R, BD, gate is not None), warps, y.device)
    return y


def _fake_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_LIBRARY.impl("rms_norm", _norm, "CompositeExplicitAutograd")
torch.library.register_fake("openkda::rms_norm", _fake_norm, lib=_LIBRARY)

norm_op = torch.ops.openkda.rms_norm.default

"""Muon for the matrices, AdamW for everything else, one learning rate for both.

Muon's step is torch's own with the scale 0.2 * sqrt(max(rows, columns)), which gives its update the size of AdamW's
(Moonlight report, arXiv:2502.16982), so that rate and decay carry over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Matrices that are not maps between hidden spaces: a row per token id, and one number a head (beta).
ADAMW_MATRICES = ("embed_tokens", "lm_head", "b_proj")  # whole module names: f_b_proj and kv_b_proj are Muon's
NEVER_DECAYED = ("A_log", "dt_bias", "bias")


@dataclass
class ParameterGroups:
    """Names and parameters by treatment; each trained parameter is in exactly one."""

    muon: dict[str, nn.Parameter] = field(default_factory=dict)
    adamw: dict[str, nn.Parameter] = field(default_factory=dict)
    adamw_no_decay: dict[str, nn.Parameter] = field(default_factory=dict)


def group_parameters(model: nn.Module) -> ParameterGroups:
    """Muon: matrices of at least 2 rows and columns, and stacks of them. AdamW: embeddings, head, beta, convolutions.

    AdamW without decay: A_log, dt_bias, norms and other vectors.
    """
    groups = ParameterGroups()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        module, _, last = name.rpartition(".")
        if parameter.dim() < 2 or last in NEVER_DECAYED:
            groups.adamw_no_decay[name] = parameter
        elif min(parameter.shape[-2:]) > 1 and module.rpartition(".")[2] not in ADAMW_MATRICES:
            groups.muon[name] = parameter
        else:
            groups.adamw[name] = parameter
    return groups


class Muon(torch.optim.Muon):
    """torch's Muon, whose Newton-Schulz iteration stays in float32 where 16-bit matmuls have no hardware.

    torch rounds the matrix to bfloat16 first. On a CPU without bfloat16 instructions that takes 1539 ms a step for the
    1.8 M parameters of eight layers of width 128, against 57 ms in float32; with them (AMX) it takes 62 ms.
    So every CPU computes it in float32, and all CPUs take the same step.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        on_cpu = any(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        if not on_cpu:
            return super().step(closure)
        with _StayFloat32():
            return super().step(closure)


class _StayFloat32(TorchFunctionMode):
    """Inside, `tensor.bfloat16()` gives a float32 copy. (A copy: torch divides the result in place.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


class _Matrices:
    """The matrices of Muon's parameters: a parameter [E, rows, columns] (stacked experts) is E matrices.

    torch's Muon takes matrices only, so it is given views of a stack, whose gradients are set before each step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._views = [(p, [p] if p.dim() == 2 else [nn.Parameter(m) for m in p.detach().unbind()]) for p in parameters]

    def all(self) -> list[nn.Parameter]:
        return [m for _, matrices in self._views for m in matrices]

    def share_gradients(self) -> None:
        for p, matrices in self._views:
            if p.dim() > 2:
                parts = [None] * len(matrices) if p.grad is None else p.grad.unbind()
                for m, grad in zip(matrices, parts, strict=True):
                    m.grad = grad


class Optimizer:
    """Both optimizers behind one handle. Build it when the parameters are on their device."""

    def __init__(
        self, groups: ParameterGroups, *, lr: float, weight_decay: float, momentum: float, betas: tuple[float, float]
    ) -> None:
        self._parts: dict[str, torch.optim.Optimizer] = {}
        self._groups, self._matrices = groups, _Matrices(groups.muon.values())
        if groups.muon:
            self._parts["muon"] = Muon(
                self._matrices.all(),
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        rest = [
            {"params": list(groups.adamw.values()), "weight_decay": weight_decay},
            {"params": list(groups.adamw_no_decay.values()), "weight_decay": 0.0},
        ]
        rest = [group for group in rest if group["params"]]
        if rest:
            self._parts["adamw"] = torch.optim.AdamW(rest, lr=lr, betas=betas)

    def set_rate(self, lr: float) -> None:
        for part in self._parts.values():
            for group in part.param_groups:
                group["lr"] = lr

    def step(self) -> None:
        self._matrices.share_gradients()
        for part in self._parts.values():
            part.step()

    def zero_grad(self) -> None:
        for named in (self._groups.muon, self._groups.adamw, self._groups.adamw_no_decay):
            for p in named.values():
                p.grad = None
        self._matrices.share_gradients()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != set(self._parts):
            raise ValueError(f"optimizer state: expected parts {sorted(self._parts)}, received {sorted(state)}")
        for name, part in self._parts.items():
            try:
                part.load_state_dict(state[name])
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"optimizer state: {name}: expected torch's own form ({error!r})") from None
            for p, values in part.state.items():
                odd = [k for k, v in values.items() if isinstance(v, torch.Tensor) and v.dim() and v.shape != p.shape]
                if odd:
                    got = {k: list(values[k].shape) for k in odd}
                    raise ValueError(
                        f"optimizer state: {name}: expected {list(p.shape)} as its parameter, received {got}"
                    )

"""Muon for the matrices, AdamW for everything else, one learning rate for both.

Muon's step is torch's own with the scale 0.2 * sqrt(max(rows, columns)), which gives its update the size of AdamW's
(Moonlight report, arXiv:2502.16982), so that rate and decay carry over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from openkda.training.per_head import head_rows

# Matrices that are not maps between hidden spaces: a row per token id, and one number a head (beta).
ADAMW_MATRICES = ("embed_tokens", "lm_head", "b_proj")  # whole module names: f_b_proj and kv_b_proj are Muon's
NEVER_DECAYED = ("A_log", "dt_bias", "bias")


@dataclass
class ParameterGroups:
    """Names and parameters by treatment; each trained parameter is in exactly one.

    head_rows: of Muon's parameters that are cut into the matrices of their heads, the rows of each.
    """

    muon: dict[str, nn.Parameter] = field(default_factory=dict)
    adamw: dict[str, nn.Parameter] = field(default_factory=dict)
    adamw_no_decay: dict[str, nn.Parameter] = field(default_factory=dict)
    head_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)


def group_parameters(model: nn.Module, *, per_head: bool = False) -> ParameterGroups:
    """Muon: matrices of at least 2 rows and columns, and stacks of them. AdamW: embeddings, head, beta, convolutions.

    AdamW without decay: A_log, dt_bias, norms and other vectors. per_head: Per-Head Muon (openkda/training/per_head.py).
    """
    groups = ParameterGroups(head_rows=head_rows(model) if per_head else {})
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
    """torch's Muon with the matrices of one shape in one batch, and in float32 where 16-bit matmuls have no hardware.

    torch goes matrix by matrix, about 25 launches each, which is host time on a GPU. And it iterates in bfloat16: on a CPU
    without bfloat16 instructions that takes 1539 ms a step for the 1.8 M parameters of eight layers of width 128,
    against 57 ms in float32; with them (AMX) it takes 62 ms. So every CPU computes it in float32, and all CPUs take the same
    step.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = []
            grads: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, parameters, grads, momenta)
            if not parameters:
                continue
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, momenta, group["momentum"]) if group["nesterov"] else momenta
            lr = group["lr"]  # a tensor where a CUDA graph reads it
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            for members in _batches(parameters):
                found = orthogonalize([updates[i] for i in members], group["ns_coefficients"], group["ns_steps"])
                scale = 0.2 * max(found[0].shape) ** 0.5
                if isinstance(lr, Tensor):
                    torch._foreach_mul_(list(found), -scale * lr)
                    torch._foreach_add_([parameters[i] for i in members], list(found))
                else:
                    torch._foreach_add_([parameters[i] for i in members], list(found), alpha=-(lr * scale))
        return loss


MOST_AT_ONCE = 1 << 26
"""Entries of a batch: what it and its products take beside the model stays below half a gigabyte."""


def _batches(parameters: list[Tensor]) -> list[list[int]]:
    """Indices of matrices of one shape on one GPU, at most MOST_AT_ONCE entries together. On a CPU each goes by itself:
    the demo's 76 matrices take 65 ms of processor time a step that way, 73 ms in batches."""
    alike: dict[Any, list[int]] = {}
    for i, p in enumerate(parameters):
        alike.setdefault((p.shape, p.device, p.dtype) if p.is_cuda else i, []).append(i)
    found = []
    for members in alike.values():
        most = max(1, MOST_AT_ONCE // max(1, parameters[members[0]].numel()))
        found += [members[i : i + most] for i in range(0, len(members), most)]
    return found


def orthogonalize(updates: list[Tensor], coefficients: tuple[float, float, float], steps: int) -> Sequence[Tensor]:
    """Matrices of one shape -> singular values near 1, by the quintic Newton-Schulz iteration; bfloat16 on a GPU."""
    a, b, c = coefficients
    x = updates[0] if len(updates) == 1 else torch.stack(updates)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = x.to(torch.float32 if x.device.type == "cpu" else torch.bfloat16)
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = (x.mT if tall else x).to(updates[0].dtype)
    return [x] if x.dim() == 2 else x.unbind()


class _Matrices:
    """The matrices of Muon's parameters: [E, rows, columns] (stacked experts) is E of them, and one with `head_rows` is
    cut into those of its heads.

    torch's Muon is given views of such a parameter, whose gradients are set before each step.
    """

    def __init__(self, groups: ParameterGroups) -> None:
        self._views = []
        for name, p in groups.muon.items():
            rows = groups.head_rows.get(name)
            cut = [nn.Parameter(m) for m in _cut(p.detach(), rows)] if p.dim() > 2 or rows else [p]
            self._views.append((p, rows, cut))

    def all(self) -> list[nn.Parameter]:
        return [m for _, _, matrices in self._views for m in matrices]

    def share_gradients(self) -> None:
        for p, rows, matrices in self._views:
            if matrices[0] is not p:
                parts = [None] * len(matrices) if p.grad is None else _cut(p.grad, rows)
                for m, grad in zip(matrices, parts, strict=True):
                    m.grad = grad


def _cut(t: Tensor, rows: Sequence[int] | None) -> Sequence[Tensor]:
    return t.unbind() if t.dim() > 2 else t.split(list(rows or (t.shape[0],)))


class Optimizer:
    """Both optimizers behind one handle. Build it when the parameters are on their device."""

    def __init__(
        self, groups: ParameterGroups, *, lr: float, weight_decay: float, momentum: float, betas: tuple[float, float]
    ) -> None:
        self._parts: dict[str, torch.optim.Optimizer] = {}
        self._groups, self._matrices = groups, _Matrices(groups)
        if groups.muon:
            self._parts["muon"] = Muon(
                self._matrices.all(),
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        rest: list[dict[str, Any]] = [
            {"params": list(groups.adamw.values()), "weight_decay": weight_decay},
            {"params": list(groups.adamw_no_decay.values()), "weight_decay": 0.0},
        ]
        rest = [group for group in rest if group["params"]]
        if rest:
            on_gpu = all(p.is_cuda for group in rest for p in group["params"])
            self._parts["adamw"] = torch.optim.AdamW(rest, lr=lr, betas=betas, fused=on_gpu or None)
        # On a GPU every step, as one that a CUDA graph replays has to: a rate as a number rounds elsewhere, and a run that was
        # stopped, whose first steps are launched, would not go on to the bit. (Not sharded parameters: no graph takes them.)
        self._rates_on_gpu = all(
            p.is_cuda and type(p) is nn.Parameter for g in self._param_groups() for p in g["params"]
        )
        if self._rates_on_gpu:
            self.make_capturable()

    def set_rate(self, lr: float) -> None:
        for group in self._param_groups():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def make_capturable(self) -> None:
        """From now on `step` reads its rate on the GPU, as one that is replayed from a CUDA graph has to."""
        for group in self._param_groups():
            if isinstance(group["lr"], Tensor):
                continue
            group["lr"] = torch.as_tensor(float(group["lr"]), device=group["params"][0].device)
            group["capturable"] = True

    def _param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts.values() for group in part.param_groups]

    def step(self) -> None:
        self._matrices.share_gradients()
        for part in self._parts.values():
            part.step()

    def zero_grad(self, *, keep: bool = False) -> None:
        """keep: gradients become zeros where they lie, instead of being let go."""
        named = (self._groups.muon, self._groups.adamw, self._groups.adamw_no_decay)
        parameters = [p for group in named for p in group.values()]
        if keep:
            torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])
            return
        for p in parameters:
            p.grad = None
        self._matrices.share_gradients()

    def state_dict(self) -> dict[str, Any]:
        """For any device: the rate as a number, and nothing about graphs."""
        state = {name: part.state_dict() for name, part in self._parts.items()}
        for part in state.values():
            part["param_groups"] = [
                {**group, "lr": float(group["lr"]), "capturable": False} for group in part["param_groups"]
            ]
        return state

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
        if self._rates_on_gpu:
            self.make_capturable()

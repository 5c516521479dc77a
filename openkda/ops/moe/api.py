"""The contract of the mixture of experts.

    s   = sigmoid(float32(x) W^T)                      one score a token and expert
    T   = the k experts of largest s + bias            the bias selects and does nothing else
    p_j = s_j / (sum_T s + 1e-20) * scale              normalise, then scale
    u   = sum_{j in T} p_j E_j(z)                      p and the sum in float32, one cast
    E_j(z) = w2_j act(w1_j z, w3_j z)

No token is dropped and no expert has a capacity. Two runs are bit-equal: tokens are sorted by expert (stably) and gathered
back, so no sum depends on the order of atomics. z may be narrower than x (Stable LatentMoE): the router reads x.
Source: Kimi K3 report, eq. 11 to 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from openkda.ops.device.api import is_watched
from openkda.ops.moe import experts as _experts
from openkda.ops.moe import triton as kernels
from openkda.ops.moe.activation import GLU
from openkda.ops.mx.api import BLOCK, ScaleRule

__all__ = ["IMPLEMENTATIONS", "PackedExperts", "Routing", "expert_mlp", "packed_expert_mlp", "route", "select_experts"]

IMPLEMENTATIONS = ("grouped_mm", "loop")
"""Of the matmul over experts, in order of preference: torch's own grouped matmul, and one matmul an expert."""


@dataclass(frozen=True)
class Routing:
    """experts: [T, k] int64. weights: [T, k] and scores: [T, E], float32 (float64 for float64 input).

    cutoff: [T] the (k+1)-th largest biased score of each token, for Quantile Balancing; None unless asked for.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor
    cutoff: Tensor | None = None


@dataclass(frozen=True)
class PackedExperts:
    """Expert matrices in MXFP4 as published (openkda/ops/mx/api.py), stacked over experts.

    w1, w3: ([E, I, D / 2], [E, I, D / 32]) uint8; w2: ([E, D, I / 2], [E, D, I / 32]) uint8; each (packed, scale).
    """

    w1: tuple[Tensor, Tensor]
    w2: tuple[Tensor, Tensor]
    w3: tuple[Tensor, Tensor]


def route(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "E D"],
    bias: Float[Tensor, " E"] | None,
    k: int,
    *,
    renormalize: bool = True,
    scale: float = 1.0,
    with_cutoff: bool = False,
) -> Routing:
    """Scores, choice and weights of every token; float32 throughout, also under autocast.

    Args:
        x: [T, D], any float dtype. weight: [E, D].
        bias: [E] float32, added for the selection only; no gradient reaches it.
        k: experts a token. renormalize: divide by the sum of the chosen scores. scale: factor after that.
        with_cutoff: also return the (k+1)-th biased score (needs k < E).
    Returns: `Routing`. Raises: ValueError or TypeError, showing expected and received.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        _bad("x, weight shapes", "[T, D] and [E, D]", f"{list(x.shape)} and {list(weight.shape)}")
    if not with_cutoff and 1 <= k <= weight.shape[0] and kernels.takes_routing(x, weight, bias, k):
        _check_bias(bias, weight.shape[0])
        return Routing(*kernels.route(x, weight, bias, k, renormalize, scale))
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        scores = torch.sigmoid(F.linear(x.to(wide), weight.to(wide)))
    return select_experts(scores, bias, k, renormalize=renormalize, scale=scale, with_cutoff=with_cutoff)


def select_experts(
    scores: Float[Tensor, "T E"],
    bias: Float[Tensor, " E"] | None,
    k: int,
    *,
    renormalize: bool = True,
    scale: float = 1.0,
    with_cutoff: bool = False,
) -> Routing:
    """The choice alone, for given scores in [0, 1]: arguments as in `route`."""
    E = scores.shape[-1]
    if not 1 <= k <= E - with_cutoff:
        _bad("k", f"1..{E - with_cutoff} ({E} experts{', cutoff asked for' if with_cutoff else ''})", k)
    _check_bias(bias, E)
    biased = scores.detach()
    biased = biased if bias is None else biased + bias.detach()
    top = biased.topk(k + with_cutoff, dim=-1)
    experts = top.indices[:, :k]
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights if scale == 1.0 else weights * scale
    return Routing(experts, weights, scores, top.values[:, k] if with_cutoff else None)


def expert_mlp(
    x: Float[Tensor, "T D"],
    experts: Int[Tensor, "T k"],
    weights: Float[Tensor, "T k"],
    w1: Float[Tensor, "E I D"],
    w3: Float[Tensor, "E I D"],
    w2: Float[Tensor, "E D I"],
    *,
    activation: GLU,
    quantize: ScaleRule | None = None,
    impl: str | None = None,
) -> Float[Tensor, "T D"]:
    """Weighted sum of every token's chosen experts.

    Args:
        x: [T, D]. experts: [T, k] int64 in [0, E). weights: [T, k] float32.
        w1 (gate), w3 (up): [E, I, D]; w2 (down): [E, D, I], cast to the compute dtype: x's, or autocast's where it is on.
        quantize: a scale rule switches quantisation-aware training on: MXFP4 weights and MXFP8 inputs of all three
            matmuls, as fake quantisation with straight-through gradients (D and I multiples of 32).
        impl: a name out of IMPLEMENTATIONS raises NotImplementedError where it cannot run; None chooses.
    Returns: [T, D] in the compute dtype. An expert without tokens costs nothing and gets a zero gradient.
    Differentiable in x, weights and the matrices. Raises: ValueError or TypeError, showing expected and received.
    """
    E = w1.shape[0]
    _check_choice(x, experts, weights, E)
    inner = w1.shape[1] if w1.dim() == 3 else 0
    D = x.shape[1]
    for name, w, shape in (("w1", w1, (E, inner, D)), ("w3", w3, (E, inner, D)), ("w2", w2, (E, D, inner))):
        if tuple(w.shape) != shape:
            _bad(f"{name}.shape", f"{'[E, D, I]' if name == 'w2' else '[E, I, D]'} = {list(shape)}", list(w.shape))
    if impl is not None and impl not in IMPLEMENTATIONS:
        _bad("impl", f"one of {', '.join(IMPLEMENTATIONS)} or None", repr(impl))
    return _experts.expert_mlp(x, experts, weights, w1, w3, w2, activation, quantize, impl)


def packed_expert_mlp(
    x: Float[Tensor, "T D"],
    experts: Int[Tensor, "T k"],
    weights: Float[Tensor, "T k"],
    packed: PackedExperts,
    *,
    activation: GLU,
) -> Float[Tensor, "T D"]:
    """As `expert_mlp`, with matrices that stay packed.

    On a GPU without gradients one kernel unpacks them on their way into the product, without any wait for the host, so that it
    can be captured in a graph; elsewhere one expert at a time is dequantised. Differentiable in x and weights.
    """
    E, inner = packed.w1[0].shape[:2]
    _check_choice(x, experts, weights, E)
    for name, out, width in (("w1", inner, x.shape[1]), ("w3", inner, x.shape[1]), ("w2", x.shape[1], inner)):
        codes, scale = getattr(packed, name)
        want = [[E, out, width // 2], [E, out, width // BLOCK]]
        if [list(codes.shape), list(scale.shape)] != want or codes.dtype != torch.uint8 or scale.dtype != torch.uint8:
            got = f"{codes.dtype} {list(codes.shape)} and {scale.dtype} {list(scale.shape)}"
            _bad(f"packed.{name}", f"uint8 {want[0]} and uint8 {want[1]}", got)
    return _experts.packed_expert_mlp(x, experts, weights, packed.w1, packed.w3, packed.w2, activation)


def _check_bias(bias: Tensor | None, E: int) -> None:
    if bias is not None and (tuple(bias.shape) != (E,) or bias.dtype not in (torch.float32, torch.float64)):
        _bad("bias", f"float32 [{E}] (16 bits cannot order close scores)", f"{bias.dtype} {list(bias.shape)}")


def _check_choice(x: Tensor, experts: Tensor, weights: Tensor, E: int) -> None:
    """Ids are read on a CPU alone, where -1 would be the last expert; on a GPU that would wait for the device."""
    if x.dim() != 2:
        _bad("x.shape", "[T, D]", list(x.shape))
    if experts.dtype != torch.int64 or experts.dim() != 2 or experts.shape[0] != x.shape[0]:
        _bad("experts", f"int64 [{x.shape[0]}, k]", f"{experts.dtype} {list(experts.shape)}")
    if weights.shape != experts.shape or weights.dtype not in (torch.float32, torch.float64):
        _bad("weights", f"float32 {list(experts.shape)}", f"{weights.dtype} {list(weights.shape)}")
    if experts.is_cpu and experts.numel() and not is_watched():
        low, high = (int(t) for t in experts.aminmax())
        if low < 0 or high >= E:
            _bad("experts", f"ids in [0, {E})", f"{low}..{high}")


def _bad(name: str, expected: object, received: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, received {received}")

"""Weights of fla's `KimiDeltaAttention` layer (fla-core 0.6.0, fla/layers/kda.py) in ours, and back.

    fla                            ours                      shape
    q_proj, k_proj, v_proj, b_proj, o_proj   the same names  [out, in]
    {q,k,v}_conv1d.weight          the same                  [channels, 1, W], last tap on the current token
    f_proj.0.weight                f_a_proj.weight           [bottleneck, hidden]; fla's bottleneck is the VALUE head size, ours
                                                             the key head size: they must be equal
    f_proj.1.weight                f_b_proj.weight           [HV * K, bottleneck]
    g_proj.0.weight                g_a_proj.weight           [bottleneck, hidden]
    g_proj.1.weight                g_b_proj.weight           [HV * V, bottleneck]
    g_proj.1.bias                  g_b_proj.bias             [HV * V]; published Kimi checkpoints have none. Zeros are left out;
                                                             anything else makes our g_b_proj a linear layer with a bias
    A_log, dt_bias, o_norm.weight  the same                  [HV], [HV * K], [V]; float32 with us

Not in the weights, and so up to the caller: `norm_eps` (fla 1e-5, our `rms_norm_eps`), `lower_bound` (our
`gate_lower_bound`), and `allow_neg_eigval`, which doubles beta and which our layer does not have.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from openkda.layers.kda import KimiDeltaAttention

__all__ = ["from_fla", "load_fla", "to_fla"]

_RENAMED = {
    "f_proj.0.weight": "f_a_proj.weight",
    "f_proj.1.weight": "f_b_proj.weight",
    "g_proj.0.weight": "g_a_proj.weight",
    "g_proj.1.weight": "g_b_proj.weight",
    "g_proj.1.bias": "g_b_proj.bias",
}
_SAME = (
    "q_proj.weight", "k_proj.weight", "v_proj.weight", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight",
    "b_proj.weight", "A_log", "dt_bias", "o_norm.weight", "o_proj.weight",
)  # fmt: skip
KEYS = {**{name: name for name in _SAME}, **_RENAMED}
"""fla's name -> ours."""

_CONV_BIASES = ("q_conv1d.bias", "k_conv1d.bias", "v_conv1d.bias")


def from_fla(weights: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Our names for fla's, the same tensors (no copy). Only keys that begin with `prefix` are read ("model.layers.3.attn.").

    Raises: ValueError naming every key that is missing, and every one that our layer cannot represent.
    """
    found = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
    for name in (*_CONV_BIASES, "g_proj.1.bias"):  # zeros say nothing
        if name in found and not bool(found[name].any()):
            del found[name]
    unknown = sorted(found.keys() - KEYS.keys())
    missing = sorted(KEYS.keys() - found.keys() - {"g_proj.1.bias"})
    if unknown or missing:
        said = [f"cannot represent {_reason(name)}" for name in unknown]
        said += [f"missing {prefix}{name}{_hint(name)}" for name in missing]
        raise ValueError(f"fla KimiDeltaAttention: expected the keys of fla-core 0.6.0, {'; '.join(said)}")
    return {KEYS[name]: t for name, t in found.items()}


def load_fla(layer: KimiDeltaAttention, weights: Mapping[str, Tensor], prefix: str = "") -> None:
    """Copy fla's weights into `layer`, each in the parameter's own dtype and on its device; nothing changes on an error.

    With `output_gate_bias` in its config the layer has a gate bias, zeros where the weights bring none. To any other layer a
    bias that is not zero is added as a parameter of `layer.g_b_proj`, of which its config knows nothing: such a model trains,
    but its checkpoints do not load. Without one, a bias from an earlier load goes.
    Raises: ValueError for a full-rank output gate (Kimi K3), which fla's layer does not have, for keys as in
    `from_fla`, and for shapes that differ, all of them named.
    """
    if layer.full_rank_gate:
        raise ValueError("layer: expected use_full_rank_gate=False (fla's gate has two matrices), received True")
    ours = from_fla(weights, prefix)
    bias = ours.pop("g_b_proj.bias", None)
    if bias is None and layer.gate_bias:
        bias = torch.zeros(layer.g_b_proj.out_features)
    own = {name: p for name, p in layer.named_parameters() if name != "g_b_proj.bias"}
    expected = {name: tuple(p.shape) for name, p in own.items()}
    received = {name: tuple(t.shape) for name, t in ours.items()}
    if bias is not None:
        expected["g_b_proj.bias"], received["g_b_proj.bias"] = (layer.g_b_proj.out_features,), tuple(bias.shape)
    wrong = [f"{n} expected {list(s)}, received {list(received[n])}" for n, s in expected.items() if received[n] != s]
    if wrong:
        raise ValueError(f"fla KimiDeltaAttention: shapes differ (sizes of config and of weights): {'; '.join(wrong)}")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(ours[name])
        matrix = layer.g_b_proj.weight
        kept = None if bias is None else nn.Parameter(bias.detach().to(matrix, copy=True))
        layer.g_b_proj.register_parameter("bias", kept)


def to_fla(layer: KimiDeltaAttention, prefix: str = "") -> dict[str, Tensor]:
    """`layer`'s parameters under fla's names (no copy, but for the gate's bias of zeros where ours has none).

    Raises: ValueError for what fla's layer cannot represent: a full-rank gate; a key head size that is not the value's.
    """
    if layer.full_rank_gate:
        raise ValueError("layer: expected use_full_rank_gate=False (fla's gate has two matrices), received True")
    if layer.key_dim != layer.v_dim:
        raise ValueError(
            f"layer: expected one head size (fla's bottleneck is the value's, ours the key's), received K = {layer.key_dim} "
            f"and V = {layer.v_dim}"
        )
    ours = {name: p.detach() for name, p in layer.named_parameters()}
    ours.setdefault("g_b_proj.bias", ours["g_b_proj.weight"].new_zeros(layer.g_b_proj.out_features))
    return {prefix + theirs: ours[name] for theirs, name in KEYS.items()}


def _reason(name: str) -> str:
    return f"{name} (a convolution's bias that is not zero)" if name in _CONV_BIASES else name


def _hint(name: str) -> str:
    return " (use_short_conv=False has no counterpart)" if "conv1d" in name else ""

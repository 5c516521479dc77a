"""Per-Head Muon: which rows of a projection belong to which head, so that every head's matrix is orthogonalised by itself.

The Kimi K3 report (section 2.5) says so of the query, key and value projections and of nothing else, so output projections and
gates stay whole. It does not say whether MLA's up-projections count: here they do, a head's keys and values in kv_b_proj as two
matrices. Each block is scaled by its own shape, 0.2 * sqrt(max(rows, columns)), which gives its update AdamW's size too.
"""

from __future__ import annotations

from torch import nn

from openkda.layers.kda import KimiDeltaAttention
from openkda.layers.mla import GatedMLA


def head_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Parameter name -> the rows of each of its blocks, in order, for every projection that has heads."""
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, KimiDeltaAttention | GatedMLA):
            rows = _kda_rows(module) if isinstance(module, KimiDeltaAttention) else _mla_rows(module)
            found |= {".".join(filter(None, (name, projection, "weight"))): rows[projection] for projection in rows}
    return found


def _kda_rows(layer: KimiDeltaAttention) -> dict[str, tuple[int, ...]]:
    keys, values = (layer.key_dim,) * layer.heads, (layer.v_dim,) * layer.v_heads
    return {"q_proj": keys, "k_proj": keys, "v_proj": values}


def _mla_rows(layer: GatedMLA) -> dict[str, tuple[int, ...]]:
    queries = layer.q_b_proj if layer.low_rank_q else layer.q_proj
    value = layer.o_proj.in_features // layer.heads
    key = layer.kv_b_proj.out_features // layer.heads - value
    return {
        "q_b_proj" if layer.low_rank_q else "q_proj": (queries.out_features // layer.heads,) * layer.heads,
        "kv_b_proj": (key, value) * layer.heads,
    }

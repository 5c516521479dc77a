"""FSDP2 for these models: every parameter sharded, matrices gathered in 16 bits, what must stay float32 in units of its own.

FSDP2 casts a whole unit for its forward, and refuses different dtypes within one. So a layer's units are

    its matrices             one unit, gathered in 16 bits
    A_log, dt_bias, convolutions, o_norm (`Float32Parameters`)   one unit, gathered as they are
    the rest of the decoder layer, then of the model             gathered in 16 bits

Gradients are summed in float32 in all of them. The sharded parameters, the optimizer's, keep the dtype that the model has:
build it in float32 for float32 masters (12 bytes a parameter with AdamW's two moments), or cast it to bfloat16 before.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from openkda.layers.moe import SparseMoE
from openkda.layers.parameters import Float32Parameters
from openkda.models.hybrid import HybridLM


def shard(model: HybridLM, mesh: DeviceMesh, *, dtype: torch.dtype = torch.bfloat16) -> HybridLM:
    """Shard `model` in place over a one-dimensional `mesh`; build the optimizer afterwards, from its parameters.

    dtype: of the matrices while a layer computes; their shards, and what is float32, stay what they are.
    Raises: ValueError for a model with experts, which need expert parallelism, not a gather of all of them a layer; and for a
    mesh of more than one dimension.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, received {mesh.ndim} ({mesh.mesh_dim_names})")
    if any(isinstance(m, SparseMoE) for m in model.modules()):
        raise ValueError(
            "model: expected no mixture of experts (sharding it this way would gather every expert), found one"
        )
    narrow = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    as_is = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        for module in _outermost(layer):
            matrices: list[nn.Module] = [m for m in module.modules() if isinstance(m, nn.Linear)]
            if matrices:
                fully_shard(matrices, mesh=mesh, mp_policy=narrow)
            fully_shard(module, mesh=mesh, mp_policy=as_is)
        fully_shard(layer, mesh=mesh, mp_policy=narrow)
    fully_shard(model, mesh=mesh, mp_policy=narrow)
    return model


def _outermost(module: nn.Module) -> list[Float32Parameters]:
    """The modules with parameters that stay float32, none of them inside another."""
    found: list[Float32Parameters] = []
    for child in module.children():
        found += [child] if isinstance(child, Float32Parameters) else _outermost(child)
    return found

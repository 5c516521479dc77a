"""The inventory of a published checkpoint as text: one line for tensors that differ in layer and expert only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from openkda.models.config import ModelConfig
from openkda.models.official import is_published, read_config
from openkda.models.official_names import PublishedTensor, inventory, official, shard_count

_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8", torch.float64: "F64"}


@dataclass(frozen=True)
class Inventory:
    """A published model: its config, and the table of its tensors."""

    config: ModelConfig
    text: str


def inventory_of(model: str | Path) -> Inventory | None:
    """Of a published preset, of a checkpoint directory in a published layout or of its config.json; None for anything else.

    Raises: FileNotFoundError or ValueError naming the file, for a directory in a published layout that cannot be read.
    """
    if str(model) in ("kimi-k3", "kimi-linear-48b"):
        published = official(str(model))
    elif is_published(model):
        published = read_config(model)
    else:
        return None
    return Inventory(published.model, render_tensors(inventory(published), shard_count(published)))


def render_tensors(tensors: Sequence[PublishedTensor], shards: int) -> str:
    stacks: dict[str, list[PublishedTensor]] = {}  # by key: the experts of a layer are alike
    for t in tensors:
        stacks.setdefault(t.key, []).append(t)
    groups: dict[tuple[str, tuple[int, ...], torch.dtype], list[int]] = {}
    for (first, *_), count in ((stack, len(stack)) for stack in stacks.values()):
        group = groups.setdefault((_class(first.name), first.shape, first.dtype), [0, 0])
        group[0] += count
        group[1] += count * first.nbytes
    rows = [
        (name, f"{count:,}", str(list(shape)), _DTYPES[dtype], f"{size:,}")
        for (name, shape, dtype), (count, size) in groups.items()
    ]
    rows.insert(0, ("tensor", "count", "shape", "dtype", "bytes"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        f"{n:<{widths[0]}}  {c:>{widths[1]}}  {s:<{widths[2]}}  {d:<{widths[3]}}  {b:>{widths[4]}}"
        for n, c, s, d, b in rows
    ]
    total, weights = sum(size for _, size in groups.values()), sum(t.parameters for t in tensors)
    text = sum(t.parameters for t in tensors if not t.name.startswith(("vision_tower.", "mm_projector.")))
    lines.append(
        f"{len(tensors):,} tensors in {shards} shards, {total:,} bytes; {weights / 1e9:.2f} B parameters, "
        f"{text / 1e9:.2f} B of them in the text model"
    )
    return "\n".join(line.rstrip() for line in lines)


def _class(name: str) -> str:
    """The name with layers as L, experts as E and vision blocks as B."""
    name = re.sub(r"\blayers\.\d+\.", "layers.L.", name)
    name = re.sub(r"\bexperts\.\d+\.", "experts.E.", name)
    return re.sub(r"\bblocks\.\d+\.", "blocks.B.", name)

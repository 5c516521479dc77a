"""MoonViT-V2, the vision tower of Kimi K3, and the projector into the text width.

    x = patches W_patch + bilinear(table, h x w) (+ a fixed sin|cos code of the frame, where there are several)
    27 times:  x = x + W_o attention(RMSNorm(x));   x = x + W_1 gelu(W_0 RMSNorm(x))
    2 x 2 neighbours, averaged over frames -> [h/2 * w/2, 4 * D] -> MLP -> RMSNorm -> text width

Attention is bidirectional over all patches of one item, its frames together. Queries and keys are rotated in adjacent pairs:
pair 2i by column * theta_i and pair 2i + 1 by row * theta_i, theta_i = 10000^(-4i / head size).
Source: Kimi K3 report, section 2.4, and the released weights; where the report describes two attention passes (space, then
time), the released code attends jointly, and so does this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openkda.layers.config import VisionTowerConfig
from openkda.layers.norm import RMSNorm
from openkda.layers.parameters import fill_normal, init_weights

Grid = tuple[int, int, int]
"""(frames t, rows h, columns w) of one image or frame group, in patches."""

MAX_SIDE = 512
"""Rows and columns that the rotation is defined for."""


def check_grids(grids: Sequence[Grid], patches: int, config: VisionTowerConfig) -> None:
    """Raise ValueError, naming the item, where grids do not fit the tower or the number of patches."""
    for i, grid in enumerate(grids):
        if len(grid) != 3 or not all(isinstance(n, int) and n > 0 for n in grid):
            raise ValueError(f"image {i}: expected a grid (t, h, w) of positive whole sizes, received {tuple(grid)}")
        t, h, w = grid
        if t > config.pos_emb_time:
            raise ValueError(f"image {i}: expected at most {config.pos_emb_time} frames, received {t}")
        (mh, mw) = config.merge_kernel
        if h % mh or w % mw or max(h, w) > MAX_SIDE:
            raise ValueError(f"image {i}: expected {mh} x {mw} multiples up to {MAX_SIDE} patches, received {h} x {w}")
    total = sum(t * h * w for t, h, w in grids)
    if total != patches:
        raise ValueError(f"patches: expected {total} for the {len(grids)} grids, received {patches}")


class PatchProjection(nn.Module):
    """weight [D, 3, P, P]: one linear map a patch."""

    def __init__(self, hidden: int, patch: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(hidden, 3, patch, patch))
        self.init_parameters(None)

    def init_parameters(self, generator: torch.Generator | None) -> None:
        fill_normal(self.weight, self.std, generator)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches.flatten(1), self.weight.flatten(1))


class PositionTable(nn.Module):
    """weight [rows, columns, D], resampled to every image's grid; plus the fixed code of the frame number."""

    def __init__(self, rows: int, columns: int, hidden: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(rows, columns, hidden))
        self.init_parameters(None)

    def init_parameters(self, generator: torch.Generator | None) -> None:
        fill_normal(self.weight, self.std, generator)

    def forward(self, grid: Grid) -> Tensor:
        """[t * h * w, D] in float32 (float64 for a float64 table)."""
        t, h, w = grid
        table = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        if (h, w) != tuple(table.shape[:2]):
            planes = table.permute(2, 0, 1).unsqueeze(0)
            table = F.interpolate(planes, size=(h, w), mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
        space = table.reshape(1, h * w, -1)
        if t > 1:
            space = space + frame_code(t, space.shape[-1], space.dtype, space.device).unsqueeze(1)
        return space.flatten(0, 1)


def frame_code(frames: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[frames, width]: sin of frame * 10000^(-i / (width / 2)) in the first half, cos in the second."""
    half = width // 2
    omega = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(frames, dtype=torch.float64).unsqueeze(1) * omega
    return torch.cat([angle.sin(), angle.cos()], 1).to(device=device, dtype=dtype)


def rotation(grid: Grid, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin) of every patch's pairs, [t * h * w, head_dim / 2], float64."""
    t, h, w = grid
    theta = 10000.0 ** (-4.0 * torch.arange(head_dim // 4, dtype=torch.float64, device=device) / head_dim)
    row = torch.arange(h, dtype=torch.float64, device=device).repeat_interleave(w)
    column = torch.arange(w, dtype=torch.float64, device=device).repeat(h)
    angle = torch.stack([column.unsqueeze(1) * theta, row.unsqueeze(1) * theta], -1).flatten(1).repeat(t, 1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn adjacent pairs of x [L, H, head_dim] by the angles of `rotation`; computed in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.to(wide).unsqueeze(1), sin.to(wide).unsqueeze(1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


class VisionMLP(nn.Module):
    """fc1(gelu(fc0(x))), the tanh form of gelu."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(hidden, inner, bias=False)
        self.fc1 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """One pre-norm transformer block over the patches of all items; each item attends to itself."""

    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.norm0 = RMSNorm(config.hidden_size, config.norm_eps)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.qkv_hidden_size, bias=False)
        self.wo = nn.Linear(config.qkv_hidden_size, config.hidden_size, bias=False)
        self.norm1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = VisionMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, lengths: list[int], cos: Tensor, sin: Tensor) -> Tensor:
        """x [L, D]; lengths of the items along L; cos, sin [L, head_dim / 2]."""
        q, k, v = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        items = zip(*(t.transpose(0, 1).split(lengths, dim=1) for t in (q, k, v)), strict=True)
        o = torch.cat([F.scaled_dot_product_attention(a, b, c) for a, b, c in items], dim=1)
        x = x + self.wo(o.transpose(0, 1).flatten(1))
        return x + self.mlp(self.norm1(x))


class PatchEmbed(nn.Module):
    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        hidden, std = config.hidden_size, config.initializer_range
        self.proj = PatchProjection(hidden, config.patch_size, std)
        self.pos_emb = PositionTable(config.pos_emb_height, config.pos_emb_width, hidden, std)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        x = self.proj(patches)
        return x + torch.cat([self.pos_emb(grid) for grid in grids]).to(x.dtype)


class VisionEncoder(nn.Module):
    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        self.head_dim = config.qkv_hidden_size // config.num_attention_heads
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        turns = [rotation(grid, self.head_dim, x.device) for grid in grids]
        cos, sin = (torch.cat(parts) for parts in zip(*turns, strict=True))
        lengths = [t * h * w for t, h, w in grids]
        for block in self.blocks:
            x = block(x, lengths, cos, sin)
        return self.final_layernorm(x)


class VisionTower(nn.Module):
    """Patches of all images to merged patches: [L, 3, P, P] -> [sum of (h/2)(w/2), 4, D]."""

    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = VisionEncoder(config)
        init_weights(self.encoder, config.initializer_range)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """patches: [L, 3, P, P], item after item, each in (frame, row, column) order. grids: (t, h, w) of every item.

        Raises: ValueError naming the item whose grid does not fit.
        """
        P = self.config.patch_size
        if patches.dim() != 4 or tuple(patches.shape[1:]) != (3, P, P):
            raise ValueError(f"patches.shape: expected [L, 3, {P}, {P}], received {list(patches.shape)}")
        check_grids(grids, patches.shape[0], self.config)
        if not grids:
            return patches.new_zeros(0, 4, self.config.hidden_size)
        x = self.encoder(self.patch_embed(patches, grids), grids)
        lengths = [t * h * w for t, h, w in grids]
        return torch.cat([self._merge(item, grid) for item, grid in zip(x.split(lengths), grids, strict=True)])

    def _merge(self, x: Tensor, grid: Grid) -> Tensor:
        t, h, w = grid
        mh, mw = self.config.merge_kernel
        x = x.view(t, h // mh, mh, w // mw, mw, -1).mean(0)
        return x.transpose(1, 2).flatten(0, 1).flatten(1, 2)


class Projector(nn.Module):
    """Merged patches [n, 4, D] -> text width [n, text_hidden]: two linear maps around an exact gelu, RMSNorm at the end."""

    def __init__(self, config: VisionTowerConfig, text_hidden: int) -> None:
        super().__init__()
        wide = config.hidden_size * config.merge_kernel[0] * config.merge_kernel[1]
        self.proj = nn.Sequential(
            nn.Linear(wide, wide, bias=False), nn.GELU(), nn.Linear(wide, text_hidden, bias=False)
        )
        self.post_norm = RMSNorm(text_hidden, config.projector_eps)
        init_weights(self, config.initializer_range)

    def forward(self, merged: Tensor) -> Tensor:
        return self.post_norm(self.proj(merged.flatten(1)))

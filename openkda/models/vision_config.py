"""The configuration of the vision tower and its projector."""

from __future__ import annotations

from dataclasses import dataclass

from openkda.models.field_types import check_types


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """MoonViT-V2; the defaults are those of Kimi K3. Raises ValueError for an impossible combination.

    norm_eps: the published tower uses its framework's default, the machine epsilon of float32; 1e-5 would be another model.
    placeholder_id: the token that stands for one image in the text.
    """

    patch_size: int = 14
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_attention_heads: int = 12
    num_hidden_layers: int = 27
    qkv_hidden_size: int = 1536
    pos_emb_height: int = 64
    pos_emb_width: int = 64
    pos_emb_time: int = 4
    merge_kernel: tuple[int, int] = (2, 2)
    norm_eps: float = 2.0**-23
    projector_eps: float = 1e-5
    initializer_range: float = 0.02
    placeholder_id: int = 163605

    def __post_init__(self) -> None:
        if isinstance(self.merge_kernel, list):  # as JSON gives it back
            object.__setattr__(self, "merge_kernel", tuple(self.merge_kernel))
        sizes = ("patch_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
        for name in (*sizes, "qkv_hidden_size", "pos_emb_height", "pos_emb_width", "pos_emb_time"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"vision config: {name}: expected a positive integer, received {value!r}")
        check_types(self, "vision config")
        if self.qkv_hidden_size % (4 * self.num_attention_heads):
            want = f"a multiple of 4 x {self.num_attention_heads} heads (rows and columns rotate pairs)"
            raise ValueError(f"vision config: qkv_hidden_size: expected {want}, received {self.qkv_hidden_size}")
        if self.placeholder_id < 0:
            raise ValueError(f"vision config: placeholder_id: expected a token id, received {self.placeholder_id}")
        for name in ("norm_eps", "projector_eps", "initializer_range"):
            if getattr(self, name) < 0:
                raise ValueError(f"vision config: {name}: expected 0 or more, received {getattr(self, name)}")
        if self.hidden_size % 2:
            raise ValueError(f"vision config: hidden_size: expected an even number, received {self.hidden_size}")
        if len(self.merge_kernel) != 2 or min(self.merge_kernel) < 1:
            raise ValueError(f"vision config: merge_kernel: expected two positive sizes, received {self.merge_kernel}")

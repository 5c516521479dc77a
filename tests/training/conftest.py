"""A small text, a small model, and runs of a few steps: what all training tests share."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openkda.training.options import TrainOptions

MODEL = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "kda_layers": (1,), "full_attn_layers": (2,),
    "kda_head_dim": 16, "num_attention_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 files of a few lines each, with characters of one to four bytes."""
    root = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["def", "return", "x", "é", "漢字", "🙂", "for", "in", "(", ")", ":"]
    for i in range(40):
        lines = (" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 30)))
        path = root / f"part{i % 3}" / f"file{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


@pytest.fixture
def options(text: Path, tmp_path: Path) -> Callable[..., TrainOptions]:
    """Options of a run of six steps into tmp_path/NAME, with any field changed."""

    def make(name: str = "run", **changes: Any) -> TrainOptions:
        fields: dict[str, Any] = {
            "data": (str(text),), "out": str(tmp_path / name), "preset": "tiny", "model": MODEL, "device": "cpu",
            "seq_len": 24, "batch_size": 4, "accumulate": 2, "steps": 6, "lr": 1e-2,
            "log_every": 1, "val_every": 3, "val_tokens": 96, "checkpoint_every": 2, "keep": 9,
        }  # fmt: skip
        return TrainOptions(**(fields | changes))

    return make

"""Our models against the second, independent one (tests/reference_k3.py): both published layouts, from files, in float64."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from openkda.layers.kda import KimiDeltaAttention
from openkda.layers.moe import PackedMXFP4Experts
from openkda.models.hybrid import HybridLM
from openkda.models.make_checkpoint import make_checkpoint, random_model
from openkda.models.multimodal import MultimodalLM
from openkda.models.official import load_official, save_official
from openkda.testing.compare import check_close

sys.path.insert(0, str(Path(__file__).parent.parent))
from reference_k3 import ReferenceKimi

SIZES = {"layers": 5, "hidden": 64, "heads": 2, "head_dim": 16, "experts": 4, "vocab_size": 96, "vision_layers": 2}
SAME = 1e-10


def read(directory: Path) -> tuple[dict, dict[str, Tensor]]:
    """config.json and all tensors as they are in the files."""
    tensors: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(str(file))
    return json.loads((directory / "config.json").read_text()), tensors


@pytest.fixture(scope="module", params=["kimi-k3", "kimi-linear-48b"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("official") / request.param
    make_checkpoint(directory, like=request.param, **SIZES)
    return directory


@pytest.mark.parametrize("impl", ["reference", "chunkwise"])
def test_text_logits(checkpoint: Path, impl: str) -> None:
    model = load_official(checkpoint, vision=False, dtype=torch.float64)
    assert isinstance(model, HybridLM)
    for module in model.modules():
        if isinstance(module, KimiDeltaAttention):
            module.impl = impl
    ids = torch.randint(0, 90, (1, 21), generator=torch.Generator().manual_seed(0))
    want = ReferenceKimi(*read(checkpoint)).logits(ids[0].tolist())
    check_close("logits", model(ids).logits[0], want, SAME)
    with torch.no_grad():
        check_close("two-phase residuals", model(ids).logits[0], want, SAME)
        state, rows = None, []
        for t in range(21):
            out = model(ids[:, t : t + 1], state=state, return_state=True)
            state = out.state
            rows.append(out.logits[0])
    check_close("token by token", torch.cat(rows), want, SAME)


def test_mistakes_show(checkpoint: Path) -> None:
    """The comparison has power: a wrong forget gate, or two swapped gates of one shape, moves the logits by far more."""
    config, tensors = read(checkpoint)
    ids = [3, 1, 4, 1, 5, 9]
    want = ReferenceKimi(config, tensors).logits(ids)
    text = config.get("text_config", config)
    linear = text["linear_attn_config"]
    changed = dict(linear, gate_lower_bound=None if "gate_lower_bound" in linear else -5.0)
    text["linear_attn_config"] = changed
    assert (ReferenceKimi(config, tensors).logits(ids) - want).norm() / want.norm() > 1e-4
    text["linear_attn_config"] = linear
    gate = "g_proj" if linear.get("use_full_rank_gate") else "g_b_proj"
    root = "language_model." if "text_config" in config else ""
    a, b = (f"{root}model.layers.{i}.self_attn.{gate}.weight" for i in (0, 1))
    swapped = {**tensors, a: tensors[b], b: tensors[a]}
    assert (ReferenceKimi(config, swapped).logits(ids) - want).norm() / want.norm() > 1e-4


def test_gradients(tmp_path: Path) -> None:
    """Every parameter's gradient, text and eyes, with plain experts (packed ones have none)."""
    config = make_checkpoint(tmp_path / "packed", **SIZES)
    model = random_model(config.replace(packed_experts=False), dtype=torch.float64)
    assert isinstance(model, MultimodalLM)
    for module in model.modules():
        if isinstance(module, KimiDeltaAttention):
            module.impl = "reference"
    save_official(model, tmp_path / "plain")
    published, tensors = read(tmp_path / "plain")
    for t in tensors.values():
        t.requires_grad_(t.is_floating_point())
    ids, patches, grid = [5, config.vocab_size - 1, 7, 8], torch.randn(8, 3, 14, 14, dtype=torch.float64), (1, 4, 2)
    got = model(torch.tensor([ids]), patches, [grid]).logits[0]
    want = ReferenceKimi(published, tensors).logits(ids, [(patches, grid)])
    check_close("logits", got, want, SAME)
    up = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (got * up).sum().backward()
    (want * up).sum().backward()
    unused = 0
    for name, p in model.named_parameters():
        if ".experts.w" in name:
            at, matrix = name.rsplit(".", 1)
            rows = [tensors[f"{at}.{e}.{matrix}.weight"].grad for e in range(p.shape[0])]
            reference = torch.stack([torch.zeros_like(p[0]) if r is None else r for r in rows])
        else:
            reference = tensors[name].grad
        if reference is None:
            unused += 1
            assert p.grad is None, name
            continue
        assert p.grad is not None, name
        if name.endswith("A_log"):
            reference = reference.flatten()[: p.numel()]
        check_close(name, p.grad, reference, 1e-8)
    assert unused == 2  # layer 0's attention residual, published though it has nothing to mix


def test_images_and_frames(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "k3", **SIZES)
    config, tensors = read(tmp_path / "k3")
    model = load_official(tmp_path / "k3", dtype=torch.float64)
    assert isinstance(model, MultimodalLM)
    reference = ReferenceKimi(config, tensors)
    # One image in the table's own size, one resampled, and a group of three frames.
    grids = [(1, 8, 8), (1, 2, 6), (3, 4, 2)]
    items = [torch.randn(t * h * w, 3, 14, 14, dtype=torch.float64) for t, h, w in grids]
    features = model.image_features(torch.cat(items), grids)
    for x, grid, feature in zip(items, grids, features, strict=True):
        want = reference.image_features(x, grid)
        assert feature.shape == want.shape == (grid[1] * grid[2] // 4, SIZES["hidden"])
        check_close(f"features of {grid}", feature, want, SAME)
    place = config["media_placeholder_token_id"]
    rows = [[place, 1, 2, place, 3], [4, 5, 6, place, 7]]
    out = model(torch.tensor(rows), torch.cat(items), grids)
    for b, (ids, mine) in enumerate(zip(rows, ([0, 1], [2]), strict=True)):
        want = reference.logits(ids, [(items[i], grids[i]) for i in mine])
        got = out.logits[b]
        check_close(f"row {b}", got[got.shape[0] - want.shape[0] :], want, SAME)
        assert not bool(got[: got.shape[0] - want.shape[0]].any())


def test_packed_experts_of_the_checkpoint_stay_packed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "k3", **SIZES)
    model = load_official(tmp_path / "k3")
    experts = [m for m in model.modules() if isinstance(m, PackedMXFP4Experts)]
    assert len(experts) == 4 and all(m.w1_packed.dtype == torch.uint8 for m in experts)

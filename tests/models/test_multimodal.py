"""The multimodal model: where features go, padding, decoding on, and bad input. Values: tests/models/test_reference_k3.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.layers.vision import Grid, VisionTower, check_grids, frame_code, rotation
from openkda.models.make_checkpoint import miniature, random_model
from openkda.models.multimodal import MultimodalLM, insert_features
from openkda.models.vision_config import VisionConfig
from openkda.testing.compare import check_close

CONFIG = miniature("kimi-k3", layers=4, hidden=64, heads=2, head_dim=16, experts=4, vocab_size=64)
PLACE = 63
GRIDS: list[Grid] = [(1, 2, 4), (1, 4, 4)]


@pytest.fixture(scope="module")
def model() -> MultimodalLM:
    model = random_model(CONFIG, dtype=torch.float32)
    assert isinstance(model, MultimodalLM)
    return model


def patches(*grids: Grid) -> Tensor:
    return torch.randn(sum(t * h * w for t, h, w in grids), 3, 14, 14, generator=torch.Generator().manual_seed(0))


def test_insertion() -> None:
    ids = torch.tensor([[9, PLACE, 3, PLACE], [0, 0, PLACE, 5], [0, 7, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]]).bool()
    embeddings = ids.unsqueeze(-1).float()
    images = [torch.full((2, 1), 100.0), torch.full((1, 1), 200.0), torch.full((3, 1), 300.0)]
    got = insert_features(ids, embeddings, images, PLACE, mask)
    assert got.embeddings.squeeze(-1).tolist() == [
        [9, 100, 100, 3, 200],
        [0, 300, 300, 300, 5],
        [0, 0, 7, 8, 9],
    ]
    assert got.mask.tolist() == [[True] * 5, [False, True, True, True, True], [False, False, True, True, True]]
    labels = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    assert got.labels(labels).tolist() == [
        [1, -100, -100, 3, -100],
        [-100, -100, -100, -100, 8],
        [-100, -100, 10, 11, 12],
    ]


@torch.no_grad()
def test_a_row_does_not_depend_on_its_batch_and_decoding_goes_on(model: MultimodalLM) -> None:
    rows = torch.tensor([[1, PLACE, 2, 3], [4, 5, PLACE, 6]])
    x = patches(*GRIDS)
    both = model(rows, x, GRIDS, return_state=True)
    assert both.logits.shape == (2, 7, 64)  # 4 - 1 + 4 tokens; the first row is a column shorter by 2
    first = model(rows[:1], x[:8], GRIDS[:1], return_state=True)
    second = model(rows[1:], x[8:], GRIDS[1:], return_state=True)
    check_close("first", both.logits[0, 2:], first.logits[0], 2e-5)
    check_close("second", both.logits[1], second.logits[0], 2e-5)
    last = model(rows, x, GRIDS, last_only=True).logits
    check_close("last", last[:, 0], both.logits[:, -1], 2e-5)
    token = torch.tensor([[7], [8]])
    step = model.language_model(token, state=both.state).logits
    check_close("decoded", step[:1], model.language_model(token[:1], state=first.state).logits, 2e-5)


@torch.no_grad()
def test_text_alone_is_the_text_model(model: MultimodalLM) -> None:
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids).logits, model.language_model(ids).logits)


def test_gradients_reach_the_eyes() -> None:
    model = random_model(CONFIG.replace(packed_experts=False), dtype=torch.float32)
    model(torch.tensor([[1, PLACE, 2]]), patches(GRIDS[0]), GRIDS[:1]).logits.square().sum().backward()
    for name, p in [*model.vision_tower.named_parameters(), *model.mm_projector.named_parameters()]:
        assert p.grad is not None and bool(p.grad.any()), name


@torch.no_grad()
def test_images_are_strangers_and_frames_are_not() -> None:
    tower = VisionTower(CONFIG.vision).eval()
    x = patches(*GRIDS)
    whole = tower(x, GRIDS)
    check_close("alone", whole[:2], tower(x[:8], GRIDS[:1]), 1e-5)
    frames = patches((2, 2, 2))
    changed = frames.clone()
    changed[4:] += 1
    a, b = (tower(f, [(2, 2, 2)]) for f in (frames, changed))
    assert not torch.allclose(a, b)


def test_rotation_turns_even_pairs_by_column_and_odd_pairs_by_row() -> None:
    cos, sin = rotation((2, 2, 3), 8, torch.device("cpu"))
    angle = torch.atan2(sin, cos)
    slow = 10000.0 ** (-4 / 8)
    at = {(row, column): angle[row * 3 + column] for row in range(2) for column in range(3)}
    for (row, column), got in at.items():
        want = torch.tensor([column, row, column * slow, row * slow], dtype=torch.float64)
        assert torch.allclose(got, want), (row, column)
    assert torch.equal(angle[:6], angle[6:])


def test_frame_code() -> None:
    code = frame_code(4, 8, torch.float64, torch.device("cpu"))
    for f in range(4):
        for i in range(4):
            omega = 10000.0 ** (-i / 4)
            assert code[f, i].item() == pytest.approx(torch.tensor(f * omega).sin().item(), abs=1e-6)
            assert code[f, 4 + i].item() == pytest.approx(torch.tensor(f * omega).cos().item(), abs=1e-6)


@pytest.mark.parametrize("ids", [[[1, 2]], [[PLACE, 1, PLACE]]])
def test_placeholders_must_match_the_images(model: MultimodalLM, ids: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"expected 1, one an image, received [02]"):
        model(torch.tensor(ids), patches(GRIDS[0]), GRIDS[:1])


def test_a_placeholder_without_any_image(model: MultimodalLM) -> None:
    with pytest.raises(ValueError, match="expected 0, one an image, received 1"):
        model(torch.tensor([[1, PLACE]]))


@pytest.mark.parametrize(
    "grids, message",
    [
        ([(1, 2, 4)], "patches: expected 8 for the 1 grids, received 16"),
        ([(1, 2, 4), (1, 1, 8)], "image 1: expected 2 x 2 multiples up to 512 patches, received 1 x 8"),
        ([(5, 2, 4)], "image 0: expected at most 4 frames, received 5"),
        ([(1, 0, 4)], "image 0: expected a grid"),
        ([(1, 2, 514)], "received 2 x 514"),
    ],
)
def test_grids_that_do_not_fit(grids: list[Grid], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_grids(grids, 16, VisionConfig())


def test_impossible_towers() -> None:
    with pytest.raises(ValueError, match="a multiple of 4 x 12 heads"):
        VisionConfig(qkv_hidden_size=1500)
    with pytest.raises(ValueError, match="num_hidden_layers: expected a positive integer"):
        VisionConfig(num_hidden_layers=0)
    with pytest.raises(ValueError, match="expected a config with `vision`"):
        MultimodalLM(CONFIG.replace(vision=None))
    with pytest.raises(ValueError, match=r"patches\.shape: expected \[L, 3, 14, 14\], received \[8, 3, 7, 7\]"):
        VisionTower(CONFIG.vision)(torch.randn(8, 3, 7, 7), GRIDS[:1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (([[1, PLACE]], None, ()), TypeError, "input_ids: expected an int64 or int32 tensor, received list"),
        ((torch.tensor([1, PLACE]), None, ()), ValueError, r"input_ids.shape: expected \[B, T\], received \[2\]"),
        (
            (torch.tensor([[PLACE, 1000]]), "patches", [(1, 2, 2)]),
            ValueError,
            r"expected ids in \[0, .*received .*\.\.1000",
        ),
        ((torch.tensor([[PLACE, -1]]), "patches", [(1, 2, 2)]), ValueError, r"expected ids in \[0, .*received -1\.\."),
        (
            (torch.tensor([[PLACE, 1]]), "pixels", [(1, 2, 2)]),
            TypeError,
            "patches: expected a float tensor .*torch.uint8",
        ),
        (
            (torch.tensor([[PLACE, 1]]), "patches", [(1.0, 2.0, 2.0)]),
            ValueError,
            "image 0: expected a grid .*whole sizes",
        ),
        ((torch.tensor([[PLACE, 1]]), "patches", [(1, 2)]), ValueError, "image 0: expected a grid .*whole sizes"),
    ],
)
def test_malformed_calls(model: MultimodalLM, call: Any, error: type[Exception], message: str) -> None:
    ids, patches, grids = call
    values = {"patches": torch.randn(4, 3, 14, 14), "pixels": torch.zeros(4, 3, 14, 14, dtype=torch.uint8)}.get(patches)
    with pytest.raises(error, match=message):
        model(ids, values, grids)


def test_masks_beside_images(model: MultimodalLM) -> None:
    """Padding on any side is taken out; a mask of another shape used to be stretched over the batch in silence."""
    patches, grids = torch.randn(4, 3, 14, 14), torch.tensor([[1, 2, 2]])
    want = model(torch.tensor([[1, PLACE, 2]]), patches, grids).logits
    ids = torch.tensor([[5, 1, PLACE, 7, 2, 9, 9]])
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 0]]).bool()
    got = model(ids, patches, grids, attention_mask=mask)
    assert torch.equal(got.logits, want)
    whole = model.insert(ids, patches, grids, attention_mask=mask)
    assert whole.labels(torch.arange(7)[None]).tolist() == [[1, -100, 4]]
    with pytest.raises(ValueError, match=r"attention_mask.shape: expected \[B, T\] = \[1, 7\], received \[1, 1\]"):
        model(ids, patches, grids, attention_mask=mask[:, 1:2])
    with pytest.raises(TypeError, match="attention_mask: expected a bool tensor"):
        model(ids, patches, grids, attention_mask=mask.float())

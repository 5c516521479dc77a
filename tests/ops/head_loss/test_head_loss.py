"""The head's loss: its number and gradients, in chunks and at once, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.ops.head_loss.api import head_loss
from openkda.testing.compare import rel

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(N: int, D: int, V: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    h, w = torch.randn(N, D, generator=gen), torch.randn(V, D, generator=gen) * D**-0.5  # logits of size 1
    targets = torch.randint(0, V, (N,), generator=gen).to(device)
    return h.to(device, dtype).requires_grad_(), w.to(device, dtype).requires_grad_(), targets


def gradients(f: Any, h: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss = f(h, w, targets)
    return loss, *torch.autograd.grad(loss / len(targets), (h, w))


def exact(h: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, w = (t.detach().double().requires_grad_() for t in (h, w))
    return gradients(lambda h, w, t: F.cross_entropy(h @ w.T, t, reduction="sum"), h, w, targets)


def test_reference() -> None:
    for got, want in zip(gradients(head_loss, *inputs(7, 12, 33)), exact(*inputs(7, 12, 33)), strict=True):
        assert rel(got, want) < 1e-6
    h, w, targets = inputs(3, 4, 5, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: head_loss(h, w, targets), (h, w))
    assert head_loss(h[:0], w, targets[:0]).item() == 0.0


def test_autocast_rounds_the_product_alone() -> None:
    h, w, targets = inputs(50, 32, 100)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_loss(h, w, targets)
    assert loss.dtype == torch.float32
    want = F.cross_entropy((h.bfloat16() @ w.bfloat16().T).float(), targets, reduction="sum")
    assert torch.equal(loss, want)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"h": torch.zeros(3)}, ValueError, r"h\.shape"),
        ({"weight": torch.zeros(5, 3)}, ValueError, r"\[V, 4\]"),
        ({"targets": torch.zeros(3)}, TypeError, "int64"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, ValueError, "targets"),
        ({"targets": torch.tensor([0, 5, 1])}, ValueError, r"ids in \[0, 5\), received 0..5"),
        ({"targets": torch.tensor([0, -100, 1])}, ValueError, "received -100..1"),
        ({"h": torch.zeros(3, 4, dtype=torch.int64)}, TypeError, r"h\.dtype"),
        ({"impl": "fast"}, ValueError, "impl"),
        ({"impl": "triton"}, NotImplementedError, "CUDA tensors"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"h": torch.zeros(3, 4), "weight": torch.zeros(5, 4), "targets": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        head_loss(**(good | change))


@pytest.mark.parametrize(
    "dtype, limit", [(torch.float32, 2e-6), (torch.bfloat16, 6e-3), (torch.float16, 2e-3)], ids=str
)
@pytest.mark.parametrize("N, D, V", [(70, 64, 260), (300, 96, 5000), (1, 16, 3), (33, 64, 4097)])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.gpu
@needs_gpu
def test_kernel(
    N: int, D: int, V: int, dtype: torch.dtype, limit: float, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 on the same rounded inputs; in one piece and in pieces of a few rows; twice to the bit."""
    from openkda.ops.head_loss.triton import launch

    if chunked:
        monkeypatch.setattr(launch, "LOGITS", 32 * V)
    x = inputs(N, D, V, dtype, "cuda")
    found, again = (gradients(head_loss, *x) for _ in range(2))
    for got, same, want in zip(found, again, exact(*x), strict=True):
        assert rel(got, want) < limit and torch.equal(got, same)
    with torch.no_grad():
        assert rel(head_loss(*x), found[0]) < 1e-6


@pytest.mark.gpu
@needs_gpu
def test_in_a_graph_and_once_only() -> None:
    x = inputs(70, 64, 260, torch.bfloat16, "cuda")
    compiled = torch.compile(lambda h, w, t: head_loss(h * 2, w, t), fullgraph=True)
    for got, want in zip(gradients(compiled, *x), gradients(lambda h, w, t: head_loss(h * 2, w, t), *x), strict=True):
        assert rel(got, want) < 1e-5
    (dh,) = torch.autograd.grad(head_loss(*x).square(), x[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dh.float().sum().backward()

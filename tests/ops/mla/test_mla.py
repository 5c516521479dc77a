"""The latent attention op: both forms against attention written out, the fast paths, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from openkda.ops.mla import api, expanded, packed
from openkda.ops.mla.call import MLACall

mla = jaxtyped(typechecker=beartype)(api.mla)  # the signature's shapes, checked on every call but the bad ones
H, NOPE, SHARED, V, RANK = 3, 16, 8, 12, 20


def inputs(rows: int, queries: int, keys: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(rows + 10 * queries + 100 * keys)
    shapes = ((rows, queries, H, NOPE + SHARED), (rows, keys, RANK + SHARED), (H * (NOPE + V), RANK))
    q, latent, kv_b = (torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in shapes)
    return q, latent, kv_b


def written_out(q: Tensor, latent: Tensor, kv_b: Tensor) -> Tensor:
    """Queries are the last tokens of latent."""
    T, S = q.shape[1], latent.shape[1]
    kv = (latent[..., :RANK] @ kv_b.T).view(*latent.shape[:2], H, NOPE + V)
    k = torch.cat([kv[..., :NOPE], latent[..., None, RANK:].expand(-1, -1, H, -1)], -1)
    score = torch.einsum("nthd,nshd->nhts", q, k) * (NOPE + SHARED) ** -0.5
    future = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    return torch.einsum("nhts,nshv->nthv", score.masked_fill(future, -torch.inf).softmax(-1), kv[..., NOPE:])


def test_whole_sequences() -> None:
    q, latent, kv_b = inputs(2, 11, 11)
    torch.testing.assert_close(mla(q, latent, kv_b), written_out(q, latent, kv_b))


@pytest.mark.parametrize("impl", [None, "expanded", "absorbed"])
@pytest.mark.parametrize("new", [1, 2, 5, 11])
def test_queries_that_continue_a_cache(impl: str | None, new: int) -> None:
    q, latent, kv_b = inputs(2, new, 11)
    want = written_out(q, latent, kv_b)
    cache = torch.cat([latent, torch.full_like(latent, torch.nan)], 1)  # capacity behind the end
    got = mla(q, cache, kv_b, lengths=torch.tensor([11, 11]), impl=impl)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("impl", [None, "expanded", "absorbed"])
@pytest.mark.parametrize("new", [1, 3])
def test_rows_of_different_lengths(impl: str | None, new: int) -> None:
    lengths = (4, 11, 3)
    q, latent, kv_b = inputs(3, new, 11)
    cache = latent.masked_fill(torch.arange(11).view(1, -1, 1) >= torch.tensor(lengths).view(-1, 1, 1), torch.nan)
    got = mla(q, cache, kv_b, lengths=torch.tensor(lengths), impl=impl)
    for n, end in enumerate(lengths):
        torch.testing.assert_close(got[n : n + 1], written_out(q[n : n + 1], latent[n : n + 1, :end], kv_b))


@pytest.mark.parametrize("impl", [None, "expanded", "absorbed"])
def test_packs(impl: str | None) -> None:
    new, held = (2, 0, 1, 8), (5, 3, 0, 1)
    cu = torch.tensor([0, 2, 2, 3, 11])
    ends = torch.tensor(new) + torch.tensor(held)
    q, _, kv_b = inputs(1, 11, 1)
    _, cache, _ = inputs(4, 1, 9)
    got = mla(q, cache, kv_b, lengths=ends, cu_seqlens=cu, impl=impl)
    for n, end in enumerate(ends.tolist()):
        a, b = cu[n], cu[n + 1]
        torch.testing.assert_close(got[:, a:b], written_out(q[:, a:b], cache[n : n + 1, :end], kv_b))
    _, latent, _ = inputs(1, 1, 11)
    if impl != "absorbed":
        got = mla(q, latent, kv_b, cu_seqlens=cu.int(), impl=impl)
        for a, b in ((0, 2), (2, 3), (3, 11)):
            torch.testing.assert_close(got[:, a:b], written_out(q[:, a:b], latent[:, a:b], kv_b))


def test_gradients() -> None:
    q, latent, kv_b = (t.requires_grad_() for t in inputs(1, 4, 4))
    cache = {"lengths": torch.tensor([4])}
    assert torch.autograd.gradcheck(lambda *t: mla(*t), (q, latent, kv_b), fast_mode=True)
    for impl in api.IMPLEMENTATIONS:
        assert torch.autograd.gradcheck(
            lambda q, *t, impl=impl: mla(q[:, -2:], *t, **cache, impl=impl), (q, latent, kv_b), fast_mode=True
        )
    cu = torch.tensor([0, 1, 1, 4])
    assert torch.autograd.gradcheck(lambda *t: mla(*t, cu_seqlens=cu), (q, latent, kv_b), fast_mode=True)


def test_strided_and_empty_inputs() -> None:
    q, latent, kv_b = inputs(2, 5, 5)
    interleaved = torch.full((2, 5, H, 2 * (NOPE + SHARED)), torch.nan, dtype=torch.float64)
    interleaved[..., ::2] = q
    behind = torch.cat([latent, latent * torch.nan], -1)[..., : RANK + SHARED]
    want = mla(q, latent, kv_b)
    torch.testing.assert_close(mla(interleaved[..., ::2], behind, kv_b), want)
    one = {"lengths": torch.tensor([5, 5]), "impl": "absorbed"}
    torch.testing.assert_close(mla(interleaved[:, -1:, :, ::2], behind, kv_b, **one), want[:, -1:])
    assert mla(q[:, :0], latent[:, :0], kv_b).shape == (2, 0, H, V)
    empty = torch.zeros(4, dtype=torch.long)
    assert mla(q[:1, :0], latent[:1, :0], kv_b, cu_seqlens=empty).shape == (1, 0, H, V)


def test_scale_is_that_of_the_whole_key() -> None:
    q, latent, kv_b = inputs(1, 6, 6)
    torch.testing.assert_close(mla(q, latent, kv_b, scale=(NOPE + SHARED) ** -0.5), mla(q, latent, kv_b))
    assert (mla(q, latent, kv_b, scale=(RANK + SHARED) ** -0.5) - mla(q, latent, kv_b)).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:Flash attention")  # torch says why the unpadded call is refused
def test_the_fast_cpu_kernel_is_reached() -> None:
    """Padding to one width is what makes it available: inside this context anything else raises."""
    gen = torch.Generator().manual_seed(0)
    q, latent = torch.randn(1, 40, 2, 48, generator=gen), torch.randn(1, 40, 24 + 16, generator=gen)
    kv_b = torch.randn(2 * (32 + 32), 24, generator=gen)
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        mla(q, latent, kv_b)
        mla(q, latent, kv_b, cu_seqlens=torch.tensor([0, 17, 40]))
        mla(q[:, -9:], latent, kv_b, lengths=torch.tensor([40]), impl="expanded")
        mla(q[:, -1:], latent, kv_b, lengths=torch.tensor([40]), impl="absorbed")
        with pytest.raises(RuntimeError, match=r"[Nn]o available kernel"):
            F.scaled_dot_product_attention(torch.ones(1, 1, 4, 48), torch.ones(1, 1, 4, 48), torch.ones(1, 1, 4, 32))


def test_no_mask_grows_with_the_square_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[int] = []
    real = F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: object) -> Tensor:
        masks.append(0 if attn_mask is None else attn_mask.numel())
        return real(q, k, v, attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    q, latent, kv_b = inputs(1, 256, 256, torch.float32)
    mla(q, latent, kv_b, cu_seqlens=torch.arange(0, 257, 32))
    assert masks == [0] * 8
    monkeypatch.setattr(expanded, "MASK_ENTRIES", 2048)
    got = mla(q[:, -100:], latent, kv_b, lengths=torch.tensor([256]), impl="expanded")
    assert len(masks) == 8 + 13 and max(masks) <= 2048
    torch.testing.assert_close(got, written_out(q[:, -100:], latent, kv_b))


def test_float32_output_and_16_bit_inputs_on_a_cpu() -> None:
    q, latent, kv_b = inputs(1, 30, 30, torch.bfloat16)
    want = written_out(q.double(), latent.double(), kv_b.double())
    wide = mla(q, latent, kv_b, fp32_output=True)
    assert wide.dtype == torch.float32
    assert (wide - want).abs().max() < 1e-5
    narrow = mla(q, latent, kv_b)
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, wide.bfloat16())


def test_float32_output_is_refused_on_a_gpu() -> None:
    with FakeTensorMode():  # shapes and devices without a device
        q = torch.empty(1, 4, H, NOPE + SHARED, device="cuda", dtype=torch.bfloat16)
        latent = torch.empty(1, 4, RANK + SHARED, device="cuda", dtype=torch.bfloat16)
        kv_b = torch.empty(H * (NOPE + V), RANK, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(NotImplementedError, match="mla_fp32_output=False"):
            mla(q, latent, kv_b, fp32_output=True)


def one_document_at_a_time(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> Tensor:
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and cu_q.dtype == cu_k.dtype == torch.int32
    spans = zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True)
    docs = [
        expanded.causal_attention(q[None, a:b], k[None, c:d], v[None, c:d], scale)[0] for a, b, c, d in spans if b > a
    ]
    return torch.cat(docs)


def varlen_as_of_2_10(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):  # no annotations: only the names count
    assert is_causal and max_q == cu_q.diff().max() and max_k == cu_k.diff().max()
    return one_document_at_a_time(q, k, v, cu_q, cu_k, q.shape[-1] ** -0.5)


def varlen_as_of_2_13(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    assert window_size == (-1, 0)
    return one_document_at_a_time(q, k, v, cu_q, cu_k, scale)


@pytest.mark.parametrize("kernel", [varlen_as_of_2_10, varlen_as_of_2_13])
def test_arguments_of_torchs_varlen_kernel(kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU path's layout and arguments, with the kernel replaced by a loop of the same signature."""
    monkeypatch.setattr(packed, "_varlen_attn", lambda: kernel)
    q, latent, kv_b = inputs(1, 11, 11)
    cu = torch.tensor([0, 2, 2, 3, 11])
    got = packed.varlen(MLACall(q, latent, kv_b, 0.3, None, cu))
    torch.testing.assert_close(got, mla(q, latent, kv_b, cu_seqlens=cu, scale=0.3))
    q, cache, kv_b = inputs(3, 2, 9)
    lengths = torch.tensor([9, 2, 5])
    got = packed.varlen(MLACall(q, cache, kv_b, 0.3, lengths, None))
    torch.testing.assert_close(got, mla(q, cache, kv_b, lengths=lengths, scale=0.3))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q": torch.ones(1, 4, H, 7)}, ValueError, r"q \[B, T, H, nope \+ shared\]"),
        ({"q": torch.ones(1, 4, 24)}, ValueError, "4 dimensions"),
        ({"q": torch.ones(1, 4, H, NOPE + SHARED, dtype=torch.long)}, TypeError, "float"),
        ({"kv_b": torch.ones(H * (NOPE + V) + 1, RANK)}, ValueError, "kv_b"),
        ({"kv_b": torch.ones(H * NOPE, RANK)}, ValueError, "kv_b"),
        ({"latent": torch.ones(1, 5, RANK + SHARED)}, ValueError, "without lengths"),
        ({"lengths": torch.tensor([3])}, ValueError, "at least the new tokens"),
        ({"lengths": torch.tensor([5])}, ValueError, "at most S = 4"),
        ({"lengths": torch.tensor([4, 4])}, ValueError, "N = 1"),
        ({"lengths": torch.tensor([4.0])}, TypeError, "int32 or int64"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "T = 4"),
        ({"cu_seqlens": torch.tensor([0, 3, 1, 4])}, ValueError, "never decrease"),
        (
            {"latent": torch.ones(1, 4, RANK + SHARED, dtype=torch.float64)},
            ValueError,
            "dtypes of q, latent, kv_b: expected one",
        ),
        (
            {"latent": torch.ones(1, 4, RANK + SHARED, dtype=torch.bfloat16)},
            ValueError,
            "torch.float32, torch.bfloat16",
        ),
        ({"kv_b": torch.ones(H * (NOPE + V), RANK, dtype=torch.float16)}, ValueError, "torch.float32, torch.float16"),
        (
            {"q": torch.ones(1, 4, H, NOPE + SHARED, dtype=torch.float64)},
            ValueError,
            "received torch.float64, torch.float32",
        ),
        (
            {"latent": torch.ones(1, 4, RANK + SHARED, device="meta")},
            ValueError,
            "latent.device: expected cpu .*received meta",
        ),
        ({"lengths": torch.tensor([4], device="meta")}, ValueError, "lengths.device: expected cpu .*received meta"),
        (
            {"cu_seqlens": torch.tensor([0, 4], device="meta")},
            ValueError,
            "cu_seqlens.device: expected cpu .*received meta",
        ),
        ({"impl": "fused"}, ValueError, "'fused'"),
        ({"impl": "absorbed"}, NotImplementedError, "lengths is None"),
    ],
)
def test_bad_input(change: dict, error: type[Exception], message: str) -> None:
    q, latent, kv_b = inputs(1, 4, 4, torch.float32)
    with pytest.raises(error, match=message):
        api.mla(**{"q": q, "latent": latent, "kv_b": kv_b, **change})


def test_packing_needs_one_row() -> None:
    with pytest.raises(ValueError, match="B = 1"):
        api.mla(*inputs(2, 4, 4), cu_seqlens=torch.tensor([0, 1, 4]))


def test_what_is_no_tensor_or_number_is_named() -> None:
    q, latent, kv_b = torch.zeros(2, 5, 2, 8), torch.zeros(2, 5, 10), torch.zeros(20, 6)
    for i, name in enumerate(("q", "latent", "kv_b")):
        arguments = [q, latent, kv_b]
        arguments[i] = None
        with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, received NoneType"):
            api.mla(*arguments)
    with pytest.raises(TypeError, match=r"lengths: expected a torch\.Tensor, received list"):
        api.mla(q, latent, kv_b, lengths=[5, 5])
    with pytest.raises(ValueError, match="scale: expected a finite number, received nan"):
        api.mla(q, latent, kv_b, scale=float("nan"))

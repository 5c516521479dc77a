"""The contract of multi-head latent attention (MLA) without position encoding: signature, checks, choice of form.

Every token leaves one vector [normalised latent | shared key] behind (512 + 64 values in Kimi K3), from which head h
makes its key [W_UK_h latent | shared key] and its value W_UV_h latent. The shared part is called "rope" in the
published configs; it is never rotated, but it stays in the score.
Source: Kimi Linear report (arXiv 2510.26692), section on MLA with NoPE; Kimi K3 report, section 2.1.2.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openkda.ops.mla import absorbed, expanded, packed
from openkda.ops.mla.call import MLACall
from openkda.ops.packing.api import check_cu_seqlens

__all__ = ["IMPLEMENTATIONS", "mla", "reads_packs"]

IMPLEMENTATIONS = ("expanded", "absorbed")

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTS = (torch.int32, torch.int64)


def mla(
    q: Float[Tensor, "B T H D"],
    latent: Float[Tensor, "N S R"],
    kv_b: Float[Tensor, "HD rank"],
    *,
    scale: float | None = None,
    lengths: Int[Tensor, " _n"] | None = None,
    cu_seqlens: Int[Tensor, " _n1"] | None = None,
    fp32_output: bool = False,
    impl: str | None = None,
) -> Float[Tensor, "B T H V"]:
    """Causal softmax attention of q over latents.

    Args:
        q: [B, T, H, nope + shared], any float dtype, that of latent and kv_b too; 16-bit inputs are computed in float32
            inside on a CPU, where the others may then be float32.
        latent: without `lengths` [B, T, rank + shared], the latents of exactly these tokens (packed like q).
            With `lengths` a cache [N, S, rank + shared] that already holds them: entries [0, lengths[n]) of row n are
            valid and the queries of sequence n are its LAST tokens. What lies behind the end is never read.
        kv_b: [H * (nope + V), rank], the published kv_b_proj weight: W_UK and W_UV of each head, interleaved by head.
        scale: factor on the scores; default (nope + shared) ** -0.5.
        lengths: [N] int. N = B, or the members of the pack.
        cu_seqlens: [N + 1] int, 0 = first <= ... <= last = T: queries packed along T (then B = 1). Values are checked on
            the CPU only.
        fp32_output: return float32 (float64 for float64) and round nothing on the way. On a GPU 16-bit inputs are
            refused until a kernel for them exists.
        impl: "expanded" (keys and values are built) or "absorbed" (heads attend to the latents themselves; needs
            `lengths`); None takes the one with fewer multiplications.

    Returns: [B, T, H, V] in q's dtype. Differentiable in q, latent, kv_b.
    Raises: ValueError, TypeError for malformed input; NotImplementedError for what cannot run.
    """
    for name, t in (("q", q), ("latent", latent), ("kv_b", kv_b)):
        if not isinstance(t, Tensor):
            _bad(name, "a torch.Tensor", type(t).__name__, TypeError)
    call = MLACall(q, latent, kv_b, q.shape[-1] ** -0.5 if scale is None else scale, lengths, cu_seqlens)
    _validate(call)
    _check_impl(call, impl)
    narrow = q.dtype in (torch.float16, torch.bfloat16)
    if fp32_output and narrow and q.is_cuda:
        raise NotImplementedError(
            f"fp32_output with {q.dtype} on {q.device}: no kernel keeps the attention output in float32 there yet; "
            "set mla_fp32_output=False, or run in float32"
        )
    if q.shape[0] == 0 or q.shape[1] == 0:
        o = q.new_zeros(*q.shape[:3], call.v_dim)
    else:
        o = _run(call.in_float32() if narrow and not q.is_cuda else call, impl)
    return o if fp32_output else o.to(q.dtype)


def reads_packs(dtype: torch.dtype, q_dim: int, v_dim: int) -> list[str]:
    """Why a pack of such queries is, on a GPU, cut up at offsets that the host reads, one call a sequence; empty when it is one
    call that waits for nothing."""
    return packed.form_refusals(dtype, q_dim, v_dim)


def _run(call: MLACall, impl: str | None) -> Tensor:
    def dense(call: MLACall, q: Tensor, latent: Tensor) -> Tensor:
        return (absorbed if _absorb(call, q.shape[1], latent.shape[1], impl) else expanded).dense(call, q, latent)

    if call.cu_seqlens is None:
        if call.lengths is None:
            return expanded.dense(call, call.q, call.latent)
        if not call.q.is_cuda and bool((call.lengths == call.lengths[0]).all()):
            return dense(call, call.q, call.latent[:, : int(call.lengths[0])])
        if _one_call(call) and _absorb(call, call.q.shape[1], call.latent.shape[1], impl):
            return absorbed.dense(call, call.q, call.latent, call.lengths)
    if impl != "absorbed" and not packed.varlen_refusals(call):
        return packed.varlen(call)
    return packed.by_sequence(call, dense)


def _absorb(call: MLACall, queries: int, keys: int, impl: str | None) -> bool:
    return absorbed.is_cheaper(call, queries, keys) if impl is None else impl == "absorbed"


def _one_call(call: MLACall) -> bool:
    """Whether rows of different lengths go together, which copies the cache to clear what lies behind the shorter ends.
    On a CPU a row of more than 64 Ki values is faster by itself: 8 rows of 2048 x 576 take 6 ms instead of 59."""
    return call.q.is_cuda or call.latent[0].numel() <= 1 << 16


def _bad(name: str, expected: object, received: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: expected {expected}, received {received}")


def _check_impl(call: MLACall, impl: str | None) -> None:
    if impl is not None and impl not in IMPLEMENTATIONS:
        _bad("impl", "'expanded', 'absorbed' or None", repr(impl))
    if impl == "absorbed" and call.lengths is None:
        raise NotImplementedError("impl='absorbed' cannot run this call: it reads a cache, and lengths is None")


def _validate(call: MLACall) -> None:
    q, latent, kv_b = call.q, call.latent, call.kv_b
    if not -math.inf < call.scale < math.inf:  # in a graph it may be a symbol, which math.isfinite cannot take
        _bad("scale", "a finite number", call.scale)
    for name, t, dims in (("q", q, 4), ("latent", latent, 3), ("kv_b", kv_b, 2)):
        if t.dim() != dims:
            _bad(f"{name}.shape", f"{dims} dimensions", list(t.shape))
        if t.dtype not in _FLOATS:
            _bad(f"{name}.dtype", "a float dtype", t.dtype, TypeError)
        if t.device != q.device:
            _bad(f"{name}.device", f"{q.device} (that of q)", t.device)
    _check_one_dtype(call)
    for name in ("lengths", "cu_seqlens"):
        given = getattr(call, name)
        if isinstance(given, Tensor) and given.device != q.device:
            _bad(f"{name}.device", f"{q.device} (that of q)", given.device)
    B, T, H, _ = q.shape
    if H < 1 or call.shared_dim < 0 or call.nope_dim < 1 or kv_b.shape[0] % H or call.v_dim < 1:
        _bad(
            "q, latent, kv_b shapes",
            "q [B, T, H, nope + shared], latent [N, S, rank + shared], kv_b [H * (nope + V), rank]",
            f"{list(q.shape)}, {list(latent.shape)}, {list(kv_b.shape)}",
        )
    N = check_cu_seqlens(call.cu_seqlens, B, T)
    if call.lengths is None:
        if latent.shape[:2] != (B, T):
            _bad("latent.shape", f"[B, T, R] = [{B}, {T}, {latent.shape[2]}] without lengths", list(latent.shape))
    else:
        _check_lengths(call, call.lengths, N)


def _check_one_dtype(call: MLACall) -> None:
    """One dtype in all products: q's, or float32 where 16-bit inputs are widened. Inside autocast torch sees to it."""
    dtypes = [t.dtype for t in (call.q, call.latent, call.kv_b)]
    widened = not call.q.is_cuda and call.q.dtype in (torch.float16, torch.bfloat16)
    used = {torch.promote_types(d, torch.float32) if widened else d for d in dtypes}
    if len(used) > 1 and not torch.is_autocast_enabled(call.q.device.type):
        _bad("dtypes of q, latent, kv_b", "one", ", ".join(map(str, dtypes)))


def _check_lengths(call: MLACall, lengths: Tensor, N: int) -> None:
    S = call.latent.shape[1]
    if not isinstance(lengths, Tensor):
        _bad("lengths", "a torch.Tensor", type(lengths).__name__, TypeError)
    if lengths.dtype not in _INTS:
        _bad("lengths.dtype", "int32 or int64", lengths.dtype, TypeError)
    if tuple(lengths.shape) != (N,) or call.latent.shape[0] != N:
        _bad("lengths and latent rows", f"N = {N} each", f"{list(lengths.shape)} and {call.latent.shape[0]}")
    if not lengths.is_cuda:
        new = torch.full_like(lengths, call.q.shape[1]) if call.cu_seqlens is None else call.cu_seqlens.diff()
        if bool(((lengths < new) | (lengths > S)).any()):
            _bad("lengths", f"at least the new tokens {new.tolist()} and at most S = {S}", lengths.tolist())

"""Host side: workspace, launch settings, kernel calls. Nothing here waits for the device or reads a tensor's values.

Settings come from the sizes alone. Measured on an H200 at H = 96, T = 8192, K = V = 128 (docs/decisions.md):
chunks of 16 and one warp in `prepare` beat every larger tile (less idle lane work in the scores, more programs in flight).
All of them fit 99 KB of shared memory, so there is one table for every card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from openkda.ops.kda.triton.prepare import prepare_kernel
from openkda.ops.kda.triton.recurrent import DENSE, LISTED, recurrent_kernel
from openkda.ops.kda.triton.scan import scan_kernel
from openkda.ops.triton.api import (
    ceil_div,
    compile_ahead,
    dense,
    empty,
    first_of_kind,
    launch,
    padded,
    rows_of,
    walkable,
)  # fmt: skip

CHUNK = 16
EPS = 1e-6
RECURRENT_UP_TO = 4
"""Dense calls of at most this many tokens a sequence run token by token. Measured on an H200 at H = 96 (us in a graph, token
loop / chunks), batch 1, 8, 32: 3 tokens 8.3 / 17.3, 47 / 57, 170 / 194; 4 tokens 9.8 / 17.3, 55 / 58, 199 / 194; 8 tokens
15.8 / 17.4, 85 / 59, 309 / 199. One number for every batch, so that no sequence's result depends on its neighbours."""
WINDOW = 1 << 30
"""Elements of g per pass: longer dense calls go through the workspace (3.5 x 2 bytes an element) in several windows."""

_TL = {torch.float16: tl.float16, torch.float32: tl.float32}


class Limited:
    """A kernel compiled for at most so many registers a thread, so that more programs share a processor."""

    def __init__(self, kernel: Any, registers: int) -> None:
        self.kernel, self.registers = kernel, registers

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.kernel[grid](*arguments, maxnreg=self.registers, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        return self.kernel.warmup(*arguments, maxnreg=self.registers, **options)


PREPARE = Limited(prepare_kernel, 168)
"""Twelve warps a processor instead of nine, for 12 (softplus 22) spill instructions. H200, H = 96, T = 8192, of the backward,
ms: 211 registers 0.99 (softplus 1.42), 168 0.91 (1.27), 144 1.04 (1.32), 128 1.14 (1.30)."""


@dataclass(slots=True)
class Args:
    """One call. gate: 0 none, 1 softplus, 2 bounded. exact: float32-grade operands instead of float16 ones.

    skip: rows whose slot is -1 compute nothing and give zeros (decoding) instead of starting from zeros (prefill).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu: Tensor | None
    state: Tensor | None
    index: Tensor | None
    positions: Tensor | None
    gate: int
    bound: float
    scale: float
    l2norm: bool
    sigmoid: bool
    want_state: bool
    v_first: bool
    state_dtype: torch.dtype
    exact: bool
    skip: bool

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        B, T, H, K = self.q.shape
        return B, T, H, self.v.shape[2], K, self.v.shape[3]

    @property
    def num_sequences(self) -> int:
        return self.q.shape[0] if self.cu is None else self.cu.numel() - 1


def readable(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    cu: Tensor | None, state: Tensor | None, index: Tensor | None, positions: Tensor | None, *options: Any,
) -> Args:  # fmt: skip
    """`Args` of a call's own tensors, copied where the kernels could not step through them. (Those that a backward is handed
    need not be laid out as those that were saved: hooks on saved tensors may give others.)"""
    return Args(
        walkable(q), walkable(k), walkable(v), walkable(g), beta, packed(A_log), packed(dt_bias),
        packed(cu), state, packed(index), packed(positions), *options,
    )  # fmt: skip


def state_strides(state: Tensor | None, v_first: bool) -> tuple[int, int, int, int]:
    """(sequence, head, K, V) strides of a state tensor."""
    if state is None:
        return 0, 0, 0, 0
    n, h, a, b = state.stride()
    return (n, h, b, a) if v_first else (n, h, a, b)


def new_states(a: Args, rows: int) -> Tensor:
    _, _, _, HV, K, V = a.sizes
    tail = (V, K) if a.v_first else (K, V)
    return torch.empty((rows, HV, *tail), dtype=a.state_dtype, device=a.q.device)


def packed(x: Tensor | None) -> Tensor | None:
    """Without gaps: offsets and slots may be a column of a table."""
    return None if x is None else dense(x)


def forward(a: Args, workspaces: list[Tensor] | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(output, final states or None, states at positions or None); with an index the pool `a.state` is written in place.

    workspaces: receives the memory that the kernels used besides.
    """
    B, T, _, HV, _, V = a.sizes
    o = torch.empty((B, T, HV, V), dtype=a.v.dtype, device=a.q.device)
    N = a.num_sequences
    final = a.state if a.index is not None else (new_states(a, N) if a.want_state else None)
    kept = None if a.positions is None else new_states(a, a.positions.numel())
    if N and HV:
        dense = kept is None and a.cu is None
        if dense and not a.skip and first_of_kind(kind(a), o.device):
            compile_ahead(o.device, *plans(a))
        if dense and T <= RECURRENT_UP_TO:
            launch_recurrent(a, DENSE, N, None, None, a.state, final, a.index, o)
        else:
            _chunked(a, o, final, kept, [] if workspaces is None else workspaces)
    return o, final, kept


def kind(a: Args) -> tuple[object, ...]:
    """What calls of a model have in common, whatever their lengths and batches."""
    tensors = (a.q, a.g, a.beta, a.A_log, a.dt_bias, a.state, a.index)
    options = (a.gate, a.l2norm, a.sigmoid, a.want_state, a.v_first, a.state_dtype, a.exact)
    return ("kda", a.q.device.index, *(None if t is None else t.dtype for t in tensors), *a.sizes[2:], *options)


def plans(a: Args) -> tuple[Callable[[], object], ...]:
    """For `compile_ahead`: both ways through dense calls of this kind."""
    few = replace(a, **{n: getattr(a, n)[:, :CHUNK] for n in ("q", "k", "v", "g", "beta")})
    o = few.v.new_empty(few.v.shape)
    final = a.state if a.index is not None else (new_states(a, a.num_sequences) if a.want_state else None)
    return (
        lambda: launch_recurrent(few, DENSE, a.num_sequences, None, None, a.state, final, a.index, o),
        lambda: _chunked(few, o, final, None, []),
    )


def launch_recurrent(
    a: Args,
    mode: tl.constexpr,
    rows: int,
    first: Tensor | None,
    length: Tensor | None,
    s0: Tensor | None,
    s1: Tensor | None,
    index: Tensor | None,
    o: Tensor | None,
    source: Tensor | None = None,
) -> None:
    """`recurrent_kernel` over `rows` rows. index: slot of s0 and s1; source: slot of s0 when only that is indexed."""
    _, T, H, HV, K, V = a.sizes
    BK, BV = padded(K), min(32, padded(V))
    target = index
    out = a.v if o is None else o
    listed = mode == LISTED
    tensors = (
        a.q, a.k, a.v, a.g, a.beta, a.A_log, a.dt_bias, out, first, length, s0, s1,
        index if source is None else source, target,
    )  # fmt: skip
    steps = (
        *rows_of(a.q), *rows_of(a.k), *rows_of(a.v), *rows_of(a.g), *a.beta.stride(), *rows_of(out),
        *state_strides(s0, a.v_first and not listed), *state_strides(s1, a.v_first),
    )  # fmt: skip
    numbers = (T, a.bound, EPS, a.scale)
    constants = (
        HV, HV // H, K, BK, V, BV, mode.value, a.gate, a.A_log is not None, a.dt_bias is not None, a.l2norm, a.sigmoid,
        s0 is not None, s1 is not None, index is not None, o is not None, a.skip and index is not None,
    )  # fmt: skip
    warps = 4 if BK > 128 else 2
    launch(recurrent_kernel, ceil_div(V, BV) * HV * rows, tensors, steps, numbers, constants, warps, out.device)


def _chunked(a: Args, o: Tensor, final: Tensor | None, kept: Tensor | None, workspaces: list[Tensor]) -> None:
    B, T, _, HV, K, _ = a.sizes
    per_token = B * HV * K
    window = max(WINDOW // max(per_token, 1) // CHUNK, 1) * CHUNK
    if a.cu is not None or kept is not None or window >= T:
        workspaces.append(_pass(a, o, a.state, final, a.index, a.index, kept))
        return
    V = a.v.shape[3]
    carry = torch.empty((B, HV, V, K) if a.v_first else (B, HV, K, V), dtype=torch.float32, device=o.device)
    for t in range(0, T, window):
        part = slice(t, min(t + window, T))
        piece = replace(a, **{n: getattr(a, n)[:, part] for n in ("q", "k", "v", "g", "beta")})
        first, last = t == 0, part.stop == T
        _pass(
            piece, o[:, part], a.state if first else carry, final if last else carry,
            a.index if first else None, a.index if last else None, None,
        )  # fmt: skip


def _pass(
    a: Args, o: Tensor, s0: Tensor | None, s1: Tensor | None, i0: Tensor | None, i1: Tensor | None, kept: Tensor | None
) -> Tensor:
    """prepare, scan, and the walk to the chosen positions. Returns the workspace."""
    B, T, H, HV, K, V = a.sizes
    N, BK, C = a.num_sequences, padded(K), CHUNK
    slots = B * ceil_div(T, C) if a.cu is None else T // C + N
    op = torch.float32 if a.exact else torch.float16
    scaled = not a.l2norm
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=o.device)  # noqa: E731
    wide, blocks = HV * slots * C * BK, HV * slots
    words = aligned(blocks * 2 * C * C), aligned(blocks * BK), aligned(blocks * 3 * C if scaled else 1)
    workspace = torch.empty(3 * wide + sum(words) * 4 // op.itemsize, dtype=op, device=o.device)
    kd, qd, ke, rest = workspace.split_with_sizes([wide, wide, wide, sum(words) * 4 // op.itemsize])
    tm, decay, token = rest.view(torch.float32).split_with_sizes(words)
    small = ("tf32x3" if a.q.dtype == torch.float32 else "bf16x3") if a.exact else "tf32"
    tensors: tuple[Tensor | None, ...] = (
        a.q, a.k, a.g, a.beta, a.A_log, a.dt_bias, a.cu, kd, qd, ke, tm, decay, token, None, None, None,
    )  # fmt: skip
    steps: tuple[int, ...] = (*rows_of(a.q), *rows_of(a.k), *rows_of(a.g), *a.beta.stride())
    constants: tuple[object, ...] = (
        HV, HV // H, K, BK, min(32, BK), C, a.gate, a.A_log is not None, a.dt_bias is not None, a.cu is not None,
        a.l2norm, a.sigmoid, scaled, _TL[op], small, small, small, False,
    )  # fmt: skip
    prepare = prepare_kernel if a.exact else PREPARE
    launch(prepare, slots * HV, tensors, steps, (T, N, slots, a.bound, EPS), constants, 1, o.device)
    leader, places = None, None
    if kept is not None:
        assert a.positions is not None
        places = _places(a, slots)
        leader = places.leader
    held = None if kept is None else new(kept.shape[0], HV, K, V)
    BV, warps, stages = scan_settings(BK, padded(V), small)
    v_first = a.v_first
    tensors = (a.v, o, a.cu, s0, s1, i0, i1, held, leader, kd, qd, ke, tm, decay, token)
    steps = (*rows_of(a.v), *rows_of(o), *state_strides(s0, v_first), *state_strides(s1, v_first))
    constants = (
        HV, K, BK, V, BV, C, a.cu is not None, s0 is not None, s1 is not None, i0 is not None, i1 is not None,
        held is not None, scaled, _TL[op], small, small, stages,
    )  # fmt: skip
    launch(scan_kernel, ceil_div(V, BV) * HV * N, tensors, steps, (T, N, slots, a.scale), constants, warps, o.device)
    if kept is not None and places is not None and kept.shape[0]:
        launch_recurrent(
            a, LISTED, kept.shape[0], places.start, places.length, held, kept, places.own, None, source=places.source
        )
    return workspace


def aligned(length: int) -> int:
    """Elements up to the next 128 bytes or more, so that Triton sees aligned addresses whatever the sizes."""
    return (length + 63) // 64 * 64


def pieces(dtype: torch.dtype, *lengths: int, device: torch.device) -> tuple[Tensor, ...]:
    """One allocation cut into flat tensors of at least these lengths: 2 us of host time and 0.5 for each, where each by itself
    takes 2 and a slice and a view of one take 4."""
    sizes = [aligned(n) for n in lengths]
    return empty((sum(sizes),), dtype, device).split_with_sizes(sizes)


def scan_settings(BK: int, BV: int, precision: str) -> tuple[int, int, int]:
    """(BV, warps, pipeline stages) of `scan_kernel`: the largest tiles whose state and operands stay in registers."""
    if precision == "tf32x3":
        return 16, 8 if BK > 64 else 4, 2
    if precision == "bf16x3":
        return min(32, BV), 8 if BK > 128 else 4, 2
    return min(64, BV), 8 if BK > 128 else 4, 2 if BK > 128 else 3


@dataclass(frozen=True)
class _Places:
    """Where the chosen positions lie: flat start token of their chunk, tokens from there, the row that holds the
    chunk's entering state (`leader` maps chunk slots to such rows), and 0 .. P - 1."""

    start: Tensor
    length: Tensor
    source: Tensor
    own: Tensor
    leader: Tensor


def _places(a: Args, slots: int) -> _Places:
    assert a.positions is not None
    p, T, C = a.positions.long(), a.q.shape[1], CHUNK
    if a.cu is None:
        within, begin = p % T, p - p % T
        slot = p // T * ((T + C - 1) // C) + within // C
    else:
        cu = a.cu.long()
        n = torch.searchsorted(cu, p, right=True) - 1  # the last member that starts at or before p: never an empty one
        begin = cu[n]
        within = p - begin
        slot = begin // C + n + within // C
    own = torch.arange(p.numel(), dtype=torch.int64, device=p.device)
    leader = torch.full((slots,), -1, dtype=torch.int64, device=p.device)
    leader[slot] = own  # of several positions in one chunk any may lead: they want the same state
    return _Places(begin + within // C * C, within % C + 1, leader[slot], own, leader)

"""Host side of the Hopper forward: descriptors, workspace, launches.

    two_pass   prepare 1 | scan 1      | scan 2      | scan 3       one sequence in windows: the next one is prepared on SMs
                         | prepare 2   | prepare 3   |              that the scan leaves
    segments   prepare all but the last segment | ends of those     | merge | scan of all
                                                | prepare the last  |
    fused      ranks of a pack | walk of all chains | walk of those that had near keys, seldom any (apart.py)

A launch "beside" (programmatic dependent launch) may begin once every program of the kernel before has begun, of which it reads
nothing; its last program ends behind that kernel, so that whatever follows waits for both. Nobody waits for another program.
The walk of a pack begins beside its ranks, which it does read: it waits until that kernel is done.

Nothing here waits for the device or reads a tensor's values. Descriptors and pointers are built from addresses alone: a
view of a tensor costs two microseconds, a checked descriptor six, Triton's own launch a hundred, and a call has fifteen
descriptors in two to five launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from openkda.ops.kda.hopper import BOUNDED
from openkda.ops.kda.hopper.backward import REGISTERS
from openkda.ops.kda.hopper.chains import MARKS, kda_ranks_kernel
from openkda.ops.kda.hopper.forward import kda_forward_kernel
from openkda.ops.kda.hopper.levels import kda_prepare_levels_kernel
from openkda.ops.kda.hopper.merge import merge_segments_kernel
from openkda.ops.kda.hopper.prepare import kda_prepare_kernel
from openkda.ops.kda.hopper.scan import kda_ends_kernel, kda_scan_kernel
from openkda.ops.kda.hopper.schedule import (
    CHUNK,
    PADDED,
    SLOT_BYTES,
    Schedule,
    Window,
    ceil_div,
    choose,
    fits_workspace,
    is_split,
    padded_count,
    segment_tokens,
    slots,
    windows,
)
from openkda.ops.kda.hopper.unordered import install
from openkda.ops.kda.triton.launch import plans as portable_plans
from openkda.ops.kda.triton.launch import readable
from openkda.ops.triton.api import as_taken, compile_ahead, enter, first_of_kind, note, plan, planning

_ROWS = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
_HALF = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_MERGED_COLUMNS, _MERGING_WARPS = 16, 8
APART = True
"""Whether chunks of nearly parallel keys get another basis (apart.py)."""
_ROW_BYTES, _QUARTER_BYTES = 3 * 64 * 128 * 2, 6 * 32 * 32 * 2
_OPTIONS = {"num_warps": 4}
_MOST_COMPILED = 4096

_compiled: dict[tuple[Any, ...], Any] = {}


class _Place:
    """Memory inside a workspace: what Triton asks of a tensor, without making one."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


Memory = Tensor | _Place


@dataclass(slots=True)
class _Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    a_log: Tensor
    dt_bias: Tensor
    scale: float
    lower_bound: float
    cu_seqlens: Tensor | None
    gate: int = BOUNDED
    workspaces: list[Tensor] | None = None
    """Receives the memory that the kernels use besides."""

    def uses(self, workspace: Tensor) -> None:
        if self.workspaces is not None:
            self.workspaces.append(workspace)

    def begin(self, tokens: int) -> _Problem:
        """The first tokens of every sequence."""
        q, k, v, g, beta = (x[:, :tokens] for x in (self.q, self.k, self.v, self.g, self.beta))
        return replace(self, q=q, k=k, v=v, g=g, beta=beta, workspaces=None)

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def index(self) -> int:
        return self.q.device.index


@dataclass(slots=True)
class _Operands:
    """Prepared chunks in `workspace`: descriptors of Kt, Qt, Kh [slots HV 3 64, 128] and the quarters of T, M
    [slots HV 6 32, 32] in fp16, decay [slots HV, 128] in fp32. ranks: a pack's sequences by length, [sequences, 4] int32,
    and a counter."""

    workspace: Tensor
    descriptors: tuple[TensorDescriptor, ...]
    decay: _Place
    ranks: _Place


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, *, scale: float,
    lower_bound: float, initial_state: Tensor | None = None, final_state: bool = False,
    cu_seqlens: Tensor | None = None, gate: int = BOUNDED, schedule: Schedule | None = None,
    workspaces: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Output [B, T, HV, 128] and the float32 final states [N, HV, 128, 128] or None.

    q, k, v, g: [B, T, heads, 128] bfloat16, rows may be strided. beta [B, T, HV] any float, a_log [HV] and dt_bias
    [HV * 128] float32, initial_state [N, HV, 128, 128] float32, cu_seqlens [N + 1] int32 or int64: contiguous.
    gate: 2 bounded, 1 softplus, 0 log decays in g (`triton.launch.Args`); the last two have no bound and no fused schedule.
    schedule: "fused", "two_pass" or ("segments", count); None chooses. workspaces: see `_Problem`.
    """
    if v.device.index != torch.cuda.current_device():
        with torch.cuda.device(v.device):
            return forward(
                q, k, v, g, beta, a_log, dt_bias, scale=scale, lower_bound=lower_bound, initial_state=initial_state,
                final_state=final_state, cu_seqlens=cu_seqlens, gate=gate, schedule=schedule, workspaces=workspaces,
            )  # fmt: skip
    if cu_seqlens is not None and cu_seqlens.shape[0] == 2:  # [0, T]: that sequence, which may be cut
        cu_seqlens = None
    p = _Problem(
        _rows(q), _rows(k), _rows(v), _rows(g), beta, a_log, dt_bias, scale, lower_bound, cu_seqlens, gate, workspaces,
    )  # fmt: skip
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shape = (p.sequences, p.heads, 128, 128)
    st = torch.empty(shape, dtype=torch.float32, device=v.device) if final_state else None
    _compile_ahead(p, initial_state, st)
    if schedule is None:
        schedule = choose(p.tokens, p.sequences, p.heads, cu_seqlens is not None, _sm_count(p.index), gate == BOUNDED)
    if schedule == "fused":
        _fused(p, initial_state, st, o)
    elif schedule == "two_pass":
        _two_pass(p, initial_state, st, o)
    else:
        _segments(p, initial_state, st, o, int(schedule[1]))
    return o, st


def _compile_ahead(p: _Problem, s0: Tensor | None, st: Tensor | None) -> None:
    """At the first call of a kind the kernels of all schedules, and for dense calls those of `SHORT` ones."""
    packed = p.cu_seqlens is not None
    optional = (p.cu_seqlens, s0, st)
    kind = (p.index, p.gate, p.beta.dtype, *p.q.shape[2:], p.heads, *(None if t is None else t.dtype for t in optional))
    if not first_of_kind(("hopper", kind), p.q.device):
        return
    few = p.begin(min(p.tokens, CHUNK))
    o = few.v.new_empty(few.v.shape)
    plans: list[Callable[[], object]] = [lambda: _two_pass(few, s0, st, o)]
    if p.gate == BOUNDED:
        plans.append(lambda: _fused(few, s0, st, o))
    if not packed:
        plans.append(lambda: _windows(few, s0, st, o, (Window(1, False),) * 2))
    if not packed and 2 * p.heads <= _sm_count(p.index):  # see `choose`
        plans.append(lambda: _segments(few, s0, st, o, 1))
    if not packed:
        tokens = (p.q, p.k, p.v, p.g, p.beta, p.a_log, p.dt_bias, None, s0, None, None)
        a = readable(
            *tokens, p.gate, p.lower_bound, p.scale, True, True, st is not None, False, torch.float32, False, False
        )
        plans += portable_plans(a)
    compile_ahead(p.q.device, *plans)


@cache
def _sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _rows(x: Tensor) -> Tensor:
    """x itself where the copy engine can walk it as [B T, H 128] (rows may be strided), else a contiguous copy."""
    if x.data_ptr() % 16 == 0:
        if x.is_contiguous():
            return x
        b, t, h, d = x.shape
        dense = x.stride(3) == 1 and (h == 1 or x.stride(2) == d) and (b == 1 or x.stride(0) == t * x.stride(1))
        if dense and x.stride(1) * x.element_size() % 16 == 0 and x.stride(1) >= h * d:
            return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() would return an unaligned x as it is


def _descriptor(base: Memory, rows: int, columns: int, stride: int, block: list[int], layout: Any) -> TensorDescriptor:
    """A matrix of tiles. Without the constructor, whose checks `_rows` and the workspace meet by construction."""
    d = TensorDescriptor.__new__(TensorDescriptor)
    d.base, d.shape, d.strides = base, [rows, columns], [stride, 1]
    d.block_shape, d.layout, d.padding = block, layout, "zero"
    return d


def _tiles(x: Tensor, block: list[int], layout: Any) -> TensorDescriptor:
    """[B, T, H, 128] as a matrix [B T, H 128] of tiles."""
    b, t, h, d = x.shape
    return _descriptor(x, b * t, h * d, _row_stride(x), block, layout)


def _row_stride(x: Tensor) -> int:
    b, t, h, d = x.shape
    return x.stride(1) if b * t > 1 else h * d


def _launch(
    kernel: Any, grid: tuple[int, int], descriptors: tuple[TensorDescriptor, ...], pointers: tuple[Memory, ...],
    sizes: tuple[int, ...], numbers: tuple[int | float, ...], constants: tuple[Any, ...], index: int, **options: int,
) -> None:  # fmt: skip
    """A kernel on the current device, which is `index`. Its parameters, in this order: descriptors (always of the same
    types); pointers; sizes, on whose divisibility Triton specialises; numbers (do_not_specialize, or floats); constants.
    options are the compiler's; of a kernel only launch_pdl may differ from call to call: "beside the one before".

    Once compiled it bypasses Triton's launch, which describes every argument in a string. Not while a profiler listens.
    """
    enter()  # Triton does, when it launches, but encodes descriptors before that
    addresses = [x.data_ptr() for x in pointers]
    traits = [(x.dtype, a % 16 == 0) for x, a in zip(pointers, addresses, strict=True)]
    key = (id(kernel), index, "launch_pdl" in options, sizes, constants, *traits)
    before = len(descriptors) + len(pointers) + len(sizes)
    if planning.jobs is not None:
        install()
        arguments = (*descriptors, *pointers, *sizes, *as_taken(kernel, before, numbers), *constants)
        plan(key, kernel, arguments, **(_OPTIONS | options))
        return
    ready = _compiled.get(key)
    if ready is None or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        numbers = as_taken(kernel, before, numbers)
        install()
        ready = kernel[grid](*descriptors, *pointers, *sizes, *numbers, *constants, **(_OPTIONS | options))
        _compiled[key] = ready
    else:
        ready.run(
            *grid, 1, driver.active.get_current_stream(index), ready.function, ready.packed_metadata, None, None, None,
            *descriptors, *addresses, *sizes, *numbers, *constants,
        )  # fmt: skip
    note(ready, (*grid, 1), descriptors, pointers, (*sizes, *numbers, *constants))


def operands_in(workspace: Tensor, count: int, start: int = 0) -> _Operands:
    """Where everything lies in a workspace of `count` chunks and heads: rows, quarters, decays; behind them a pack's ranks.
    start: chunks and heads of others before these."""
    at = workspace.data_ptr() + start * SLOT_BYTES
    decay = at + count * (_ROW_BYTES + _QUARTER_BYTES)
    return _operands_at(workspace, at, at + count * _ROW_BYTES, decay, at + count * SLOT_BYTES, count)


def _operands_at(workspace: Tensor, rows: int, quarters: int, decay: int, ranks: int, count: int) -> _Operands:
    descriptors = (
        _descriptor(_Place(rows, torch.float16), count * 3 * CHUNK, 128, 128, [CHUNK, 128], _ROWS),
        _descriptor(_Place(quarters, torch.float16), count * 6 * 32, 32, 32, [32, 32], _ROWS),
    )
    return _Operands(workspace, descriptors, _Place(decay, torch.float32), _Place(ranks, torch.int32))


def _without(w: _Operands, first: int, count: int) -> _Operands:
    """The last `count` chunks and heads, behind the first ones."""
    rows, quarters = (d.base.data_ptr() for d in w.descriptors)
    return _operands_at(
        w.workspace, rows + first * _ROW_BYTES, quarters + first * _QUARTER_BYTES, w.decay.address + first * 512,
        w.ranks.address, count,
    )  # fmt: skip


def _workspace(p: _Problem, count: int) -> Tensor:
    """Memory of `count` chunks and heads."""
    ranks = 16 * (1 if p.cu_seqlens is None else PADDED[-1])
    workspace = torch.empty(count * SLOT_BYTES + ranks, dtype=torch.uint8, device=p.q.device)
    p.uses(workspace)
    return workspace


def _prepare(p: _Problem) -> _Operands:
    """Factors of all chunks, in a workspace of their own."""
    count = slots(p.tokens, p.sequences, p.cu_seqlens is not None) * p.heads
    w = operands_in(_workspace(p, count), count)
    _prepare_into(p, w, count)
    return w


def _prepare_into(p: _Problem, w: _Operands, count: int, first: int = 0, *, beside: bool = False) -> None:
    """Factors of `count` chunks and heads, from token `first` of the sequence on. beside: while the scan before still runs,
    on SMs that it leaves."""
    packed = p.cu_seqlens is not None
    n, t, hv = p.sequences, p.tokens, p.heads
    block = [CHUNK, 128]
    matrices = (_tiles(p.q, block, _ROWS), _tiles(p.k, block, _ROWS), _tiles(p.g, block, _ROWS), *w.descriptors)
    pointers = (w.decay, w.ranks, p.beta, p.a_log, p.dt_bias, p.beta if p.cu_seqlens is None else p.cu_seqlens)
    options = {"launch_pdl": True} if beside else {}
    for padded in _vectors(p):
        if p.gate == BOUNDED:
            _launch(
                kda_prepare_kernel, (count, 1), matrices, pointers, (hv, hv // p.q.shape[2]),
                (t, n, first, p.scale, p.lower_bound), (packed, padded, not packed, APART), p.index, **options,
            )  # fmt: skip
        else:
            _launch(
                kda_prepare_levels_kernel, (count, 1), matrices, (*pointers, w.decay), (hv, hv // p.q.shape[2]),
                (t, n, first, p.scale), (packed, padded, not packed, False, p.gate), p.index, maxnreg=REGISTERS, **options,
            )  # fmt: skip


def _vectors(p: _Problem) -> tuple[int, ...]:
    """Lengths of the vector that a kernel holds a pack's lengths in: one, and while planning each that there is."""
    if p.cu_seqlens is None:
        return (PADDED[0],)
    return PADDED if planning.jobs is not None else (padded_count(p.sequences),)


def _scan(
    p: _Problem, w: _Operands, s0: Memory | None, st: Memory | None, o: Tensor, *, n: int, length: int, first: int = 0,
    ranges: int = 1, split: bool | None = None, beside: bool = False,
) -> None:  # fmt: skip
    """One pass over n ranges of `length` tokens from token `first` on (or the pack's), from s0, writing o and, where wanted,
    to st the states of sequences, which are cut into `ranges` each. split: value channels by halves. beside: the next launch
    may begin meanwhile."""
    cu, hv = p.cu_seqlens, p.heads
    block = [CHUNK, 64]
    decay = w.decay
    sms = _sm_count(p.index)
    split = is_split(n * hv, sms) if split is None else split
    for halves in {is_split(hv, sms), False} if planning.jobs is not None else {split}:
        _launch(
            kda_scan_kernel, (n * hv * (2 if halves else 1), 1),
            (*w.descriptors, _tiles(p.v, block, _HALF), _tiles(o, block, _HALF)),
            (decay, w.ranks, o, decay if s0 is None else s0, decay if st is None else st),
            (hv,), (length, p.q.shape[0] * p.tokens, first, int(s0 is not None), 0 if st is None else ranges, int(beside)),
            (cu is not None, halves), p.index,
        )  # fmt: skip


def _two_pass(p: _Problem, s0: Tensor | None, st: Tensor | None, o: Tensor) -> None:
    if p.cu_seqlens is None and p.q.shape[0] == 1 and planning.jobs is None:
        plan = windows(ceil_div(p.tokens, CHUNK), p.heads, _sm_count(p.index))
        if len(plan) > 1:
            return _windows(p, s0, st, o, plan)
    return _scan(p, _prepare(p), s0, st, o, n=p.sequences, length=p.tokens)


def _windows(p: _Problem, s0: Tensor | None, st: Tensor | None, o: Tensor, plan: tuple[Window, ...]) -> None:
    """One sequence, window after window. A window's factors are prepared while the one before is scanned, in memory that this
    one does not read: all windows have their own, or, where that would be too much, every other one the same. Prepared behind
    it they all have the same."""
    hv = p.heads
    total = sum(w.chunks for w in plan)
    own = fits_workspace(total * hv)
    places = 2 if plan[-1].beside else 1
    workspace = _workspace(p, (total if own else places * plan[0].chunks) * hv)
    carry = st
    if carry is None and len(plan) > 1:
        carry = torch.empty(1, hv, 128, 128, dtype=torch.float32, device=o.device)
        p.uses(carry)
    start = 0
    for i, (chunks, split, beside) in enumerate(plan):
        here = start if own else i % places * plan[0].chunks
        w = operands_in(workspace, chunks * hv, start=here * hv)
        _prepare_into(p, w, chunks * hv, start * CHUNK, beside=i > 0 and beside)
        more = i + 1 < len(plan) and plan[i + 1].beside
        entering = s0 if i == 0 else carry  # a program reads its own slice of the state before it writes it
        _scan(
            p, w, entering, carry, o, n=1, length=chunks * CHUNK, first=start * CHUNK, split=split, beside=more,
        )  # fmt: skip
        start += chunks


def _segments(p: _Problem, s0: Tensor | None, st: Tensor | None, o: Tensor, count: int) -> None:
    """Exact two-level scan: every segment's own state and transition, the merge, then the scan from true states."""
    b, t, hv = p.q.shape[0], p.tokens, p.heads
    length = segment_tokens(t, count)
    if p.cu_seqlens is not None:
        raise ValueError("segments need dense sequences, received cu_seqlens")
    if t % length and b > 1 and planning.jobs is None:
        raise ValueError(f"segments of {length} tokens need T divisible by it when B > 1, received B={b}, T={t}")
    count = ceil_div(t, length)
    n, chunks = b * count, slots(t, b, False) * hv
    w = operands_in(_workspace(p, chunks), chunks)
    early = (count - 1) * length // CHUNK * hv if b == 1 and count > 1 else chunks
    _prepare_into(p, w, early)
    entering: Memory | None = s0
    if count > 1 or planning.jobs is not None:
        size = n * hv * 128 * 128
        states = torch.empty(3 * size, dtype=torch.float32, device=o.device)
        p.uses(states)
        local, transition, entering = (_Place(states.data_ptr() + i * size * 4, torch.float32) for i in range(3))
        _launch(
            kda_ends_kernel, (2 * b * (count - 1) * hv, 1), (*w.descriptors, _tiles(p.v, [CHUNK, 64], _HALF)),
            (w.decay, local, transition), (hv,), (length, b * t, count, int(early < chunks)), (), p.index,
        )  # fmt: skip
        if early < chunks:  # nobody asks where the last segment ends: it is prepared on SMs that the others leave
            late = _without(w, early, chunks - early)
            _prepare_into(p, late, chunks - early, early // hv * CHUNK, beside=True)
        _launch(
            merge_segments_kernel, (b * hv, 128 // _MERGED_COLUMNS), (),
            (transition, local, local if s0 is None else s0, entering),
            (hv,), (count,), (s0 is not None, _MERGED_COLUMNS), p.index, num_warps=_MERGING_WARPS,
        )  # fmt: skip
    _scan(p, w, entering, st, o, n=n, length=length, ranges=count)


def _fused(p: _Problem, s0: Tensor | None, st: Tensor | None, o: Tensor) -> None:
    n, hv, cu = p.sequences, p.heads, p.cu_seqlens
    block, half = [CHUNK, 128], [CHUNK, 64]
    ranks = torch.empty(MARKS.value + 4 * n * hv, dtype=torch.int32, device=o.device)
    p.uses(ranks)
    if cu is not None:
        for padded in _vectors(p):
            _launch(kda_ranks_kernel, (1, 1), (), (ranks, cu), (), (n,), (padded,), p.index)
    matrices = (
        _tiles(p.q, block, _ROWS), _tiles(p.k, block, _ROWS), _tiles(p.g, block, _ROWS), _tiles(p.v, half, _HALF),
        _tiles(o, half, _HALF),
    )  # fmt: skip
    pointers = (o, p.beta, p.a_log, p.dt_bias, o if s0 is None else s0, o if st is None else st, ranks)
    for again in (False, True) if APART else (False,):
        options = {"launch_pdl": True} if cu is not None and not again else {}
        _launch(
            kda_forward_kernel, (min(n * hv, _sm_count(p.index)), 1), matrices, pointers, (hv, hv // p.q.shape[2]),
            (p.tokens, n * hv, p.scale, p.lower_bound),
            (0 if s0 is None else 1, st is not None, cu is not None, again), p.index, **options,
        )  # fmt: skip

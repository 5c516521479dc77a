"""Host side of the Hopper forward: which schedule, descriptors, workspace, launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openkda.ops.kda.hopper.forward import kda_forward_kernel
from openkda.ops.kda.hopper.merge import merge_segments_kernel
from openkda.ops.kda.hopper.twopass import kda_prepare_kernel, kda_scan_kernel

_ROWS = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
_HALF = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
CHUNK = 64
WORKSPACE = 2 << 30
"""Bytes of prepared chunks alive at once; a longer sequence goes through in windows of tokens, carrying its state."""
SLOT_BYTES = 65 * 1024
FEW_CHUNKS = 32
"""Sequences below this many chunks are not cut into segments: the two extra passes and the merge would not pay."""


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x itself where the copy engine can walk it as [B T, H 128] (rows may be strided), else a contiguous copy."""
    b, t, h, d = x.shape
    dense = x.stride(3) == 1 and (h == 1 or x.stride(2) == d) and (b == 1 or x.stride(0) == t * x.stride(1))
    aligned = x.data_ptr() % 16 == 0 and x.stride(1) * x.element_size() % 16 == 0 and x.stride(1) >= h * d
    return x if dense and aligned else x.contiguous()


def _tiles(x: torch.Tensor, block: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """[B, T, H, 128] as a matrix [B T, H 128] of tiles."""
    b, t, h, d = x.shape
    return TensorDescriptor(x, [b * t, h * d], [x.stride(1) if b * t > 1 else h * d, 1], block, layout)


@dataclass(frozen=True)
class _Operands:
    """Prepared chunks: Kt, Qt, Kh [slots HV 64, 128] and T, M [slots HV 64, 64] in fp16, decay [slots HV, 128]."""

    descriptors: tuple[TensorDescriptor, ...]
    decay: torch.Tensor


@dataclass(frozen=True)
class _Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    scale: float
    lower_bound: float
    cu_seqlens: torch.Tensor | None

    def window(self, start: int, stop: int) -> _Problem:
        """Tokens start .. stop of a single dense sequence."""
        tokens = {n: getattr(self, n)[:, start:stop] for n in ("q", "k", "v", "g", "beta")}
        return replace(self, **tokens)

    @property
    def slots(self) -> int:
        """Chunks of the whole call; an upper bound for a pack, whose lengths only the device knows."""
        b, t = self.q.shape[:2]
        return b * triton.cdiv(t, CHUNK) if self.cu_seqlens is None else t // CHUNK + self.sequences

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1


def _pack_width(sequences: int) -> int:
    """Length of the vector that holds a pack's lengths: few values, so that few kernels are compiled."""
    return max(16, triton.next_power_of_2(sequences))


def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _prepare(p: _Problem) -> _Operands:
    _, t, h, _ = p.q.shape
    hv = p.v.shape[2]
    n = p.sequences
    slots = p.slots
    rows = slots * hv * CHUNK
    sizes = [(rows, 128)] * 3 + [(rows, CHUNK)] * 2
    operands = [torch.empty(size, dtype=torch.float16, device=p.q.device) for size in sizes]
    decay = torch.empty(slots * hv, 128, dtype=torch.float32, device=p.q.device)
    desc = tuple(
        TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [CHUNK, x.shape[1]], _ROWS) for x in operands
    )  # fmt: skip
    kda_prepare_kernel[(slots * hv,)](
        *(_tiles(x, [CHUNK, 128], _ROWS) for x in (p.q, p.k, p.g)), *desc, decay, p.beta, p.a_log, p.dt_bias,
        p.beta if p.cu_seqlens is None else p.cu_seqlens, t, hv, hv // h, n, p.scale, p.lower_bound,
        VARLEN=p.cu_seqlens is not None, NP=_pack_width(n), num_warps=4,
    )  # fmt: skip
    return _Operands(desc, decay)


def _scan(p: _Problem, w: _Operands, n, t, cu, s0, st, o, *, state_in: int, values=True, output=True):
    """One pass over n ranges of t tokens (or cu's), from s0, writing states to st and outputs to o."""
    hv = p.v.shape[2]
    split = 2 * n * hv <= _sm_count(p.q.device)
    kda_scan_kernel[(n * hv * (2 if split else 1),)](
        *w.descriptors, w.decay, _tiles(p.v, [CHUNK, 64], _HALF), _tiles(o, [CHUNK, 64], _HALF), o,
        w.decay if s0 is None else s0, w.decay if st is None else st, w.decay if cu is None else cu, t, hv, n,
        STATE_IN=state_in, STATE_OUT=st is not None, VARLEN=cu is not None, NP=_pack_width(n),
        SPLIT=split, VALUES=values, OUTPUT=output, num_warps=4,
    )  # fmt: skip


def _two_pass(p: _Problem, s0, st, o):
    t, hv = p.q.shape[1], p.v.shape[2]
    if p.slots * hv * SLOT_BYTES <= WORKSPACE or p.cu_seqlens is not None or p.q.shape[0] > 1:
        _scan(p, _prepare(p), p.sequences, t, p.cu_seqlens, s0, st, o, state_in=0 if s0 is None else 1)
        return
    width = max(WORKSPACE // (hv * SLOT_BYTES), 1) * CHUNK
    carry = torch.empty(1, hv, 128, 128, dtype=torch.float32, device=o.device) if st is None else st
    for start in range(0, t, width):
        part = p.window(start, min(start + width, t))
        entering = s0 if start == 0 else carry  # a program reads its own slice of the state before it writes it
        state_in = 0 if entering is None else 1
        _scan(
            part,
            _prepare(part),
            1,
            part.q.shape[1],
            None,
            entering,
            carry,
            o[:, start : start + width],
            state_in=state_in,
        )


def _segments(p: _Problem, s0, st, o, count: int):
    """Exact two-level scan: every segment's own state and transition, the merge, then the scan from true states."""
    b, t, _, _ = p.q.shape
    hv = p.v.shape[2]
    length = triton.cdiv(triton.cdiv(t, CHUNK), count) * CHUNK
    count = triton.cdiv(t, length)
    cu = None
    if t % length:
        if b > 1:
            raise ValueError(f"segments of {length} tokens need T divisible by it when B > 1, got B={b}, T={t}")
        cu = (torch.arange(count + 1, device=p.q.device, dtype=torch.int32) * length).clamp_(max=t)
    n = b * count
    w = _prepare(p)
    shape = (n, hv, 128, 128)
    local, transition, entering = (torch.empty(shape, dtype=torch.float32, device=p.q.device) for _ in range(3))
    _scan(p, w, n, length, cu, None, local, o, state_in=0, output=False)
    _scan(p, w, n, length, cu, None, transition, o, state_in=2, values=False, output=False)
    merge_segments_kernel[(b * hv, 4)](
        transition, local, local if s0 is None else s0, entering, local if st is None else st, count, hv,
        HAS_S0=s0 is not None, HAS_ST=st is not None, BV=32, num_warps=4,
    )  # fmt: skip
    _scan(p, w, n, length, cu, entering, None, o, state_in=1)


def _fused(p: _Problem, s0, st, o):
    _, t, h, _ = p.q.shape
    hv = p.v.shape[2]
    kda_forward_kernel[(p.sequences * hv,)](
        *(_tiles(x, [CHUNK, 128], _ROWS) for x in (p.q, p.k, p.g)),
        _tiles(p.v, [CHUNK, 64], _HALF), _tiles(o, [CHUNK, 64], _HALF), o, p.beta, p.a_log, p.dt_bias,
        o if s0 is None else s0, o if st is None else st, p.beta if p.cu_seqlens is None else p.cu_seqlens,
        t, hv, hv // h, p.scale, p.lower_bound,
        STATE_IN=0 if s0 is None else 1, STATE_OUT=st is not None, VARLEN=p.cu_seqlens is not None, num_warps=4,
    )  # fmt: skip


def choose(p: _Problem) -> str | tuple[str, int]:
    """The schedule, from sizes alone: never from the gate, so that slow and fast decay take the same time."""
    dense = p.cu_seqlens is None
    chains = p.sequences * p.v.shape[2]
    chunks = triton.cdiv(p.q.shape[1], CHUNK)
    fits = p.slots * p.v.shape[2] * SLOT_BYTES <= WORKSPACE
    segments = max(min(_sm_count(p.q.device) // chains, chunks // 4), 1)
    even = p.q.shape[0] == 1 or p.q.shape[1] % (segments * CHUNK) == 0
    if dense and fits and segments >= 4 and chunks >= FEW_CHUNKS and even:
        return ("segments", segments)
    return "two_pass" if fits or (dense and p.q.shape[0] == 1) else "fused"


def forward(q, k, v, g, beta, a_log, dt_bias, *, scale, lower_bound, initial_state=None, final_state=False,
            cu_seqlens=None, schedule=None):  # fmt: skip
    """Runs the forward on bf16 inputs (rows may be strided); returns the output and the float32 final state or None.

    schedule: "fused", "two_pass", or ("segments", count); None chooses.
    """
    p = _Problem(_rows(q), _rows(k), _rows(v), _rows(g), beta, a_log, dt_bias, scale, lower_bound, cu_seqlens)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shape = (p.sequences, v.shape[2], 128, 128)
    st = torch.empty(shape, dtype=torch.float32, device=q.device) if final_state else None
    schedule = choose(p) if schedule is None else schedule
    if schedule == "fused":
        _fused(p, initial_state, st, o)
    elif schedule == "two_pass":
        _two_pass(p, initial_state, st, o)
    else:
        _segments(p, initial_state, st, o, schedule[1])
    return o, st

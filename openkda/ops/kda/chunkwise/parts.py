"""Independent parts of a call, heads and sequences, each worked off on one core.

torch's own threads would share every single small product: thousands of meetings a call, and at each of them a core that some
other program holds is waited for (measured with two threads on two busy cores: 50 times slower than one thread). Here
the threads meet once, at the end.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from openkda.ops.kda.chunkwise.backward import segment_backward
from openkda.ops.kda.chunkwise.forward import Settings, Tokens, factors, prologue, walk
from openkda.ops.kda.chunkwise.plan import Block, Segment, make_plan

Saved = list[tuple[Tensor, Tensor]]  # of every segment: its errors E and the states that entered its chunks
Result = TypeVar("Result")

SERIAL_BELOW = 1 << 17
"""Values of [tokens, HV, K] under which starting threads costs more than it saves."""


@dataclass(frozen=True)
class Part:
    """Some sequences (a block) and some heads: the value heads are those that read the query heads."""

    block: Block
    heads: slice
    value_heads: slice

    def of(self, t: Tokens) -> Tokens:
        """Views of this part's heads. The gate's tensors as [HV] and [HV, K]."""
        h, hv, HV = self.heads, self.value_heads, t.g.shape[1]
        A_log = None if t.A_log is None else t.A_log.reshape(HV)[hv]
        dt_bias = None if t.dt_bias is None else t.dt_bias.reshape(HV, -1)[hv]
        return Tokens(t.q[:, h], t.k[:, h], t.v[:, hv], t.g[:, hv], t.beta[:, hv], A_log, dt_bias)


def make_parts(spans: list[tuple[int, int]], t: Tokens, value_bytes: int) -> list[Part]:
    """As many parts as torch has threads where the heads and then the sequences allow it; one thread gets whole heads."""
    R, HV, K = t.g.shape
    H = t.q.shape[1]
    threads = torch.get_num_threads() if t.v.device.type == "cpu" and R * HV * K >= SERIAL_BELOW else 1
    shares = min(threads, H)
    edges = [H * i // shares for i in range(shares + 1)]
    widest = max(b - a for a, b in itertools.pairwise(edges)) * (HV // H)
    plan = make_plan(spans, widest * K * value_bytes, t.v.device.type, -(-threads // shares))
    ranges = [(slice(a, b), slice(a * HV // H, b * HV // H)) for a, b in itertools.pairwise(edges)]
    return [Part(block, *heads) for block in plan for heads in ranges]


def run_parts(tasks: Sequence[Callable[[], Result]], like: Tensor) -> list[Result]:
    """Results of the tasks in order; on the CPU as many tasks at a time as torch has threads, each with one of them."""
    threads = torch.get_num_threads()
    workers = min(threads, len(tasks)) if like.device.type == "cpu" else 1
    if workers < 2:
        return [task() for task in tasks]
    waiting = deque(enumerate(tasks))
    results: dict[int, Result] = {}
    failures: list[BaseException] = []
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def work() -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            while waiting and not failures:
                try:
                    i, task = waiting.popleft()
                except IndexError:  # another worker took the last one
                    return
                try:
                    results[i] = task()
                except BaseException as failure:
                    failures.append(failure)

    others = [threading.Thread(target=work, name=f"kda-{i}") for i in range(workers - 1)]
    for thread in others:
        thread.start()
    try:
        work()
    finally:
        for thread in others:
            thread.join()
        torch.set_num_threads(threads)
    if failures:
        raise failures[0]
    return [results[i] for i in range(len(tasks))]


def forward_part(p: Part, t: Tokens, opts: Settings, S: Tensor, o: Tensor, keep: bool) -> Saved:
    """Writes this part of the states S [N, HV, K, V] and of the outputs o [R, HV, V]; returns what its backward needs."""
    t = p.of(t)
    members = torch.tensor(p.block.sequences, device=S.device)
    state = S[members, p.value_heads].flatten(0, 1)
    saved: Saved = []
    for seg in p.block.segments():
        rows = _rows(seg, t)
        q, k, log_a, b = prologue(rows, opts)
        O, E, states = walk(factors(rows, opts, q, k, seg.clear_padding(log_a), b), state, seg.count)
        seg.put(O.unflatten(1, (len(members), -1)).transpose(2, 3), o[:, p.value_heads])
        state = states[-1]
        if keep:
            saved.append((E, states[:-1]))
    S[members, p.value_heads] = state.view(len(members), -1, *S.shape[2:])
    return saved


def backward_part(
    p: Part, t: Tokens, opts: Settings, saved: Saved, do: Tensor, dS: Tensor, rows: Sequence[Tensor]
) -> list[Tensor | None]:
    """Writes this part of the gradients of q, k, v, g, beta (rows) and turns its part of dS [N, HV, K, V] from the leaving
    states' gradient into the entering ones'; returns those of A_log [HV] and dt_bias [HV, K], summed over its tokens."""
    t, do = p.of(t), do[:, p.value_heads]
    members = torch.tensor(p.block.sequences, device=dS.device)
    dstate = dS[members, p.value_heads].flatten(0, 1)
    sums: list[Tensor | None] = [None, None]
    for seg, (E, states) in zip(reversed(list(p.block.segments())), reversed(saved), strict=True):
        part, dstate = segment_backward(seg, _rows(seg, t), opts, E, states, seg.take(do), dstate)
        for i, (into, g) in enumerate(zip(rows, part[:5], strict=True)):
            assert g is not None  # for the type checker: only a gate's tensors may be missing
            seg.put(g, into[:, p.heads if i < 2 else p.value_heads])
        sums = [g if s is None or g is None else s + g for s, g in zip(sums, part[5:], strict=True)]
    dS[members, p.value_heads] = dstate.view(len(members), -1, *dS.shape[2:])
    return sums


def _rows(seg: Segment, t: Tokens) -> Tokens:
    q, k, v, g, beta = (seg.take(x) for x in t[:5])
    return Tokens(q, k, v, g, beta, t.A_log, t.dt_bias)

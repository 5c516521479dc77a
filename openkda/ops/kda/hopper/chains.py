"""Chains are what a state runs along: one value head of one sequence. Which of them a program takes, in which order."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openkda.ops.kda.hopper.factors import FLAT1, barriers
from openkda.ops.kda.hopper.instructions import let_dependents_start

LSEQ = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
LENTRY = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
MARKS = gl.constexpr(4 + 4 * 1024)  # behind the counter and the ranks of the longest pack (PADDED): four marks a ticket


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def sums(x):
    """Of a vector's elements up to and including each."""
    return gl.associative_scan(x, 0, _add)


@gluon.jit
def chunks_before(cu_ptr, n_seqs, NP: gl.constexpr):
    """Per sequence of a pack: chunks up to and including it."""
    i = gl.arange(0, NP, layout=LSEQ)
    start = gl.load(cu_ptr + i, mask=i < n_seqs, other=0).to(gl.int32)
    stop = gl.load(cu_ptr + i + 1, mask=i < n_seqs, other=0).to(gl.int32)
    return sums((stop - start + 63) // 64)


@gluon.jit
def write_ranks(ranks_ptr, cu_ptr, n_seqs, NP: gl.constexpr):
    """A pack's sequences as (sequence, first slot, first row, length), longest first, that none is left over at the end;
    with more than 64 of them only the empty ones come last."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    i = gl.arange(0, NP, layout=LSEQ)
    real = i < n_seqs
    start = gl.load(cu_ptr + i, mask=real, other=0).to(gl.int32)
    length = gl.load(cu_ptr + i + 1, mask=real, other=0).to(gl.int32) - start
    chunks = (length + 63) // 64
    if NP <= 64:
        j = gl.arange(0, NP, layout=gl.SliceLayout(0, L))
        mine = gl.where(real, length, -1)
        other = gl.convert_layout(mine, gl.SliceLayout(0, L))[None, :]
        mine = gl.convert_layout(mine, gl.SliceLayout(1, L))[:, None]
        at = gl.convert_layout(i, gl.SliceLayout(1, L))[:, None]
        longer = (other > mine) | ((other == mine) & (j[None, :] < at))
        place = gl.convert_layout(gl.sum(longer.to(gl.int32), axis=1), LSEQ)
    else:
        some = (length > 0).to(gl.int32)
        none = real.to(gl.int32) - some
        place = gl.where(length > 0, sums(some), gl.sum(some, axis=0) + sums(none)) - 1
    at = ranks_ptr + place * 4
    gl.store(at, i, mask=real)
    gl.store(at + 1, sums(chunks) - chunks, mask=real)
    gl.store(at + 2, start, mask=real)
    gl.store(at + 3, length, mask=real)


@gluon.jit(do_not_specialize=["n_seqs"])
def kda_ranks_kernel(ranks_ptr, cu_ptr, n_seqs, NP: gl.constexpr):
    """For `kda_forward_kernel`: a counter of tickets, and 16 bytes behind it the ranks."""
    let_dependents_start()
    write_ranks(ranks_ptr + 4, cu_ptr, n_seqs, NP)
    gl.store(ranks_ptr, 0)


@gluon.jit
def chain(ranks_ptr, ticket, chains, HV, T, VARLEN: gl.constexpr):
    """(sequence, value head, first row, length) of a ticket; length -1: no more. ranks_ptr: of `kda_ranks_kernel`."""
    i = gl.arange(0, 4, layout=LENTRY)
    seq = ticket // HV
    if VARLEN:
        entry = gl.load(ranks_ptr + 4 + seq * 4 + i, mask=(ticket < chains) & (i < 4), other=-1)
    else:
        entry = gl.where(i == 0, seq, gl.where(i == 2, seq * T, gl.where(ticket < chains, T, -1)))
    return gl.where(i == 1, ticket % HV, entry)


@gluon.jit
def marked(ranks_ptr, ticket, chains, step):
    """The first of the tickets ticket, ticket + step, .. that has a mark; `chains` if none has."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    i = gl.arange(0, 32, layout=gl.SliceLayout(1, L))
    tile = gl.arange(0, 4, layout=gl.SliceLayout(0, L))
    found = ticket * 0 + chains
    while ticket < chains:
        at = ticket + i * step
        marks = gl.load(ranks_ptr + MARKS + (at[:, None] * 4 + tile[None, :]), mask=(at < chains)[:, None], other=0)
        found = gl.min(gl.where(gl.max(marks, axis=1) > 0, at, chains), axis=0)
        ticket = gl.where(found < chains, chains, ticket + 32 * step)
    return found


@gluon.jit
def field(x, i: gl.constexpr):
    """Element i of four as a scalar."""
    return gl.sum(gl.where(gl.arange(0, 4, layout=LENTRY) == i, x, 0), axis=0)


@gluon.jit
def turns(readers: gl.constexpr):
    """Where chains are announced to `readers` roles: two entries with their barriers."""
    next_s = gl.allocate_shared_memory(gl.int32, [2, 4], FLAT1)
    return next_s, barriers(2, 1), barriers(2, readers)


@gluon.jit
def announce(entry, places, turn):
    """Puts a chain where the others read it, once they have read the one before the last."""
    next_s, full, free = places
    mbarrier.wait(free.index(turn & 1), ((turn >> 1) & 1) ^ 1)
    next_s.index(turn & 1).store(entry)
    gl.thread_barrier()
    mbarrier.arrive(full.index(turn & 1), count=1)


@gluon.jit
def receive(places, turn):
    """The chain announced in this turn: sequence, value head, first row, length (-1: none)."""
    next_s, full, free = places
    mbarrier.wait(full.index(turn & 1), (turn >> 1) & 1)
    entry = next_s.index(turn & 1).load(LENTRY)
    gl.thread_barrier()
    mbarrier.arrive(free.index(turn & 1), count=1)
    return field(entry, 0), field(entry, 1), field(entry, 2), field(entry, 3)

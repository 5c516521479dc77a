"""Which schedule runs, from sizes and whether the gate is bounded: never from its values, so that slow and fast decay take
the same time.

Times of the parts on one H200, in microseconds, from which the cost of each schedule follows; the scan gives each half of the
value channels its own CTA while twice the chains fit the SMs. They pick the fastest measured schedule of every line of
benchmarks/results/hopper-forward-nvidia-h200.json, and are 2.5 % (windows) and 2.8 % (segments) off in other plans, root mean
square of 130.

    fused      needs no workspace, but a chain has one SM: packs and batches, whose chains fill the card evenly
    two_pass   one long sequence: its factors are prepared on all SMs, however few the heads; in windows where SMs are left
    segments   few heads: the scan of segments runs side by side
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

CHUNK = 64
WORKSPACE = 2 << 30
"""Bytes of prepared chunks alive at once; a longer sequence goes through in windows of tokens, carrying its state."""
SLOT_BYTES = 3 * 64 * 128 * 2 + 6 * 32 * 32 * 2 + 128 * 4
"""A prepared chunk of one head: Kt, Qt, Kh and three quarters of T, M in float16, the decay of its channels in float32."""

_PREPARE_US, _PREPARE_START_US = 3.85, 18.4
"""A chunk and head on one SM; what the first and the last programs leave idle."""
_SCAN_US = {True: 1.57, False: 2.09}
"""A chunk of a chain by halves of its value channels or whole."""
_PREPARE_MEMORY_US, _SCAN_MEMORY_US, _HALVES_MEMORY_US = 0.0286, 0.0236, 0.0279
"""A chunk and head cannot be read and written faster, on however many SMs; halves read operands twice."""
_ENDS_US, _ENDS_MORE_US, _ENDS_MOST_US = 0.23, 0.0218, 1.63
"""Both ends of a segment's chunk, more for each other program."""
_MERGE_US, _CUT_US = 3.0, 20.5
"""A segment in the merge; what a cut costs besides."""
_FUSED_US, _FUSED_START_US = 6.1, 25.0
"""A chunk of a chain; filling and draining the roles, once a program, and the launch behind it that looks for near keys."""
_WINDOW_US, _MOST_WINDOWS = 8.7, 4
"""What a window of a sequence costs besides: its scan waits for the last programs that prepare it and for states."""
_WORTH_WINDOWS = 1.03
"""Each window is two launches: they have to save a thirtieth."""
_SHARED, _SLOWER = 0.75, 0.82
"""Share of memory speed from which a scan and what is prepared beside it slow each other down, and by how much of the rest."""
_WORTH = 0.9
"""A cut that saves less than a tenth is left: the model is no better than that, and segments take memory for states."""


class Window(NamedTuple):
    """Chunks of one sequence that are prepared, then scanned. split: by halves of the value channels. beside: prepared while
    the window before is scanned, not behind it."""

    chunks: int
    split: bool
    beside: bool = True


Schedule = str | tuple[str, int]
"""fused, two_pass or (segments, count)."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


PADDED = (64, 1024)
"""Lengths of the vector that holds a pack's lengths: two, so that the first pack can compile for all."""


def padded_count(sequences: int) -> int:
    return PADDED[sequences > PADDED[0]]


def slots(tokens: int, sequences: int, packed: bool) -> int:
    """Chunks of a call; an upper bound for a pack, whose lengths only the device knows."""
    return tokens // CHUNK + sequences if packed else sequences * ceil_div(tokens, CHUNK)


def is_split(chains: int, sms: int) -> bool:
    """Whether each half of the value channels of a chain gets its own CTA."""
    return 2 * chains <= sms


def segment_tokens(tokens: int, count: int) -> int:
    """Length of a segment: whole chunks."""
    return ceil_div(ceil_div(tokens, CHUNK), count) * CHUNK


def fits_workspace(work: int) -> bool:
    """Whether all chunks of all heads can be prepared at once."""
    return work * SLOT_BYTES <= WORKSPACE


@lru_cache(4096)
def windows(chunks: int, heads: int, sms: int) -> tuple[Window, ...]:
    """How one sequence goes through the two passes. A scan leaves SMs idle, `sms` less its programs, where the next window is
    prepared meanwhile; so each window is by so much longer or shorter than the one before as is prepared while that is scanned.
    With many heads a scan alone takes all of the memory's speed, and there is one window.
    """

    def cost(plan: tuple[Window, ...]) -> float:
        return windows_us(plan, heads, sms) * (_WORTH_WINDOWS if len(plan) > 1 else 1.0)

    return min(_plans(chunks, heads, sms), key=cost)


def _plans(chunks: int, heads: int, sms: int) -> list[tuple[Window, ...]]:
    found = []
    halves = is_split(heads, sms)
    for split in {halves, False}:
        free = sms - heads * (2 if split else 1)
        ratio = _scan_us(split, heads) / (_PREPARE_US * heads / free) if free > 0 else 0.0
        if not fits_workspace(chunks * heads):
            for beside in (True, False):  # the memory of every other window is used again, or that of each
                width = max(WORKSPACE // ((2 if beside else 1) * heads * SLOT_BYTES), 1)
                found.append(tuple(Window(min(width, chunks - c), split, beside) for c in range(0, chunks, width)))
            continue
        for count in range(1, _MOST_WINDOWS + 1 if ratio else 2):
            shares = [ratio**i for i in range(count)]
            ends = [round(chunks * sum(shares[: i + 1]) / sum(shares)) for i in range(count)]
            sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
            if min(sizes) > 0:
                found.append(tuple(Window(n, split if i + 1 < count else halves) for i, n in enumerate(sizes)))
    return found


def windows_us(plan: tuple[Window, ...], heads: int, sms: int) -> float:
    """Of one sequence in these windows, microseconds by the constants above."""
    alone = _PREPARE_US * heads / sms
    us = alone * plan[0].chunks + _PREPARE_START_US + _WINDOW_US * (len(plan) - 1)
    for window, following in zip(plan, [*plan[1:], Window(0, False)], strict=True):
        programs = heads * (2 if window.split else 1)
        step, free = _scan_us(window.split, heads) * ceil_div(programs, sms), max(sms - programs, 0)
        scan, left = step * window.chunks, float(following.chunks)
        if free and left and following.beside:
            beside = _PREPARE_US * heads / free
            wanted = heads * (_SCAN_MEMORY_US / step + _PREPARE_MEMORY_US / beside)
            slower = max(1.0, 1.0 + _SLOWER * (wanted - _SHARED))
            both = min(scan, beside * left) * slower  # until one of them is done
            scan, left = scan - both / slower, left - both / slower / beside
            us += both
        us += scan + left * alone
    return us


def _scan_us(split: bool, chains: int) -> float:
    """A chunk of chains side by side, each on an SM or two."""
    return max(_SCAN_US[split], (_HALVES_MEMORY_US if split else _SCAN_MEMORY_US) * chains)


@lru_cache(4096)
def choose(tokens: int, sequences: int, heads: int, packed: bool, sms: int, fusible: bool = True) -> Schedule:
    """tokens: T of the call. sequences: B, or the members of the pack. heads: value heads. sms: of the device. fusible: the
    fused kernel, which knows the bounded gate only, may be taken."""
    work, chains = slots(tokens, sequences, packed) * heads, sequences * heads
    # Of a pack's lengths the host knows the sum: the longest is taken to be twice the mean.
    longest = ceil_div(tokens, CHUNK)
    if packed:
        longest = min(longest, 2 * slots(tokens, sequences, packed) // sequences)
    fused = _FUSED_US * _makespan(work, longest, chains, sms, packed) + _FUSED_START_US if fusible else float("inf")
    if not fits_workspace(work):
        return "two_pass" if not packed and sequences == 1 else "fused"
    preparing = _PREPARE_US * work / sms + _PREPARE_START_US
    split = is_split(chains, sms)
    scan = max(
        _scan_us(split, min(chains, sms)) * _makespan(work, longest, chains, sms, packed), _SCAN_MEMORY_US * work
    )
    two_pass = preparing + scan
    if packed:
        return "fused" if fused < two_pass else "two_pass"
    if sequences == 1:
        plan = windows(longest, heads, sms)
        two_pass = windows_us(plan, heads, sms)
    best: Schedule = "fused" if fused < two_pass else "two_pass"
    least = _WORTH * min(fused, two_pass)
    for count in range(2, min(sms // chains, longest) + 1):
        length = ceil_div(longest, count)
        if ceil_div(longest, length) == count and (sequences == 1 or tokens % (length * CHUNK) == 0):
            cost = segments_us(longest, sequences, count, heads, sms)
            if cost < least:
                best, least = ("segments", count), cost
    return best


def segments_us(chunks: int, sequences: int, count: int, heads: int, sms: int) -> float:
    """Of sequences that are cut into as many segments, microseconds by the constants above."""
    chains, length = sequences * heads, ceil_div(chunks, count)
    late = chunks - (count - 1) * length if sequences == 1 else 0  # prepared beside the ends
    programs = 2 * chains * (count - 1)
    waves = ceil_div(programs, sms)
    ends = min(_ENDS_US + _ENDS_MORE_US * programs, _ENDS_MOST_US) * length * waves
    left = max(late * _PREPARE_US * heads - (waves * sms - programs) * ends / waves, 0.0)
    preparing = (_PREPARE_US * (chunks - late) * chains + left) / sms + _PREPARE_START_US
    split = is_split(count * chains, sms)
    return preparing + ends + _MERGE_US * (count - 1) + _CUT_US + _scan_us(split, count * chains) * length


def _makespan(work: int, longest: int, chains: int, sms: int, packed: bool) -> float:
    """Chunks that the busiest SM walks through, one chain at a time."""
    if packed:  # longest chains first
        return max(longest, work / sms)
    return longest * ceil_div(chains, sms)

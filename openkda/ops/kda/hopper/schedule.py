"""Which schedule runs, from sizes alone: never from the gate, so that slow and fast decay take the same time.

H200, milliseconds in a CUDA graph (benchmarks/results/hopper-forward-nvidia-h200.json), one sequence; the scan gives each
half of the value channels its own CTA while twice the chains fit the SMs:

    heads x tokens   prepare   two_pass   segments (count: time)
    96 x  8192       0.368     0.650
    64 x  8192       0.253     0.466
    32 x  8192       0.135     0.327      2: 0.368   4: 0.379
    32 x 32768       0.482     1.223      2: 1.301   4: 1.285
    24 x  8192       0.105     0.299      2: 0.325   5: 0.315
    16 x 65536       0.484     1.952      4: 1.300   8: 1.290
    12 x 65536       0.368     1.822      5: 1.025   8: 1.068   11: 0.990
    12 x  8192       0.062     0.254      3: 0.213   4: 0.187    5: 0.179   6: 0.203   8: 0.198   11: 0.199
    12 x  4096       0.039     0.135      3: 0.128   5: 0.115

The constants below describe what comes after preparing: the scan's time a chunk with halves apart and together, the same for
the two passes over a segment, the merge of a segment, and what a cut costs at all. They pick the fastest entry of each line.
`fused` needs no workspace; it is what remains where that would grow too large and windows cannot be cut.
"""

from __future__ import annotations

CHUNK = 64
WORKSPACE = 2 << 30
"""Bytes of prepared chunks alive at once; a longer sequence goes through in windows of tokens, carrying its state."""
SLOT_BYTES = 3 * 64 * 128 * 2 + 6 * 32 * 32 * 2 + 128 * 4
"""A prepared chunk of one head: Kt, Qt, Kh and three quarters of T, M in float16, the decay of its channels in float32."""

_SCAN_US = {True: 1.5, False: 2.2}
_SEGMENT_US = {True: 3.05, False: 5.8}
_MERGE_US, _CUT_US = 8.0, 5.0
_WORTH = 0.9
"""A cut that saves less than a tenth is left: the model is no better than that, and segments take memory for states."""

Schedule = str | tuple[str, int]
"""fused, two_pass or (segments, count)."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def padded_count(sequences: int) -> int:
    """Length of the vector that holds a pack's lengths: few values, so that few kernels are compiled."""
    return max(16, 1 << (sequences - 1).bit_length())


def slots(tokens: int, sequences: int, packed: bool) -> int:
    """Chunks of a call; an upper bound for a pack, whose lengths only the device knows."""
    return tokens // CHUNK + sequences if packed else sequences * ceil_div(tokens, CHUNK)


def is_split(chains: int, sms: int) -> bool:
    """Whether each half of the value channels of a chain gets its own CTA."""
    return 2 * chains <= sms


def segment_tokens(tokens: int, count: int) -> int:
    """Length of a segment: whole chunks."""
    return ceil_div(ceil_div(tokens, CHUNK), count) * CHUNK


def choose(tokens: int, sequences: int, heads: int, packed: bool, sms: int) -> Schedule:
    """tokens: T of the call. sequences: B, or the members of the pack. heads: value heads. sms: of the device."""
    if slots(tokens, sequences, packed) * heads * SLOT_BYTES > WORKSPACE:
        return "two_pass" if not packed and sequences == 1 else "fused"
    if packed:
        return "two_pass"
    chunks, chains = ceil_div(tokens, CHUNK), sequences * heads
    best: Schedule = "two_pass"
    least = _WORTH * _SCAN_US[is_split(chains, sms)] * chunks * ceil_div(chains, sms)
    for split in (True, False):
        most = sms // ((2 if split else 1) * chains)
        count = min(most, round((_SEGMENT_US[split] * chunks / _MERGE_US) ** 0.5))
        if count < 2:
            continue
        length = segment_tokens(tokens, count)
        count = ceil_div(tokens, length)
        cost = _SEGMENT_US[split] * (length // CHUNK) + _MERGE_US * count + _CUT_US
        if cost < least and (sequences == 1 or tokens % length == 0):
            best, least = ("segments", count), cost
    return best

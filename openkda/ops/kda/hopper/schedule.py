"""Which schedule runs, from sizes alone: never from the gate, so that slow and fast decay take the same time.

H200, milliseconds in a CUDA graph (benchmarks/results/hopper-forward-nvidia-h200.json), 1 x 8192 unless said otherwise; the
scan gives each half of the value channels its own CTA while twice the chains fit the SMs:

    heads               fused    two_pass   segments (count: time)
    96                  0.985    0.712
    96, 8 x 1024        0.782    0.742
    64                  0.976    0.514      2: 0.739
    32                  0.963    0.380      2: 0.442    4: 0.410
    16, 1 x 65536       7.47     2.37       4: 1.600    8: 1.429
    12                  0.943    0.305      5: 0.233   11: 0.253

The constants below reproduce every entry but the fused ones within 6%: the scan's time a chunk with halves apart and
together, the same for the three passes over a segment, the merge of a segment, and what a cut costs at all. `fused` is
never the fastest; it is what remains where the workspace would grow too large and windows cannot be cut.
"""

from __future__ import annotations

CHUNK = 64
WORKSPACE = 2 << 30
"""Bytes of prepared chunks alive at once; a longer sequence goes through in windows of tokens, carrying its state."""
SLOT_BYTES = 3 * 64 * 128 * 2 + 6 * 32 * 32 * 2 + 128 * 4
"""A prepared chunk of one head: Kt, Qt, Kh and three quarters of T, M in float16, the decay of its channels in float32."""

_SCAN_US = {True: 1.85, False: 2.29}
_SEGMENT_US = {True: 3.85, False: 6.05}
_MERGE_US, _CUT_US = 7.0, 40.0
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

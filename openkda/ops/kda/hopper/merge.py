"""Second level of the exact two-level scan: carries states across segments, S' = M S + L, in float32.

    memory     M_1 L_1 | M_2 L_2      | M_3 L_3      | ...          of the next segment, loaded while this one's are multiplied
    tensor     -       | M_1 S_0 + L_1| M_2 S_1 + L_2| ...          tf32 in three products
    out        S_0     | S_1          | S_2          | ...  S_(P-1) what the scan of every segment starts from

A program is a head of a sequence and a block of value channels: columns of S never meet. The same algebra between stretches
that lie in different memories is `ops/kda/two_level.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["segments"])
def merge_segments_kernel(
    m_ptr, l_ptr, s0_ptr, init_ptr, HV, segments, HAS_S0: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Entering state of every segment of one (sequence, head) and block of value channels. Of the last segment nothing is known
    but that: its scan gives the sequence's state.

    The next segment's matrices are on their way while this one's are multiplied: nothing but the product is in the chain.
    """
    pid = tl.program_id(0)
    n = pid // HV
    hv = pid % HV
    k = tl.arange(0, 128)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    tile = k[:, None] * 128 + v[None, :]
    square = k[:, None] * 128 + k[None, :]
    base = (n * segments * HV + hv).to(tl.int64) * 16384
    if HAS_S0:
        s = tl.load(s0_ptr + pid.to(tl.int64) * 16384 + tile)
        first = 0
    else:  # what a state of zeros becomes needs no product
        tl.store(init_ptr + base + tile, tl.zeros([128, BV], tl.float32))
        s = tl.load(l_ptr + base + tile)
        first = 1
        base += HV * 16384
    m, local = tl.load(m_ptr + base + square), tl.load(l_ptr + base + tile)
    for p in tl.range(first, segments - 1, num_stages=1):
        following = base + (p + 2 < segments).to(tl.int64) * 16384 * HV
        m_next, local_next = tl.load(m_ptr + following + square), tl.load(l_ptr + following + tile)
        tl.store(init_ptr + base + tile, s)
        s = tl.dot(m, s, local, input_precision="tf32x3")
        base, m, local = following, m_next, local_next
    tl.store(init_ptr + ((n + 1) * segments * HV - HV + hv).to(tl.int64) * 16384 + tile, s)

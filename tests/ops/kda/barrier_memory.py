"""Which memory barriers of a compiled kernel share their place with something else.

Memory that was a barrier may be used for something else only after mbarrier.inval (PTX), which Gluon's kernels do not need
where every barrier is waited for until the end. A barrier that nobody waits for is dead for the compiler, which gives its
eight bytes to the next buffer. Nothing is seen of it on a processor that one process has for itself: but where a kernel was
interrupted, a barrier's bits stood where a maximum had been written (H200, 6 of 8 training steps beside three processes).
"""

from __future__ import annotations

import re

INIT = re.compile(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]")
SUM = re.compile(r"(?:add\.s32|or\.b32)\s+(%r\d+), %r\d+, (\d+);")
DATA = re.compile(r"(?:ld|st)\.shared[.\w]*\s+(?:[^;\[]*, )?\[ ?(%\w+|global_smem)\s*(?:\+\s*(\d+))?")


def shared_places(ptx: str) -> set[int]:
    """Offsets in shared memory where both a barrier and data begin."""
    sums = {name: int(offset) for name, offset in SUM.findall(ptx)}
    barriers = {sums.get(name, 0) for name in INIT.findall(ptx)}
    data = {sums.get(name, 0) + int(offset or 0) for name, offset in DATA.findall(ptx)}
    return barriers & data

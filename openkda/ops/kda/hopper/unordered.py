"""Barriers that order nothing, left out of Hopper kernels.

Between two accesses of one buffer, one of them a write, Triton 3.6 puts a barrier of all four warps, and another one between an
arrival at an mbarrier and whatever touches shared memory next. It does not ask which bytes an access touches, nor which warp
does: a warp that reads its own sixteen rows and writes them in place waits for three others at every slice. On its way through
the roles of the fused kernel a chunk met 43 barriers of Triton's, 39 of them for nothing: 0.601 instead of 0.590 ms for eight
sequences of 1,024 tokens and 96 heads on an H200 (docs/decisions.md).

`unordered()` stands before an access and says that the barrier put there orders nothing. It leaves a comment in the PTX, and
`leave_out` takes the barrier behind that comment away, as a stage of Triton's compiler. Without it a kernel is as right, and
slower; Triton's cache would not know the difference, so the stage is seen to before anything is compiled (launch.py). That no
byte goes from one warp to another at such a place is checked on a CPU, warp by warp (tests/ops/kda/gluon_warps_on_cpu.py).
"""

from __future__ import annotations

import re
from typing import Any

from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# The mark is part of a kernel's key in Triton's cache, the patterns behind it are not: they change together.
MARK = gl.constexpr("// openkda: unordered $0")
_MARK = MARK.value.removesuffix(" $0")
# Of kernels with roles. `bar.sync 0;` of others stays: kda_prepare_kernel goes through marks of functions that it shares with
# the fused kernel, and one of those barriers also orders its columns before its scores.
_BARRIER = re.compile(r"\s*bar\.sync\s+\d+, \d+;")
_ACCESS = re.compile(
    r"(?<!fence\.proxy\.async\.)\bshared\b|ldmatrix|stmatrix|mbarrier|wgmma|cp\.async|\bbra\b|^\$L__BB"
)


@gluon.jit
def unordered():
    """The barrier before the next access to shared memory orders nothing."""
    gl.inline_asm_elementwise(MARK, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def behind_marks(lines: list[str]) -> dict[int, int | None]:
    """Of each line of a PTX with a mark the line with its barrier: the one before the next access to shared memory, if any."""
    found: dict[int, int | None] = {}
    mark = None
    for i, line in enumerate(lines):
        if _MARK in line:
            found[i], mark = None, i
        elif mark is not None and _BARRIER.match(line):
            found[mark], mark = i, None
        elif _ACCESS.search(line):
            mark = None
    return found


def leave_out(ptx: str) -> str:
    """PTX without marks, and without the barriers that they stand before."""
    if _MARK not in ptx:
        return ptx
    lines = ptx.split("\n")
    marks = behind_marks(lines)
    gone = {*marks, *marks.values()}
    return "\n".join(line for i, line in enumerate(lines) if i not in gone)


def install() -> None:
    """Adds `leave_out` to the stages of Triton's compiler, behind what others have added; once, and again where somebody has
    put his own in its place."""
    before = knobs.runtime.add_stages_inspection_hook
    if getattr(before, "leaves_out", False):
        return

    def stages_with(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        if before is not None:
            before(backend, stages, *rest)
        if "ptx" in stages:
            make = stages["ptx"]
            stages["ptx"] = lambda source, metadata: leave_out(make(source, metadata))

    stages_with.leaves_out = True  # type: ignore[attr-defined]
    knobs.runtime.add_stages_inspection_hook = stages_with


install()

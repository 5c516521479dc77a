"""Which marks of a kernel's source (`unordered.py`) have taken a barrier from it, each by the calls that lead to it.

The compiler says which barriers it has put, so it is asked: marks are numbered in LLVM's text, where every instruction knows
its calls, and looked for again in the PTX. Nothing here needs a GPU.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from openkda.ops.kda.hopper.unordered import MARK, behind_marks

Place = tuple[str, int]


class _Enough(Exception):
    """What follows the PTX is not wanted."""


@cache
def _first_lines(path: str) -> dict[int, int]:
    statements = (
        s for s in ast.walk(ast.parse(Path(path).read_text())) if isinstance(s, ast.stmt) and not hasattr(s, "body")
    )
    return {i: s.lineno for s in statements for i in range(s.lineno, (s.end_lineno or s.lineno) + 1)}


def place(path: str, line: int) -> Place:
    """A file's name and the first line of a statement: of a call that takes several, Python and Triton name two."""
    return path.rsplit("/")[-1], _first_lines(path).get(line, line)


def _calls(llir: str, at: str) -> tuple[Place, ...]:
    """Where an instruction is, from the mark's place outward to the kernel."""
    notes = dict(re.findall(r"^!(\d+) = (?:distinct )?(!DI\w+\(.*\))$", llir, flags=re.M))
    found = []
    while at:
        note = notes[at]
        scope = notes[re.findall(r"scope: !(\d+)", note)[0]]
        name, folder = re.findall(r'"(.*?)"', notes[re.findall(r"file: !(\d+)", scope)[0]])
        found.append(place(f"{folder}/{name}", int(re.findall(r"line: (\d+)", note)[0])))
        at = (re.findall(r"inlinedAt: !(\d+)", note) or [""])[0]
    return tuple(found[1:])


def marks(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> list[tuple[tuple[Place, ...], bool]]:
    """Of each mark in the PTX: its calls, and whether it took a barrier away."""
    fixed = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
    types = {n: "constexpr" if n in constants else signature[n] for n in kernel.arg_names}
    calls: list[tuple[Place, ...]] = []
    found: list[tuple[tuple[Place, ...], bool]] = []

    def numbered(llir: str) -> str:
        def number(mark: re.Match[str]) -> str:
            calls.append(_calls(llir, mark[2]))
            return mark[0].replace(MARK.value, f"{MARK.value} {len(calls) - 1}.")

        return re.sub(rf"({re.escape(MARK.value)}).*?!dbg !(\d+)$", number, llir, flags=re.M)

    def watched(ptx: str) -> None:
        lines = ptx.split("\n")
        for mark, barrier in behind_marks(lines).items():
            number = int(lines[mark].split()[-1].rstrip("."))
            found.append((calls[number], barrier is not None))
        raise _Enough

    def stages_with(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        low, ptx = stages["llir"], backend.make_ptx
        stages["llir"] = lambda source, metadata: numbered(str(low(source, metadata)))
        stages["ptx"] = lambda source, metadata: watched(ptx(source, metadata, rest[0], backend.target.arch))

    with knobs.runtime.scope(), knobs.compilation.scope():
        knobs.runtime.add_stages_inspection_hook, knobs.compilation.always_compile = stages_with, True
        with suppress(_Enough):
            triton.compile(
                GluonASTSource(kernel, types, fixed), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
            )
    return found

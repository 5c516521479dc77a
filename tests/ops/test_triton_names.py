"""No two names of one value enter a loop that assigns both.

Triton 3.6 carries a name through a loop if its value behind the body is not the one before the loop, and it compares values,
not names: after `a = zeros; b = a`, a body that ends with a = b (what b was before the body) leaves `a` out: zero in every
iteration. Nothing fails, and the interpreter, which is Python, computes what is written: a convolution's gradient was wrong on
a GPU alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

OPS = Path(__file__).parents[2] / "openkda" / "ops"
FILES = [f for f in sorted(OPS.rglob("*.py")) if "import triton" in f.read_text() or "import gluon" in f.read_text()]


def assigned(nodes: list[ast.stmt]) -> set[str]:
    found = (n for s in nodes for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return {n.id for n in found}


def shared_in_loops(body: list[ast.stmt], value: dict[str, int]) -> list[str]:
    """Names that share a value where a loop begins that assigns them. value: name -> which value it holds; updated."""
    faults: list[str] = []
    for s in body:
        if isinstance(s, ast.Assign) and isinstance(s.value, ast.Name) and isinstance(s.targets[0], ast.Name):
            value[s.targets[0].id] = value.setdefault(s.value.id, len(value) + s.lineno * 1000)
            continue
        unrolled = isinstance(s, ast.For) and "static_range" in ast.unparse(s.iter)
        if isinstance(s, ast.For | ast.While) and not unrolled:
            seen: dict[int, str] = {}
            for name in sorted(assigned(s.body)):
                other = seen.setdefault(value.get(name, -id(name)), name)
                if name in value and other != name:
                    faults.append(f"line {s.lineno}: {other} and {name} are one value")
        for inner in ("body", "orelse"):
            faults += shared_in_loops(getattr(s, inner, []), value)
        for name in assigned([s]):
            value.pop(name, None)
    return faults


def faults_of(source: str) -> list[str]:
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
    return [f"{f.name}, {fault}" for f in functions for fault in shared_in_loops(f.body, {})]


def test_kernels_are_found() -> None:
    assert len(FILES) > 20


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(OPS)))
def test_no_loop_takes_two_names_of_one_value(file: Path) -> None:
    assert not faults_of(file.read_text())


def test_the_law_sees_what_went_wrong() -> None:
    loop = " for t in range(n):\n  for j in tl.static_range(2):\n   a, b, c = b, c, load(t)\n"
    wrong = "def f(n):\n a = zeros()\n b = a\n c = a\n" + loop
    assert len(faults_of(wrong)) == 2
    assert not faults_of(wrong.replace("b = a", "b = zeros()").replace("c = a", "c = zeros()"))

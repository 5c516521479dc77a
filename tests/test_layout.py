"""The folder table of the architecture, enforced: who may import whom, how large files may grow, what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "openkda"

LEVELS = {
    "ops": 1, "distributed": 2, "layers": 3, "models": 4, "training": 5, "generation": 5, "lab": 6, "compat": 6, "cli": 7,
}  # fmt: skip
KERNEL_LANGUAGES = {"triton", "cuda", "cupy", "cutlass", "tilelang"}
FORBIDDEN_NAMES = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """(dotted module, whether at module level) of every absolute import, function-level ones included."""
    tree = ast.parse(path.read_text())
    top = {id(n) for stmt in tree.body for n in ([stmt] if not _is_def(stmt) else []) for n in ast.walk(stmt)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(a.name, id(node) in top) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            found += [(f"{node.module}.{a.name}", id(node) in top) for a in node.names]
    return found


def _is_def(stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def area(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "openkda" and len(parts) > 1 else None


def is_kernel(path: Path) -> bool:
    return bool({"triton", "hopper"} & set(path.relative_to(PACKAGE).parts))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_import_levels(path: Path) -> None:
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if here in ("__init__", "__main__", "testing"):
        return
    for module, _ in imports(path):
        there = area(module)
        if there is None or (there not in LEVELS and there != "testing"):
            continue
        assert there != "testing", f"{path}: the library never imports openkda.testing"
        same_level_stranger = here != there and LEVELS[here] == LEVELS[there]
        assert LEVELS[there] <= LEVELS[here] and not same_level_stranger, (
            f"{path.relative_to(ROOT)} (level {LEVELS[here]}) imports {module} (level {LEVELS[there]})"
        )


@pytest.mark.parametrize("path", [p for p in FILES if "ops" in p.parts], ids=lambda p: str(p.relative_to(ROOT)))
def test_ops_see_other_ops_only_through_api(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    if len(parts) < 3:
        return
    for module, _ in imports(path):
        names = module.split(".")
        if names[:2] == ["openkda", "ops"] and len(names) > 2 and names[2] != parts[1]:
            assert len(names) > 3 and names[3] == "api", (
                f"{path.relative_to(ROOT)} reaches into {module}; use its api.py"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_kernel_languages_stay_inside(path: Path) -> None:
    for module, _ in imports(path):
        if module.split(".")[0] in KERNEL_LANGUAGES:
            assert is_kernel(path), f"{path.relative_to(ROOT)} imports {module} outside triton/ and hopper/"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_size_ceilings(path: Path) -> None:
    file_limit, function_limit = (600, 150) if is_kernel(path) else (400, 60)
    text = path.read_text()
    assert path.name not in FORBIDDEN_NAMES
    assert text.count("\n") <= file_limit, f"{path.name}: more than {file_limit} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.body:
            doc = ast.get_docstring(node, clean=False)
            body = node.body[1:] if doc is not None and len(node.body) > 1 else node.body
            length = (body[-1].end_lineno or 0) - body[0].lineno + 1
            assert length <= function_limit, f"{path.name}:{node.name} has {length} lines, limit {function_limit}"


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by these: two of one name, and it collects nothing."""
    names = [p.stem for p in (ROOT / "tests").rglob("*.py") if p.stem != "conftest"]
    assert not [n for n, count in Counter(names).items() if count > 1]


def test_no_kwargs_on_public_ops() -> None:
    for path in PACKAGE.glob("ops/*/api.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                assert node.args.kwarg is None, f"{path}:{node.name} takes **{node.args.kwarg.arg}"
                assert len(node.args.args) <= 8, f"{path}:{node.name} has more than 8 positional parameters"


def test_importing_loads_no_kernel_language() -> None:
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import openkda, openkda.ops.kda, openkda.layers, openkda.models\n"
        "for name in openkda.__all__: getattr(openkda, name)\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        f"print(sorted(new & {KERNEL_LANGUAGES | {'transformers', 'fla', 'matplotlib', 'typer', 'rich'}!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_import_cost() -> None:
    """Best of three: `import openkda` adds under a second to torch's own import."""
    code = "import time, torch; t = time.perf_counter(); import openkda; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        for _ in range(3)
    ]
    assert min(float(r.stdout) for r in runs) < 1.0

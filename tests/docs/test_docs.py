"""The documents keep their promises: their code runs, commands, links and numbers exist, and the map names every file.

Every fenced `python` block of README.md and docs/*.md is executed, one namespace a file, in order. A block may be fenced
`python no-run` only if it needs a GPU or a download, and must then show it by naming a CUDA device or `from_pretrained`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from openkda.models.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(d.relative_to(ROOT)) for d in DOCUMENTS]
README = (ROOT / "README.md").read_text()
MAP = (ROOT / "docs" / "map.md").read_text()

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.S | re.M)
NEEDS_MORE = ('"cuda', "'cuda", "from_pretrained")


def blocks(document: Path) -> list[tuple[str, str, int]]:
    """(info string, code, line of its first code line) of every fenced block."""
    text = document.read_text()
    return [(m[1].strip(), m[2], text.count("\n", 0, m.start()) + 2) for m in FENCE.finditer(text)]


def prose(document: Path) -> str:
    """The text without fenced blocks."""
    return FENCE.sub("", document.read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p))
    namespace: dict[str, object] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for info, code, line in blocks(document):
            if info == "python":
                exec(compile("\n" * (line - 1) + code, str(document), "exec"), namespace)  # tracebacks name the line


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_fences_are_known(document: Path) -> None:
    for info, code, line in blocks(document):
        where = f"{document.name}:{line}"
        assert info in ("python", "python no-run", "sh", "text", "json", ""), f"{where}: unknown fence {info!r}"
        if info == "python no-run":
            compile(code, where, "exec")
            assert any(mark in code for mark in NEEDS_MORE), f"{where}: only GPU or download blocks may be left out"
    assert document.read_text().count("```") % 2 == 0, f"{document.name}: a fence is not closed"


def test_the_derivation_checks_its_numbers() -> None:
    """A derivation that stopped asserting would pass the run above: every part's blocks must assert something."""
    code = [c for info, c, _ in blocks(ROOT / "docs" / "derivation.md") if info == "python"]
    assert len(code) >= 25
    assert sum("assert" not in c for c in code) <= 1, "only the first block, the imports, asserts nothing"
    text = "\n".join(code)
    assert "== 124" in text and "4.3" in text


# ---- links and paths ----

LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:openkda|tests|docs|benchmarks|examples|requirements|\.ci)/[\w./-]*)`")


def anchors(document: Path) -> set[str]:
    """Heading anchors as GitHub makes them: lower case, blanks to hyphens, punctuation dropped."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.M)
    return {re.sub(r"[^\w -]", "", h.replace("`", "").lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_resolve(document: Path) -> None:
    for target in LINK.findall(prose(document)):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = document if not name else (document.parent / name).resolve()
        assert file.exists(), f"{document.name}: link to {target}: no such file"
        if anchor:
            assert anchor in anchors(file), f"{document.name}: link to {target}: {file.name} has no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_named_files_exist(document: Path) -> None:
    for path in PATH.findall(prose(document)):
        assert (ROOT / path).exists(), f"{document.name} names `{path}`, which does not exist"


# ---- commands ----


def shell_lines(text: str) -> list[str]:
    """Lines of `sh` blocks and of four-space blocks, and inline code, without comments."""
    fenced = [line for m in FENCE.finditer(text) if m[1].strip() == "sh" for line in m[2].splitlines()]
    outside = FENCE.sub("", text)
    indented = [line for line in outside.splitlines() if line.startswith("    ")]
    inline = re.findall(r"`([^`\n]+)`", outside)
    stripped = (line.split("  #")[0].split(" # ")[0].strip() for line in fenced + indented + inline)
    return [line.removeprefix("$ ") for line in stripped if line]


COMMANDS = [line for d in DOCUMENTS for line in shell_lines(d.read_text())]


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.M))
    variables = set(re.findall(r"^([A-Z_]+) \?=", makefile, re.M))
    used = [line.split()[1:] for line in COMMANDS if re.match(r"make \w", line)]
    assert used, "the README names make commands"
    for word in (w for words in used for w in words if not w.startswith("-")):
        if "=" in word:
            assert word.split("=")[0] in variables, f"make has no variable {word.split('=')[0]}"
        elif re.fullmatch(r"[a-z-]+", word):
            assert word in targets, f"make has no target {word}"


def cli_options() -> dict[str, set[str]]:
    """Subcommand -> its options, from the command line itself."""
    typer = pytest.importorskip("typer")
    from openkda.cli import app

    group = typer.main.get_command(app)
    return {name: {o for p in c.params for o in (*p.opts, *p.secondary_opts)} for name, c in group.commands.items()}


def test_openkda_commands_exist() -> None:
    options = cli_options()
    used = [m[1] for line in COMMANDS if (m := re.match(r"(?:python -m )?openkda ([a-z].*)", line))]
    assert used, "the README names openkda commands"
    for line in used:
        command, *words = line.split()
        for name in command.split("|"):
            assert name in options, f"`openkda {line}`: there is no command {name}, only {sorted(options)}"
        for word in (w.split("=")[0] for w in words if w.startswith("--")):
            assert word in options[command.split("|")[0]] | {"--help"}, f"`openkda {line}`: no option {word}"
        for preset in (value for option, value in pairwise(words) if option == "--preset"):
            assert preset in PRESETS, f"`openkda {line}`: no preset {preset}, only {', '.join(PRESETS)}"


def test_python_programs_and_extras_exist() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for line in COMMANDS:
        if m := re.match(r"python(?:3)? ([\w./-]+\.py)", line):
            assert (ROOT / m[1]).is_file(), f"`{line}`: no such program"
        for group in re.findall(r"(?:openkda|\.)\[([\w,-]+)\]", line if line.startswith("pip") else ""):
            assert set(group.split(",")) <= extras, f"`{line}`: pyproject.toml has the extras {sorted(extras)}"


# ---- the map ----


def map_rows() -> list[tuple[str, str]]:
    return re.findall(r"^\| `([^`]+)` \| (.*) \|$", MAP, re.M)


def first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split(". ")[0].split()).rstrip(".:")


def test_the_map_names_every_file_of_the_package_once() -> None:
    """`__init__.py` files only name things and are left out; every other module has one row."""
    rows = map_rows()
    mapped = Counter(path for path, _ in rows if path.startswith("openkda/"))
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "openkda").rglob("*.py") if p.name != "__init__.py"}
    assert not {p for p, n in mapped.items() if n > 1}, "files with more than one row"
    missing = "\n".join(f"| `{path}` | {first_sentence(ROOT / path)} |" for path in sorted(files - set(mapped)))
    assert not missing, f"docs/map.md lacks these files; rows to begin with:\n{missing}"
    assert set(mapped) - files == set(), "rows of the map without a file"
    for path, line in rows:
        assert (ROOT / path).exists(), f"the map names {path}, which does not exist"
        assert 10 <= len(line) <= 140 and "|" not in line, f"{path}: one line, not empty and not long: {line!r}"


# ---- measured numbers ----


def test_tables_of_measurements_are_those_of_the_results() -> None:
    """They are written by benchmarks/tables.py, so that no page says something else than benchmarks/results."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    found = []
    for page in tables.PAGES:
        text = (ROOT / page).read_text()
        assert tables.filled(text) == text, f"{page} is not what benchmarks/results say: python benchmarks/tables.py"
        found += [name for _, name in tables.BLOCK.findall(text)]
    assert sorted(found) == sorted(tables.TABLES)


def test_the_readme_lists_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", README.split("\n## Pages\n")[1]))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_every_decision_is_in_the_index() -> None:
    """Entries are added at the end; a reader comes in by topic."""
    path = ROOT / "docs" / "decisions.md"
    index = path.read_text().split("\n## By topic\n")[1].split("\n## ")[0]
    missing = anchors(path) - {"decisions", "by-topic"} - set(re.findall(r"\]\(#([\w-]+)\)", index))
    assert not missing, f"docs/decisions.md, By topic, lacks [...](#{'), [...](#'.join(sorted(missing))})"


def test_the_readme_reads_in_minutes() -> None:
    """At 240 words a minute, code and tables included."""
    assert len(README.split()) < 1800


# ---- words that belong to no reader ----

FORBIDDEN = [
    "/wo" + "rk/", "/ro" + "ot/", "/tmp/" + "venv", "/ho" + "me/", "pypi" + ".org", "download." + "pytorch",
    "TO" + "DO", "FIX" + "ME", "XX" + "X:",
]  # fmt: skip


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:  # an unpacked archive: everything in it was tracked
        return [p for p in ROOT.rglob("*") if p.is_file() and not {".venv", ".git"} & set(p.parts)]
    return [ROOT / line for line in done.stdout.splitlines()]


def test_no_machine_paths_or_loose_ends() -> None:
    found = []
    for path in tracked():
        if not path.is_file() or path.stat().st_size > 2**20:
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        found += [f"{path.relative_to(ROOT)}:{i}: {w}" for i, t in enumerate(lines, 1) for w in FORBIDDEN if w in t]
    assert not found

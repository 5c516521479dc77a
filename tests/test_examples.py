"""The examples run, say what they promise, and stay small."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested_here() -> None:
    here = Path(__file__).read_text()
    assert EXAMPLES and [p.name for p in EXAMPLES if f'run("{p.name}"' not in here] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_under_150_lines(path: Path) -> None:
    assert path.read_text().count("\n") < 150


def test_recurrence_vs_chunk() -> None:
    out = run("recurrence_vs_chunk.py")
    assert len(re.findall(r"^ +\d+ .*e-\d\d$", out, re.MULTILINE)) == 4


def test_state_is_constant() -> None:
    out = run("state_is_constant.py", "--tokens", "512", "--preset", "tiny")
    kda = set(re.findall(r"^ +\d+ +([\d.]+ KiB)", out, re.MULTILINE))
    assert len(kda) == 1
    found = re.search(r"Measured ([\d,]+) bytes; the configuration promises ([\d,]+)\.", out)
    assert found and found[1] == found[2]


def test_see_the_memory() -> None:
    out = run("see_the_memory.py")
    newest, last = (
        [float(n) for n in column]
        for column in zip(*re.findall(r"(\d+\.\d)% +(\d+\.\d)%(?: .*)$", out, re.MULTILINE), strict=True)
    )
    assert newest[2:] == [0, 0]  # who corrects answers the newest key exactly
    assert last == sorted(last, reverse=True) and last[3] < 30  # each repair helps with what is recent


def test_train_copy_task() -> None:
    out = run("train_copy_task.py", "--length", "8", "--steps", "100")
    assert float(re.findall(r"right +([\d.]+)%", out)[-1]) > 80


def test_mqar_recall() -> None:
    out = run("mqar_recall.py")
    assert float(re.findall(r"recalled +([\d.]+)%", out)[-1]) > 90
    by_pairs = [float(x) for x in re.findall(r"pairs +([\d.]+)%", out)]
    assert len(by_pairs) == 6 and by_pairs[1] > by_pairs[-1]


def test_stream_generate() -> None:
    out = run("stream_generate.py", "--tokens", "12")
    assert out.count("tokens, length)") + out.count("tokens, stop_string)") == 3
    assert "put aside in" in out and "'class " in out

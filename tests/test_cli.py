"""The command line: what it prints, how it exits, and that a user's mistake is one line and leaves nothing behind."""

from __future__ import annotations

import builtins
import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from openkda.cli import _spread, main
from openkda.models.checkpoint import load_checkpoint
from openkda.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
FAST = [
    "--preset", "tiny", "--device", "cpu", "--set", "seq_len=24", "batch_size=2", "log_every=1", "val_tokens=64",
    "hidden_size=32", "intermediate_size=48", "num_hidden_layers=2", "kda_layers=1", "full_attn_layers=2",
]  # fmt: skip


def run(*arguments: object) -> int:
    """Exit code of the command line in this process."""
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in arguments])
    return int(exit_.value.code or 0)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What went to standard error: one line, no traceback."""
    captured = capsys.readouterr()
    assert captured.err.startswith("openkda: ") and captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err + captured.out
    return captured.err


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    for i in range(25):
        (root / f"{i}.txt").write_text("".join(f"def f{j}(x): return x + {i}\n" for j in range(12)))
    return root


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    out = tmp_path_factory.mktemp("runs") / "small"
    assert run("train", "--data", text, "--out", out, "--steps", 3, *FAST) == 0
    return out


def test_train_reports_and_leaves_a_run(trained: Path) -> None:
    assert load_checkpoint(trained / "last").config.hidden_size == 32
    assert [line["step"] for line in read_metrics(trained / "metrics.jsonl") if "loss" in line] == [1, 2, 3]


def test_resume(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--resume", trained, "--set", "steps=4") == 0
    assert "step-4: step 4, validation loss" in capsys.readouterr().out


def test_init_from(trained: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of its own, named after what it began with."""
    monkeypatch.chdir(tmp_path)
    command = ("train", "--data", text, "--init-from", trained, "--device", "cpu", "--steps", 1)
    assert run(*command, "--set", "seq_len=24", "batch_size=2", "val_tokens=64") == 0
    tuned = tmp_path / "runs" / f"{trained.name}-tuned"
    assert load_checkpoint(tuned / "last").config == load_checkpoint(trained / "last").config


def test_eval(trained: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", "--checkpoint", trained, "--data", text / "0.txt", text / "1.txt", "--device", "cpu") == 0
    lines = dict(line.rsplit(maxsplit=1) if "nats" not in line else line.split()[:2] for line in _lines(capsys))
    assert int(lines["tokens"]) == sum((text / f"{i}.txt").stat().st_size for i in (0, 1)) + 2
    assert 0 < float(lines["loss"]) < 6 and 0 < float(lines["bits per byte"]) < 9


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.replace(" per token", "") for line in capsys.readouterr().out.splitlines()]


def test_generate(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", "--checkpoint", trained / "last", "--prompt", "def", "--max-new-tokens", 5)
    assert run(*command, "--temperature", 0.7, "--seed", 1) == 0
    first = capsys.readouterr().out
    assert first.startswith("def") and "9 tokens: state" in first  # the document's beginning, 3 of the prompt, 5 new
    assert run(*command, "--temperature", 0.7, "--seed", 1) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("what", ["demo", "run", "step", "config"])
def test_inspect(trained: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    target = {"demo": "demo", "run": trained, "step": trained / "last", "config": trained / "last" / "config.json"}[
        what
    ]
    assert run("inspect", target, "--length", 1000, 2000) == 0
    out = capsys.readouterr().out
    assert run("inspect", "--length", 1000, "--length", 2000, target) == 0 and capsys.readouterr().out == out
    assert "KDA" in out and "MLA" in out and "bytes a token" in out and "2,000" in out
    if what != "demo":
        assert f"{load_checkpoint(trained / 'last').num_parameters():,}" in out


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ("train", 1, "expected at least one path"),
        ("train --data /nowhere", 1, "no such file or directory: '/nowhere'"),
        ("train --data EMPTY", 1, "no text file that is not empty"),
        ("train --data BINARY", 1, "expected UTF-8 text"),
        ("train --data TEXT --preset huge", 1, "expected one of tiny, demo"),
        ("train --data TEXT --set stepz=1 lrr=2", 1, "unknown keys ['lrr', 'stepz']"),
        ("train --data TEXT --steps 0", 1, "steps: expected a positive integer, received 0"),
        ("train --data TEXT --steps many", 2, "many"),
        ("train --data TEXT --set kda_num_heads=3 kda_num_v_heads=4", 1, "a multiple of kda_num_heads = 3, received 4"),
        ("train --data TEXT --set kda_layers=1,2,4 full_attn_layers=4", 1, "expected no layer in both, received [4]"),
        ("train --data TEXT --set kda_layers=1 full_attn_layers=2", 1, "holes [3, 4, 5, 6, 7, 8]"),
        ("train --data TEXT --set gate_lower_bound=1", 1, "a value in [-5, 0)"),
        ("train --data TEXT --tokenizer nowhere.json", 1, "received 'nowhere.json'"),
        ("train --data TEXT --device cuda:99", 1, "received 'cuda:99'"),
        ("train --data TEXT --set seq_len=1000000", 1, "expected more than seq_len = 1000000"),
        (
            "train --data TEXT --init-from /nowhere",
            1,
            "init_from: expected a checkpoint or run directory, received '/nowhere'",
        ),
        ("train --data TEXT --init-from RUN --preset tiny", 1, "none beside init_from"),
        ("train --data TEXT --init-from RUN --set hidden_size=64", 1, "tensors do not fit the settings"),
        ("train --resume RUN --init-from RUN", 1, "leave out --init-from"),
        ("train --data TEXT --init-from NOTHING", 1, "init_from: expected a directory, received ''"),
        ("train --resume /nowhere", 1, "'/nowhere'"),
        ("train --resume NOTHING", 1, "expected a checkpoint or run directory, received ''"),
        ("train --resume TEXT", 1, "expected trainer.json"),
        ("train --resume RUN --data TEXT", 1, "leave out --data"),
        ("train --resume RUN --preset tiny --tokenizer bytes", 1, "leave out --preset, --tokenizer"),
        ("train --resume RUN --set lr=1", 1, "received ['lr']"),
        ("train --data TEXT --out RUN", 1, "holds a run (continue it with --resume)"),
        ("eval --checkpoint /nowhere --data TEXT", 1, "'/nowhere'"),
        ("eval --checkpoint RUN", 2, "--data"),
        ("eval --checkpoint RUN --data /nowhere", 1, "no such file"),
        ("eval --checkpoint RUN --data TEXT --dtype int8", 1, "received 'int8'"),
        ("generate --checkpoint TEXT --prompt x", 1, "config.json"),
        ("generate --checkpoint TRUNCATED --prompt x", 1, "not a whole safetensors file"),
        ("generate --checkpoint RUN --prompt x --top-p 2", 1, "top_p: expected a number in (0, 1], received 2.0"),
        ("inspect nothing", 1, "nothing"),
        ("warmup nothing", 1, "a config.json or a checkpoint directory, received nothing"),
        ("warmup tiny --dtype int8", 1, "--dtype: expected one of bfloat16, float16, float32, received 'int8'"),
        ("inspect demo --length 0", 1, "expected positive integers"),
        ("trian", 2, "trian"),
        ("train --dta x", 2, "--dta"),
    ],
)
def test_mistakes(
    trained: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: str, code: int, error: str,
) -> None:  # fmt: skip
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "binary").write_bytes(b"\0\1")
    (inputs / "empty").mkdir()
    weights = (trained / "last" / "model.safetensors").read_bytes()
    (inputs / "truncated").mkdir()
    (inputs / "truncated" / "config.json").write_bytes((trained / "last" / "config.json").read_bytes())
    (inputs / "truncated" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    places = {
        "TEXT": text,
        "RUN": trained,
        "NOTHING": "",
        **{n.upper(): inputs / n for n in ("binary", "empty", "truncated")},
    }
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert run(*(places.get(word, word) for word in arguments.split())) == code
    assert error in one_line(capsys)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_may_not_be_read(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever runs the tests as root may read everything, so the system's answer is played."""
    secret, real = tmp_path / "secret.txt", builtins.open

    def refuse(file: object, *args: object, **kwargs: object) -> object:
        if Path(str(file)) == secret:
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *args, **kwargs)  # type: ignore[call-overload]

    secret.write_text("x" * 1000)
    monkeypatch.setattr(builtins, "open", refuse)
    for command in (("train", "--data", tmp_path, "--out", tmp_path / "run"), ("train", "--data", secret)):
        assert run(*command) == 1
        assert str(secret) in one_line(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["secret.txt"]


def test_a_bug_shows_its_traceback_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENKDA_DEBUG", "1")
    with pytest.raises(ValueError, match="at least one path"):
        main(["train"])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["train", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 0
    assert "Usage: openkda" in capsys.readouterr().out


def test_options_of_several_values() -> None:
    assert _spread(["train", "--data", "a", "b", "--steps", "3", "--set", "x=1", "y=-2", "--", "z"]) == (
        ["train", "--data", "a", "--data", "b", "--steps", "3", "--set", "x=1", "--set", "y=-2", "--", "z"]
    )
    assert _spread(["generate", "--prompt", "a", "--stop", "\n\n", "x"]) == (
        ["generate", "--prompt", "a", "--stop", "\n\n", "--stop", "x"]
    )


def test_a_terminal_without_the_characters(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(page, encoding="ascii"))
    assert run("generate", "--checkpoint", trained, "--prompt", "caf\u00e9", "--max-new-tokens", 3) == 0
    sys.stdout.flush()
    assert page.getvalue().startswith(b"caf?")


def test_ctrl_c(text: Path, tmp_path: Path) -> None:
    """A process of its own: one message, exit code 130, a checkpoint to go on from."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "openkda", "train", "--data", str(text), "--out", str(out), "--steps", "100000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, *FAST], stderr=subprocess.PIPE, text=True, env=environment)
    until = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert f"continue with: openkda train --resume {out}" in err and "Traceback" not in err
    stopped = int(os.readlink(out / "last").removeprefix("step-"))
    assert stopped >= 1 and run("train", "--resume", out, "--set", f"steps={stopped + 1}") == 0


def test_killed_while_it_reads_the_text(tmp_path: Path) -> None:
    """SIGTERM before the first step: nothing is left, so that the same command can be given again."""
    out, big = tmp_path / "run", tmp_path / "big.txt"
    big.write_text("a line of text\n" * 4_000_000)
    command = [sys.executable, "-m", "openkda", "train", "--data", str(big), "--out", str(out), *FAST]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    until = time.monotonic() + 120
    while not out.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143 and "Traceback" not in err and not out.exists(), err


def test_without_the_parser_one_line_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['typer'] = None; import openkda.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert done.stderr == "openkda: the command line needs typer and rich: pip install 'openkda[cli]'\n"


def test_wheel(tmp_path: Path) -> None:
    """Built from a copy of the files that git tracks or would: the whole package, its types, its command."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "openkda", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in listed:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "wheels")]
    done = subprocess.run(build, cwd=tmp_path / "source", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "wheels").glob("openkda-*-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "openkda/py.typed" in names and any(n.endswith("licenses/LICENSE") for n in names)
    assert {n for n in listed if n.endswith(".py")} == {n for n in names if n.endswith(".py")}
    entry = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert "openkda = openkda.cli:main" in entry

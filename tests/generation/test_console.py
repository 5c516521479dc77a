"""What a terminal and a pipe receive."""

from __future__ import annotations

import io

import torch
from rich.console import Console

from openkda.generation.console import memory_line, memory_table, size, stream, visible
from openkda.generation.sampling import SamplingOptions
from openkda.models.hybrid import HybridLM
from openkda.models.inspect import describe
from openkda.models.tokenizer import ByteTokenizer

OPTIONS = SamplingOptions(max_new_tokens=30, temperature=1.0, seed=2)


def shown(model: HybridLM, terminal: bool) -> tuple[str, str]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, legacy_windows=False)
    text = stream(model, ByteTokenizer(), "def f[bold](:smile:\n", OPTIONS, console=console)
    return text, out.getvalue()


def test_pipe_receives_prompt_text_and_state(model: HybridLM) -> None:
    text, out = shown(model, terminal=False)
    assert out.startswith("def f[bold](:smile:\n")
    assert "".join(c for c in text if c.isascii() and c.isprintable()) != ""
    assert "full attention of this size" in out and "constant" in out


def test_terminal_receives_the_same_text(model: HybridLM) -> None:
    assert shown(model, terminal=True)[0] == shown(model, terminal=False)[0]
    assert "def f[bold](:smile:" in shown(model, terminal=True)[1]


def test_memory_numbers(model: HybridLM) -> None:
    report = describe(model.config, dtype=torch.float32)
    line = memory_line(report, report.state_bytes(1000), 1000)
    assert size(report.state_bytes(1000)) in line and size(report.full_attention_bytes(1000)) in line
    table = memory_table(report, (10, 10**6))
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    ratio = report.full_attention_bytes(10**6) / report.state_bytes(10**6)
    assert f"{ratio:.1f}x" in out.getvalue() and "1,000,000" in out.getvalue()


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert visible("a\n\tb\x1b[2J\x07\x7f\x9b \u00e9") == "a\n\tb\ufffd[2J\ufffd\ufffd\ufffd \u00e9"


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1536, 1024**2, 5 * 1024**4)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "5.0 TiB",
    ]

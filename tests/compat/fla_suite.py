"""Runs fla's own KDA tests against `openkda.compat.fla`, with nothing in them changed but the imports.

    python tests/compat/fla_suite.py CHECKOUT [pytest options]

CHECKOUT is a checkout of github.com/fla-org/flash-linear-attention (or only its tests/ops/test_kda.py and tests/conftest.py);
fla-core must be importable too, for the helpers that the tests compare with (it names no device where there is no GPU: then the
tests run on the CPU, through our CPU path). Every `from fla.ops.kda... import` becomes an
import of the same names from `openkda.compat.fla`; its conftest, which fills fresh buffers with NaN, runs unchanged.
docs/fla.md says which tests do not apply.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch

FILES = ("tests/conftest.py", "tests/ops/test_kda.py")
KDA = re.compile(r"^from fla\.ops\.kda(?:\.\w+)* import ", re.M)
OURS = "from openkda.compat.fla import "


def rewritten(text: str) -> tuple[str, int]:
    """The test file with its KDA imports renamed, and how many lines that changed."""
    return KDA.subn(OURS, text)


def tests_on_cpu() -> None:
    import fla.utils

    fla.utils.device = "cpu"
    fla.utils.device_torch_lib = torch.cpu


def main(arguments: list[str]) -> int:
    if not arguments:
        raise SystemExit(__doc__)
    checkout = Path(arguments[0])
    if not torch.cuda.is_available():
        tests_on_cpu()
    with tempfile.TemporaryDirectory() as folder:
        changed = 0
        for name in FILES:
            text, lines = rewritten((checkout / name).read_text(encoding="utf-8"))
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            changed += lines
        if not changed:
            raise SystemExit(f"{checkout}: expected imports from fla.ops.kda in {FILES[-1]}, found none")
        print(f"{changed} import lines renamed", flush=True)
        options = ["-p", "no:cacheprovider", "--rootdir", folder, str(Path(folder) / FILES[-1])]
        return int(pytest.main([*options, *arguments[1:]]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Triton's interpreter for tests: kernels on a CPU in float32 (it computes bfloat16 wrongly), in a process of their own.

The interpreter has to be chosen before triton is first imported. A test file that wants it defines its tests under
`if INTERPRETED:` and one test beside them that calls `run_interpreted(__file__)`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(file: str) -> None:
    """The tests of `file` in a process with the interpreter; AssertionError with their output unless all pass."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def patch_interpreter() -> None:
    """Triton 3.6 turns a one-element array into a loop bound with int(), which numpy 2.4 refuses."""
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched

"""A Gluon kernel compiled for Hopper without one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton


def compiled(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], steps: tuple[str, ...], **options: int
) -> tuple[int, int]:
    """(instructions that move spilled registers, bytes of shared memory). types: of what is neither a pointer to float32 nor an
    int32; steps: sizes that divide by 16, as every address does."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    fixed = {n: v for n, v in constants.items() if n in names}
    signature = {n: "constexpr" if n in fixed else types.get(n, "*fp32" if n.endswith("_p") else "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n not in fixed and (n.endswith("_p") or n in steps)
    }
    source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in fixed.items()}, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(built.asm["cubin"])
        f.flush()
        sass = subprocess.run([tool, "-sass", f.name], capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"\b(?:STL|LDL)\b", sass)), built.metadata.shared

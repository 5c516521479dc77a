"""FlashKDA beside ours: built outside the repository from its public source, called without torch's extension machinery.

    python benchmarks/flash_kda.py build FLASHKDA_CHECKOUT CUTLASS_CHECKOUT LIBRARY.so      needs CUDA_HOME; 90 s on one core
    PYTHONPATH=. python benchmarks/flash_kda.py check LIBRARY.so                            needs an H200
    PYTHONPATH=. python benchmarks/hopper_forward.py time LIBRARY.so                        in turns with ours

FlashKDA is MoonshotAI/FlashKDA with the CUTLASS commit that it names as its submodule. Its launcher takes plain pointers, so a
few lines of C make a library that ctypes can call, which depends on no version of torch or Python. What its Python binding does
besides, transposing beta and making the workspace, is done and timed here too.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

SHIM = """
#include "launcher.cu"
#include <cstdint>
extern "C" int flash_kda_forward(
    void const* q, void const* k, void const* v, void const* g, void const* beta, void const* s0, float scale, void* st,
    void* out, void* workspace, int tiles, int tokens, int heads, int n, int64_t const* cu, float const* a_log,
    float const* dt_bias, float gate_scale, void* stream) {
    using B = cutlass::bfloat16_t;
    auto run = [&](auto launch) {
        launch((B const*)q, (B const*)k, (B const*)v, (B const*)g, (B const*)beta, s0, scale, st, (B*)out, workspace, tiles,
               tokens, heads, n, cu, a_log, dt_bias, gate_scale, (cudaStream_t)stream);
    };
    if (cu) run(&launch_fwd<128, true, true, true, true>);
    else run(&launch_fwd<128, true, true, true, false>);
    return int(cudaGetLastError());
}
"""
FLAGS = [
    "-shared", "-Xcompiler", "-fPIC", "-O3", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a", "--use_fast_math",
    "--expt-relaxed-constexpr", "--expt-extended-lambda", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "--ptxas-options=--register-usage-level=10",
]  # fmt: skip
"""Those of FlashKDA's setup.py."""
CHUNK = 16


def build(checkout: str, cutlass: str, library: str) -> None:
    """Both checkouts stay as they are. Only the two variants timed here are instantiated, not all fourteen."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    source = Path(checkout) / "csrc"
    launcher = (source / "smxx" / "fwd_launch.cu").read_text().split("// Explicit instantiations")[0]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "launcher.cu").write_text(launcher)
        Path(folder, "shim.cu").write_text(SHIM)
        paths = [folder, source, source / "smxx", Path(cutlass) / "include", Path(cutlass) / "tools/util/include",
                 Path(cutlass) / "examples/common", home / "include"]  # fmt: skip
        include = [f"-I{p}" for p in paths]
        # static: the library then needs nothing of the toolkit at run time
        command = [
            str(home / "bin/nvcc"),
            *FLAGS,
            "-cudart",
            "static",
            *include,
            f"-L{home / 'lib'}",
            str(Path(folder, "shim.cu")),
            "-o",
            library,
        ]
        subprocess.run(command, check=True)


class FlashKDA:
    """Its forward on [1, T, H, 128] bfloat16 tensors; float32 states [N, H, V, K], zeros where none enters."""

    def __init__(self, library: str) -> None:
        self._call = ctypes.CDLL(library).flash_kda_forward
        p, i, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
        self._call.argtypes = [p] * 6 + [f] + [p] * 3 + [i] * 4 + [p] * 3 + [f, p]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor,
        dt_bias: torch.Tensor, s0: torch.Tensor, cu: torch.Tensor | None, bound: float = -5.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        _, t, h, d = q.shape
        n = s0.shape[0]
        tiles = (t + CHUNK - 1) // CHUNK + (n if cu is not None else 0)
        per_tile = 3 * CHUNK * d * 2 + d * 4 + 2 * CHUNK * CHUNK * 2
        size = h * (t // CHUNK + 1 + n) * per_tile + ((n + 1) * 4 + 127) // 128 * 128
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        across = beta[0].t().contiguous()
        out, st = torch.empty_like(v), torch.empty_like(s0)
        error = self._call(
            *(x.data_ptr() for x in (q, k, v, g, across, s0)), d**-0.5, *(x.data_ptr() for x in (st, out, workspace)),
            tiles, t, h, n, None if cu is None else cu.data_ptr(), a_log.data_ptr(), dt_bias.data_ptr(),
            bound * 1.4426950408889634, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        if error:
            raise RuntimeError(f"FlashKDA's launch returned CUDA error {error}")
        return out, st


@cache
def _loaded(library: str) -> FlashKDA:
    return FlashKDA(library)


def call(
    library: str, args: tuple[Any, ...], lens: list[int], cu: torch.Tensor | None, transposed: bool = False
) -> partial[tuple[torch.Tensor, torch.Tensor]]:
    """A call on inputs as benchmarks/hopper_forward.py makes them; zeros enter where they name no state."""
    *tokens, s0 = args
    if s0 is None:
        s0 = torch.zeros(len(lens), tokens[0].shape[2], 128, 128, device=tokens[0].device)
    elif transposed:
        s0 = s0.transpose(2, 3).contiguous()
    return partial(_loaded(library), *tokens, s0, None if cu is None else cu.long())


def check(library: str) -> None:
    """Its errors against the float64 loop, on a pack with slow gates."""
    import hopper_forward as ours

    lens = [1, 130, 64, 317]
    for shift in (0.0, -6.0):
        args = ours.inputs(lens, 4, 4, shift)
        want_o, want_s = ours.reference(*args, lens)
        o, s = call(library, args, lens, ours.offsets(tuple(lens)), True)()
        print(f"gates {shift}: output {ours.rel(o, want_o):.1e} state {ours.rel(s.transpose(2, 3), want_s):.1e}")


if __name__ == "__main__":
    {"build": build, "check": check}[sys.argv[1]](*sys.argv[2:])

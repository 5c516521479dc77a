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
    """`patch_loop_bounds`. Every address that a kernel reads or writes is checked: it lies inside a tensor that the kernel was
    given. And maxima and minima treat a NaN as a GPU does."""
    import triton.runtime.interpreter as interpreter

    _check_addresses(interpreter)
    _lose_nans(interpreter)
    patch_loop_bounds()


def patch_loop_bounds() -> None:
    """Triton 3.6 turns a one-element array into a loop bound with int(), which numpy 2.4 refuses."""
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _lose_nans(interpreter: Any) -> None:
    """max.f32 and min.f32 of PTX return the other operand, where numpy's (and `propagate_nan`'s) return the NaN."""
    import numpy

    builder = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmin)

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate: Any) -> Any:
        keep = "ALL" in str(propagate)
        upper, lower = (numpy.minimum, numpy.maximum) if keep else (numpy.fmin, numpy.fmax)
        return self.ternary_op(x, low, high, lambda a, b, c: lower(upper(a, c), b))

    builder.create_clampf = clamp
    as_bits = builder.create_bitcast

    def bitcast(self: Any, x: Any, kind: Any) -> Any:
        if x.data.dtype == numpy.float32:  # a GPU writes NaN as ones alone
            bits = x.data.copy().view(numpy.uint32)
            bits[numpy.isnan(x.data)] = 0x7FFFFFFF
            x = interpreter.TensorHandle(bits.view(numpy.float32), x.dtype.scalar)
        return as_bits(self, x, kind)

    builder.create_bitcast = bitcast


def _check_addresses(interpreter: Any) -> None:
    """What a GPU calls an illegal memory access, or does not notice, is an AssertionError here."""
    import numpy
    from torch import Tensor

    begin, end = numpy.empty(0, numpy.int64), numpy.empty(0, numpy.int64)  # of the running kernel's tensors, ascending
    hand_over = interpreter.GridExecutor._init_args_hst
    load, store = interpreter.InterpreterBuilder.create_masked_load, interpreter.InterpreterBuilder.create_masked_store

    def handing_over(self: Any, args: Any, kwargs: Any) -> Any:
        nonlocal begin, end
        args, kwargs = hand_over(self, args, kwargs)
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.numel()]
        spans = sorted((t.data_ptr(), t.data_ptr() + _extent(t)) for t in tensors)
        begin, end = (numpy.array([span[i] for span in spans], numpy.int64) for i in (0, 1))
        end = numpy.maximum.accumulate(end) if len(end) else end  # tensors may lie in one another
        return args, kwargs

    def check(pointers: Any, mask: Any, what: str) -> None:
        at = pointers.data.astype(numpy.int64)[mask.data.astype(bool)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        owner = numpy.searchsorted(begin, at, "right") - 1
        outside = (owner < 0) | (at + size > end[numpy.maximum(owner, 0)]) if len(begin) else numpy.ones(at.shape, bool)
        assert not outside.any(), f"a kernel {what} {int(outside.sum())} elements outside the tensors that it was given"

    def loading(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "reads")
        return load(self, pointers, mask, *rest)

    def storing(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "writes")
        return store(self, pointers, value, mask, *rest)

    interpreter.GridExecutor._init_args_hst = handing_over
    interpreter.InterpreterBuilder.create_masked_load = loading
    interpreter.InterpreterBuilder.create_masked_store = storing


def _extent(t: Any) -> int:
    """Bytes from a tensor's first element to behind its last."""
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()

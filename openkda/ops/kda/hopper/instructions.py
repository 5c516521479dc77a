"""Single instructions that Gluon has no name for, and the gate's rate: shared by all Hopper kernels of this op."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import PropagateNan

LOG2E = gl.constexpr(1.4426950408889634)
ALL_NAN = gl.constexpr(PropagateNan.ALL)  # a plain minimum or maximum returns the other operand


@gluon.jit
def _ex2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _ex2_neg(x):
    """2^-x; written as x's negation outside, it costs an instruction an element."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; neg.f32 t, $1; ex2.approx.ftz.f32 $0, t; }", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _ex2_neg_abs(x):
    """2^-|x|."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; abs.f32 t, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }", "=f,f", [x], dtype=gl.float32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _lg2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _rcp(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _rsqrt(x):
    return gl.inline_asm_elementwise(
        "rsqrt.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _rate(a_log):
    """exp(A_log) within 2^-115 and 2^115: infinity times a raw gate of 0, or minus another infinity, would be NaN, and the
    -3e38 that stands for "past the end" must stay far below 0 as a sigmoid's argument. To a finite raw gate of less than
    2^100 the lower bound is as good as 0."""
    low = gl.maximum(a_log * LOG2E, -115.0, propagate_nan=ALL_NAN)
    return gl.exp2(gl.minimum(low, 115.0, propagate_nan=ALL_NAN))


@gluon.jit
def let_dependents_start():
    """Programs of a kernel launched beside this one (`launch.py`) may begin once every program of this one has said so."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def wait_for_the_kernel_before():
    """In a kernel launched beside the one before it: goes on when that one is done and all it wrote can be read. Otherwise
    nothing."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_after_the_kernel_before():
    """The last program of a kernel launched beside the one before it ends behind that one: what follows in the stream waits for
    both. Otherwise nothing."""
    if gl.program_id(0) == gl.num_programs(0) - 1:
        wait_for_the_kernel_before()

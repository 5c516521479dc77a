"""Gluon kernels whose warps play roles, on a CPU: a thread a role, barriers that really wait, copies done when asked for.

On top of `gluon_on_cpu.py`: mbarriers with their phases, tiles copied by descriptor, warp-group products. A role that waits for
what never comes is an error after some seconds; what is lost is the order of the asynchronous engines.
"""

from __future__ import annotations

import threading
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import gluon_on_cpu as base
import torch
from gluon_on_cpu import Pointer, Shared, Value, _mma, _plain

PATIENCE = 60.0


class _Barrier:
    def __init__(self, count: int) -> None:
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0


class _Run:
    lock = threading.Condition()
    broken = False
    barriers: ClassVar[dict[int, _Barrier]] = {}


def _of(b: Shared) -> _Barrier:
    return _Run.barriers[b.v.data_ptr()]


def _turn(b: _Barrier) -> None:
    if b.pending == 0 and b.bytes == 0:
        b.phase, b.pending = b.phase + 1, b.count
        _Run.lock.notify_all()
    assert b.pending >= 0, "more arrivals than the barrier counts"


def _init(b: Shared, count: int) -> None:
    _Run.barriers[b.v.data_ptr()] = _Barrier(count)


def _arrive(b: Shared, count: int = 1) -> None:
    with _Run.lock:
        _of(b).pending -= count
        _turn(_of(b))


def _expect(b: Shared, size: int, pred: Any = True) -> None:
    if bool(_plain(pred)):
        with _Run.lock:
            _of(b).bytes += size
            _of(b).pending -= 1


def _wait(b: Shared, phase: Any) -> None:
    want = int(_plain(phase))
    with _Run.lock:
        done = _Run.lock.wait_for(lambda: _Run.broken or _of(b).phase & 1 != want, PATIENCE)
        assert done and not _Run.broken, "a role waits for ever"


class Matrix:
    """A descriptor: tiles of a matrix."""

    def __init__(self, x: torch.Tensor, block: tuple[int, int]) -> None:
        self.x, self.block = x, block

    def _cut(self, at: Any) -> tuple[torch.Tensor, int, int]:
        r, c = (int(_plain(i)) for i in at)
        rows, columns = self.block
        assert r >= 0 and c >= 0
        x = self.x[r : r + rows, c : c + columns]
        return x, x.shape[0], x.shape[1]


def _in(desc: Matrix, at: Any, barrier: Shared, to: Any, pred: Any = True) -> None:
    if not bool(_plain(pred)):
        return
    x, rows, columns = desc._cut(at)
    assert tuple(to.v.shape) == desc.block and to.dtype == x.dtype
    to.v.zero_()
    to.v[:rows, :columns] = x
    with _Run.lock:
        b = _of(barrier)
        b.bytes -= to.v.numel() * to.v.element_size()
        assert b.bytes >= 0, "more bytes than the barrier expects"
        _turn(b)


def _out(desc: Matrix, at: Any, source: Shared) -> None:
    x, rows, columns = desc._cut(at)
    assert tuple(source.v.shape) == desc.block and source.dtype == x.dtype
    x.copy_(source.v[:rows, :columns])


class _Quarters:
    """[2 n, 64, 64] seen as [8 n, 32, 32]: with 64 bytes a swizzled row, the left half of the columns lies before the right."""

    def __init__(self, v: torch.Tensor) -> None:
        self.v = v

    def index(self, i: Any) -> Shared:
        stage, q = divmod(int(_plain(i)), 4)
        return Shared(self.v[stage, q % 2 * 32 :][:32, q // 2 * 32 :][:, :32])


def _reinterpret(self: Shared, dtype: torch.dtype, shape: Any, layout: Any) -> Any:
    shape = list(shape)
    if shape[1:] == [32, 32] and self.shape[1:] == [64, 64]:
        return _Quarters(self.v)
    if self.shape == [64, 128] and shape in ([2, 64, 64], [4, 64, 32]):  # columns in blocks, one behind the other
        return Shared(self.v.view(dtype).view(64, shape[0], shape[2]).permute(1, 0, 2))
    return Shared(self.v if self.shape == shape and self.dtype == dtype else self.v.view(dtype).view(*shape))


def _reshape(self: Shared, shape: Any) -> Shared:
    return Shared(self.v.reshape(list(shape)))  # only ever read


def _product(a: Value, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    assert a.dtype == b.dtype == torch.float16 and bool(torch.isfinite(a.v).all() or torch.isnan(acc.v).any())
    return _mma(a, Value(b.v), acc if use_acc else Value(torch.zeros_like(acc.v)))


def _specialize(roles: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    errors: list[BaseException] = []

    def play(f: Any, args: tuple[Any, ...]) -> None:
        try:
            f(*args)
        except BaseException as error:
            errors.append(error)
            with _Run.lock:
                _Run.broken = True
                _Run.lock.notify_all()

    threads = [threading.Thread(target=play, args=role) for role in roles]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def _asm(code: str, constraints: str, args: list[Value], **options: Any) -> Value:
    name = code.split(".")[0]
    if name == "mul":
        return Value(args[0].v * args[1].v)
    if name == "rsqrt":
        return Value(args[0].v.rsqrt())
    return args[0] if name == "mov" else base._asm(code, constraints, args, **options)


def _broadcast(x: Value, y: Value) -> tuple[Value, Value]:
    a, b = torch.broadcast_tensors(x.v, y.v)
    return Value(a), Value(b)


def load(*modules: ModuleType) -> dict[str, Any]:
    """As `gluon_on_cpu.load`."""
    Value.__index__ = lambda self: int(self.v)  # type: ignore[attr-defined]
    Shared._reinterpret, Shared.reshape = _reinterpret, _reshape  # type: ignore[attr-defined, method-assign]
    base._language.broadcast, base._language.join = _broadcast, lambda x, y: Value(torch.stack([x.v, y.v], -1))
    base._language.warp_specialize, base._language.inline_asm_elementwise = _specialize, _asm
    base._language.allocate_shared_memory = lambda dtype, shape, layout=None: Shared(
        torch.zeros(shape, dtype=dtype) if dtype == torch.int64 else torch.full(shape, float("nan"), dtype=dtype)
    )
    base._language.associative_scan = lambda x, axis, f: Value(x.v.cumsum(axis).to(x.dtype))  # every one here is a sum
    extra = {
        "mbarrier": SimpleNamespace(MBarrierLayout=lambda: None, init=_init, arrive=_arrive, expect=_expect, wait=_wait),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=_in, async_copy_shared_to_global=_out, store_wait=lambda n: None
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": _product,
        "warpgroup_mma_wait": lambda n, deps: deps[0],
    }  # fmt: skip
    return base.load(*modules, names=extra)


def run(kernel: Any, programs: int, arguments: list[Any]) -> None:
    """arguments in the kernel's order: matrices, tensors, numbers; constants are plain numbers of Python's bool or None."""
    base._Grid.programs = programs
    given = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in arguments]
    for base._Grid.program in range(programs):
        _Run.barriers.clear()
        _Run.broken = False
        kernel(*given)

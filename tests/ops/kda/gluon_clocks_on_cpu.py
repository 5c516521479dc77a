"""Gluon kernels whose warps play roles, on a CPU, with shared memory byte for byte and a detector of races.

On top of `gluon_on_cpu.py`. A tile lies as on the card (columns in blocks of the swizzle's width, one behind the other), so
that other views of its bytes see what they see there. Every role has a vector clock, carried by mbarriers from those that
arrive to those that wait. Copies and warp-group products are roles of their own for as long as they take: a product reads until
it is waited for, a copy writes until its barrier turns, or reads until `store_wait`. Two accesses of which one writes and that
no clock orders are an error, whatever the threads happened to do. Inside a role all is taken to be in order: its own barriers
are Triton's (`gluon_warps_on_cpu.py` looks at those, warp by warp).
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import gluon_on_cpu as base
import torch
from gluon_on_cpu import Pointer, Value, _mma, _plain
from torch import Tensor

PATIENCE = 60.0
Clock = dict[int, int]


class _Run:
    """What the roles of one program share."""

    lock = threading.Condition()
    barriers: ClassVar[dict[tuple[int, int], _Barrier]] = {}
    broken = False
    roles = 0
    mine: ClassVar = threading.local()


class _Role:
    def __init__(self, clock: Clock) -> None:
        with _Run.lock:
            self.name, _Run.roles = _Run.roles, _Run.roles + 1
        self.clock = dict(clock) | {self.name: 1}
        self.products: list[Clock] = []
        self.stores: list[Clock] = []

    def learn(self, clock: Clock) -> None:
        for name, tick in clock.items():
            self.clock[name] = max(tick, self.clock.get(name, 0))

    def behind(self) -> Clock:
        """What others know who hear of all that this role has done, which goes on with a new tick."""
        clock = dict(self.clock)
        self.clock[self.name] += 1
        return clock


def _me() -> _Role:
    if not hasattr(_Run.mine, "role"):
        _Run.mine.role = _Role({})
    role: _Role = _Run.mine.role
    return role


class Bytes:
    """An allocation: its bytes, and of each byte who wrote it last and who has read it since."""

    def __init__(self, size: int, value: int) -> None:
        self.raw = torch.full((size,), value, dtype=torch.uint8)
        self.writer, self.tick = torch.full((size,), -1), torch.zeros(size, dtype=torch.int64)
        self.readers: dict[int, Tensor] = {}

    def _ordered(self, names: Tensor, ticks: Tensor, clock: Clock, what: str) -> None:
        for name in names.unique().tolist():
            latest = int(ticks[names == name].max())
            assert name < 0 or latest <= clock.get(name, 0), (
                f"a race: {what} of role {name} that this one does not know of"
            )

    def read(self, at: Tensor, role: _Role) -> None:
        with _Run.lock:
            self._ordered(self.writer[at], self.tick[at], role.clock, "a write")
            self.readers.setdefault(role.name, torch.zeros(len(self.raw), dtype=torch.int64))[at] = role.clock[
                role.name
            ]

    def write(self, at: Tensor, role: _Role) -> None:
        with _Run.lock:
            self._ordered(self.writer[at], self.tick[at], role.clock, "a write")
            for name, ticks in self.readers.items():
                assert int(ticks[at].max()) <= role.clock.get(name, 0), f"a race: a read of role {name}"
            self.writer[at], self.tick[at] = role.name, role.clock[role.name]


class Layout:
    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options
        self.width = options.get("swizzle_byte_width", 0)

    @property
    def value(self) -> Layout:
        return self


def _size(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


def _places(shape: Any, layout: Any, dtype: torch.dtype) -> Tensor:
    """Bytes at which the elements of a tile begin."""
    shape = [int(_plain(n)) for n in shape]
    count = torch.Size(shape).numel()
    if layout is None or not layout.width or len(shape) < 2:
        return torch.arange(count).view(*shape) * _size(dtype)
    rows, columns = shape[-2:]
    width = min(layout.width // _size(dtype), columns)
    blocks = torch.arange(count).view(-1, columns // width, rows, width)
    return blocks.permute(0, 2, 1, 3).reshape(*shape) * _size(dtype)


class Shared:
    def __init__(self, memory: Bytes, dtype: torch.dtype, places: Tensor) -> None:
        self.memory, self.dtype, self.places, self.shape = memory, dtype, places, list(places.shape)

    def index(self, i: Any) -> Shared:
        i = int(_plain(i))
        assert 0 <= i < self.shape[0], (i, self.shape)
        return type(self)(self.memory, self.dtype, self.places[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return type(self)(self.memory, self.dtype, self.places.narrow(dim, start, length))

    def permute(self, order: Any) -> Shared:
        return type(self)(self.memory, self.dtype, self.places.permute(*order))

    def reshape(self, shape: Any) -> Shared:
        return type(self)(self.memory, self.dtype, self.places.reshape(*shape))

    def _reinterpret(self, dtype: torch.dtype, shape: Any, layout: Any) -> Shared:
        first = int(self.places.min())
        places = first + _places(shape, layout, dtype)
        assert int(places.max()) + _size(dtype) <= int(self.places.max()) + _size(self.dtype), (
            "beyond what it is made of"
        )
        return type(self)(self.memory, dtype, places)

    @property
    def touched(self) -> Tensor:
        return (self.places.reshape(-1, 1) + torch.arange(_size(self.dtype))).reshape(-1)

    def get(self, role: _Role) -> Tensor:
        self.memory.read(self.touched, role)
        return self.memory.raw.view(self.dtype)[self.places // _size(self.dtype)]

    def put(self, x: Tensor, role: _Role) -> None:
        self.memory.write(self.touched, role)
        self.memory.raw.view(self.dtype)[self.places // _size(self.dtype)] = x

    def load(self, layout: Any) -> Value:
        return Value(self.get(_me()))

    def store(self, x: Value) -> None:
        numbers = not x.dtype.is_floating_point
        assert list(x.shape) == self.shape and (x.dtype == self.dtype or numbers), (
            x.dtype,
            x.shape,
            self.dtype,
            self.shape,
        )
        self.put(x.v.to(self.dtype), _me())


def _allocate(dtype: torch.dtype, shape: Any, layout: Any = None) -> Shared:
    places = _places(shape, layout, dtype)
    return Shared(Bytes(places.numel() * _size(dtype), 0 if dtype == torch.int64 else 255), dtype, places)


class _Barrier:
    def __init__(self, memory: Bytes, count: int) -> None:
        self.memory, self.count, self.pending, self.bytes, self.phase = memory, count, count, 0, 0
        self.coming: Clock = {}
        self.known: Clock = {}

    def heard(self, clock: Clock) -> None:
        for name, tick in clock.items():
            self.coming[name] = max(tick, self.coming.get(name, 0))
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending, self.known, self.coming = self.phase + 1, self.count, self.coming, {}
            _Run.lock.notify_all()


def _of(b: Shared) -> _Barrier:
    return _Run.barriers[id(b.memory), int(b.places.reshape(-1)[0])]


def _init(b: Shared, count: int) -> None:
    _Run.barriers[id(b.memory), int(b.places.reshape(-1)[0])] = _Barrier(b.memory, count)


def _arrive(b: Shared, count: int = 1) -> None:
    with _Run.lock:
        _of(b).pending -= count
        _of(b).heard(_me().behind())


def _expect(b: Shared, size: int, pred: Any = True) -> None:
    if bool(_plain(pred)):
        with _Run.lock:
            _of(b).bytes += size
            _of(b).pending -= 1
            _of(b).heard(_me().behind())


def _wait(b: Shared, phase: Any) -> None:
    want = int(_plain(phase))
    with _Run.lock:
        done = _Run.lock.wait_for(lambda: _Run.broken or _of(b).phase & 1 != want, PATIENCE)
        assert done and not _Run.broken, "a role waits for ever"
        _me().learn(_of(b).known)


def _invalidate(b: Shared) -> None:
    """Its bytes may be used for something else from here on."""
    del _Run.barriers[id(b.memory), int(b.places.reshape(-1)[0])]


class Matrix:
    """A descriptor: tiles of a matrix."""

    def __init__(self, x: Tensor, block: tuple[int, int]) -> None:
        self.x, self.block = x, block

    def cut(self, at: Any) -> Tensor:
        r, c = (int(_plain(i)) for i in at)
        assert r >= 0 and c >= 0
        return self.x[r : r + self.block[0], c : c + self.block[1]]


def _in(desc: Matrix, at: Any, barrier: Shared, to: Shared, pred: Any = True) -> None:
    if not bool(_plain(pred)):
        return
    x = desc.cut(at)
    assert tuple(to.shape) == desc.block and to.dtype == x.dtype
    tile = torch.zeros(desc.block, dtype=x.dtype)
    tile[: x.shape[0], : x.shape[1]] = x
    copy = _Role(_me().clock)
    to.put(tile, copy)
    with _Run.lock:
        _of(barrier).bytes -= tile.numel() * tile.element_size()
        assert _of(barrier).bytes >= 0, "more bytes than the barrier expects"
        _of(barrier).heard(copy.clock)


def _out(desc: Matrix, at: Any, source: Shared) -> None:
    x, copy = desc.cut(at), _Role(_me().clock)
    assert tuple(source.shape) == desc.block and source.dtype == x.dtype
    x.copy_(source.get(copy)[: x.shape[0], : x.shape[1]])
    _me().stores.append(copy.clock)


def _store_wait(pending: int) -> None:
    role = _me()
    while len(role.stores) > pending:
        role.learn(role.stores.pop(0))


def _product(a: Value, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    assert a.dtype == b.dtype == torch.float16
    reading = _Role(_me().clock)
    y = Value(b.get(reading))
    _me().products.append(reading.clock)
    return _mma(a, y, acc if use_acc else Value(torch.zeros_like(acc.v)))


def _product_wait(pending: int, deps: list[Value]) -> Any:
    role = _me()
    while len(role.products) > pending:
        role.learn(role.products.pop(0))
    return deps[0] if len(deps) == 1 else tuple(deps)


def _specialize(roles: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    errors: list[BaseException] = []
    start = _me().behind()

    def play(f: Any, args: tuple[Any, ...]) -> None:
        _Run.mine.role = _Role(start)
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


def _tensor(x: Any) -> Tensor:
    return torch.as_tensor(_plain(x))


def _asm(code: str, constraints: str, args: list[Any], **options: Any) -> Value:
    if code.startswith("griddepcontrol"):  # between kernels, and here one runs after the other
        return Value(torch.tensor(0))
    x = args[0] if isinstance(args[0], Value) else Value(torch.tensor(float(args[0])))
    if code.startswith(("mov.b32", "prefetch")):
        return x
    if code.startswith("mul.rn.f16x2"):
        return Value(x.v * args[1].v)
    if code.startswith(("rsqrt", "ex2")):
        return Value(torch.rsqrt(x.v) if code.startswith("rsqrt") else torch.exp2(x.v))
    return base._asm(code, constraints, [x, *args[1:]], **options)


def _where(m: Any, a: Any, b: Any) -> Any:
    if isinstance(m, bool):
        return a if m else b
    x, y = _plain(a), _plain(b)
    if torch.is_tensor(x) != torch.is_tensor(y):
        x, y = (torch.as_tensor(t, dtype=(x if torch.is_tensor(x) else y).dtype) for t in (x, y))
    return Value(torch.where(_tensor(m), *(t if torch.is_tensor(t) else torch.as_tensor(t) for t in (x, y))))


def _atomic_add(p: Pointer, x: Any, mask: Any = None) -> Value:
    with _Run.lock:
        old = p.read(mask, 0)
        p.write(Value(old + _plain(x)), mask)
        return Value(old)


def _extreme(f: Any) -> Any:
    def of(a: Any, b: Any, propagate_nan: Any = None) -> Value:
        x = _tensor(a)
        return Value(f(x, torch.as_tensor(_plain(b), dtype=x.dtype)))

    return of


def _complete() -> None:
    """Operators that the other kernels' values do without."""
    Value.__index__ = Value.__int__ = lambda self: int(self.v)  # type: ignore[attr-defined]
    Value.type = SimpleNamespace(layout=None)  # type: ignore[attr-defined]
    Pointer.to = lambda self, dtype: Value(self.reach(None)[1])  # type: ignore[attr-defined]
    for name, f in (("xor", torch.bitwise_xor), ("or", torch.bitwise_or)):
        setattr(Value, f"__{name}__", lambda self, other, f=f: Value(f(self.v, _tensor(other))))
    Value.__rfloordiv__ = lambda self, other: Value(torch.div(_tensor(other), self.v, rounding_mode="trunc"))  # type: ignore[attr-defined]


_language = SimpleNamespace(
    **vars(base._language)
    | {n: type(n, (Layout,), {}) for n in base._LAYOUTS}
    | {
        "allocate_shared_memory": _allocate, "warp_specialize": _specialize, "inline_asm_elementwise": _asm, "where": _where,
        "atomic_add": _atomic_add, "minimum": _extreme(torch.minimum), "maximum": _extreme(torch.maximum),
        "exp2": lambda x: Value(torch.exp2(_tensor(x))),
        "arange": lambda a, b, layout=None: Value(torch.arange(int(a), int(b), dtype=torch.int32)),
        "join": lambda a, b: Value(torch.stack([a.v, b.v], -1)), "split": lambda x: tuple(map(Value, x.v.unbind(-1))),
        "broadcast": lambda a, b: tuple(map(Value, torch.broadcast_tensors(a.v, b.v))),
        "associative_scan": lambda x, axis, f: Value(x.v.cumsum(axis).to(x.dtype)),
    }
)  # fmt: skip
_NAMES = {
    "gl": _language, "gluon": SimpleNamespace(jit=lambda f=None, **options: f or (lambda g: g)), "mma_v2": _mma,
    "PropagateNan": SimpleNamespace(ALL=None), "fence_async_shared": lambda: None, "warpgroup_mma": _product,
    "warpgroup_mma_wait": _product_wait, "unordered": lambda: None,
    "mbarrier": SimpleNamespace(MBarrierLayout=lambda: None, init=_init, arrive=_arrive, expect=_expect, wait=_wait,
                                invalidate=_invalidate),
    "tma": SimpleNamespace(
        async_copy_global_to_shared=_in, async_copy_shared_to_global=_out, store_wait=_store_wait
    ),
}  # fmt: skip


def load(*modules: ModuleType, without: str = "", instead: str = "pass", **constants: Any) -> dict[str, Any]:
    """The names of Gluon modules, one source after the other, with torch under them; then constants in place of theirs.
    without: a statement of the sources that is left out, or replaced."""
    _complete()
    names = dict(_NAMES)
    for module in modules:
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()  # lines keep their numbers
        source = re.sub(
            r"^(from|import) .*?(\((.|\n)*?^\).*$|$)", lambda m: "\n" * m[0].count("\n"), source, flags=re.M
        )
        source = source.replace(without, instead) if without else source
        exec(compile(re.sub(r"(\w+): gl\.constexpr = ", r"\1 = ", source), module.__file__, "exec"), names)
    names.update(constants)
    return names


def run(kernel: Any, programs: int, arguments: list[Any]) -> None:
    """arguments in the kernel's order: matrices, tensors, numbers, Python's bool."""
    base._Grid.programs = programs
    number = lambda x: Value(torch.tensor(x)) if type(x) in (int, float) else x  # noqa: E731
    given = [Pointer(x) if isinstance(x, Tensor) else number(x) for x in arguments]
    for base._Grid.program in range(programs):
        _Run.barriers, _Run.broken, _Run.roles, _Run.mine = {}, False, 0, threading.local()
        kernel(*given)

"""Which warp of a role touches which byte, and whether a barrier stands between two of them. Over `gluon_clocks_on_cpu.py`.

Every value carries, beside its elements, the set of warps that hold each: from its layout as Triton's own builder understands
it (an exact map, replicas included) where a value is made, loaded or converted; by the same reshape, permutation or sum behind.

A barrier is where the source has one, inside of an exchange between warps, and then by one rule only: between two accesses of
one allocation of which one writes Triton has put one somewhere. So what was before the first is before the second; not if a
mark (`unordered`) stands between them that took a barrier (`marks_taken.py`), for it may have been that one. Triton has more.

The law: between two accesses of a byte by two warps, one of which writes, there is a barrier. An arrival comes from the first
warp, so whatever the others touched has to be behind a barrier; so has their wait for a phase of the barrier that it turns. A
copy is an access by the first warp, a warp-group product reads with all warps until it has been waited for. Of a replicated
value all who hold it are taken to write.

What the engine or another role has written is ordered by mbarriers: those are the clocks' affair. Not seen: paths that no input
took, accesses of global memory, fences, and memory that Triton gives to two buffers one after the other. Its scratch memory
counts as one buffer of its own.
"""

from __future__ import annotations

import sys
import threading
from functools import cache, reduce
from types import ModuleType, SimpleNamespace
from typing import Any

import gluon_clocks_on_cpu as clocks
import gluon_on_cpu as base
import torch
from gluon_clocks_on_cpu import Bytes, Layout, Shared, _me
from gluon_clocks_on_cpu import load as _load
from gluon_on_cpu import Pointer, Value
from marks_taken import Place, place
from torch import Tensor
from triton._C.libtriton import gluon_ir, ir, nvidia
from triton.experimental.gluon import language

WARPS = 4
_HERE = "/kda/hopper/"
_lock = threading.Lock()
_held: dict[Any, Tensor] = {}
_context = ir.context()
ir.load_dialects(_context)
nvidia.load_dialects(_context)
_builder = gluon_ir.GluonOpBuilder(_context)


def _real(x: Any) -> Any:
    """Triton's own layout."""
    if not isinstance(x, Layout):
        return x
    return getattr(language, type(x).__name__)(*map(_real, x.args), **{n: _real(v) for n, v in x.options.items()})


def held(layout: Layout, shape: Any) -> Tensor:
    """Of each element the warps that hold it, one bit each."""
    real, shape = _real(layout), [int(base._plain(n)) for n in shape]
    with _lock:
        if (real, *shape) not in _held:
            linear = _builder.to_linear_layout(real._to_ir(_builder), shape)
            at = torch.zeros(1, len(shape), dtype=torch.int64)
            for b in linear.reg_bases + linear.lane_bases:
                at = torch.cat([at, at ^ torch.tensor(b)])
            warps = torch.zeros(1, len(shape), dtype=torch.int64)
            for b in linear.warp_bases:
                warps = torch.cat([warps, warps ^ torch.tensor(b)])
            found = torch.zeros(shape, dtype=torch.int64)
            for w, first in enumerate(warps):
                found[tuple((at ^ first).unbind(1))] |= 1 << w
            assert bool((found > 0).all())
            _held[real, *shape] = found
        return _held[real, *shape]


# ---- the law --------------------------------------------------------------------------------------------------------


class _Order:
    """What a role has done so far, by number: of each byte and warp the last read and the last write."""

    def __init__(self) -> None:
        self.now = self.behind = self.marked_at = 0  # of all up to `behind` it is known that a barrier came after it
        self.marked = False
        self.warps = WARPS
        self.memories: dict[int, tuple[Bytes, Tensor, Tensor]] = {}
        self.latest: dict[int, list[int]] = {}  # of an allocation: read, write
        self.touched = torch.zeros(WARPS, dtype=torch.int64)
        self.waits: dict[Any, int] = {}
        self.products: list[tuple[Bytes, Tensor]] = []
        self.copies: list[tuple[Bytes, Tensor]] = []
        self.scratch = 0
        self.places = ["its beginning"]

    def step(self) -> bool:
        """The next access; whether its barrier is left out."""
        self.now += 1
        frame: Any = sys._getframe(2)
        while _HERE not in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        self.places.append(f"{frame.f_code.co_filename.rsplit('/')[-1]}:{frame.f_lineno}")
        marked, self.marked = self.marked, False
        if marked:
            self.marked_at = self.now
        return marked

    def of(self, memory: Bytes) -> tuple[Tensor, Tensor]:
        if id(memory) not in self.memories:
            none = torch.zeros(WARPS, len(memory.raw), dtype=torch.int64)
            self.memories[id(memory)] = memory, none, none.clone()
        return self.memories[id(memory)][1:]

    def touch(self, memory: Bytes, at: Tensor, holders: Tensor, write: bool, engine: bool = False) -> None:
        """engine: it is a copy that is sent for, of which Triton need not know what it touches."""
        marked = self.step()
        writes, reads = self.of(memory)
        past = writes[:, at]
        if write:
            past = torch.maximum(past, reads[:, at])
        latest = self.latest.setdefault(id(memory), [0, 0])
        if not marked and not engine and max(latest[not write :]) >= self.marked_at:
            self.behind = max(self.behind, *latest[not write :])
        who = (holders >> torch.arange(WARPS)[:, None] & 1).bool()
        late = past > self.behind
        wrong = late.sum(0) * who.sum(0) > (late & who).sum(0)
        if bool(wrong.any()):
            earlier = int(torch.where(late & wrong, past, 0).max())
            raise AssertionError(
                f"no barrier between warps: {self.places[earlier]}, then {self.places[-1]}"
                f" {'writes' if write else 'reads'} {int(wrong.sum())} bytes"
            )
        if not engine:
            latest[write] = self.now
        if not (engine and write):
            into = writes if write else reads
            into[:, at] = torch.where(who, self.now, into[:, at])
            self.touched[who.any(1)] = self.now

    def barrier(self) -> None:
        assert not self.marked, "a mark in front of a barrier of the source, which would be left out"
        self.behind = self.now

    def exchange(self) -> None:
        """Between warps, through scratch memory: written, a barrier, read."""
        marked = self.step()
        assert not marked, f"a mark in front of an exchange between warps: {self.places[-1]}"
        assert self.scratch <= self.behind or self.scratch >= self.marked_at, (
            f"no barrier between two exchanges: {self.places[self.scratch]}, then {self.places[-1]}"
        )
        self.behind, self.scratch = self.now - 1, self.now  # read behind the barrier inside

    def arrives(self, barrier: Any, announces: bool) -> None:
        self.step()
        last = int(self.touched[1:].max()) if announces else 0
        assert last <= self.behind, f"not behind a barrier: {self.places[last]}, announced at {self.places[-1]}"
        waited = self.waits.get(barrier, 0) if self.warps > 1 else 0
        assert waited <= self.behind, f"turns while some may still wait: {self.places[waited]}, then {self.places[-1]}"

    def again(self, done: tuple[Bytes, Tensor], warps: int) -> None:
        """It has gone on reading until here."""
        self.now += 1
        self.places.append(self.places[-1])
        reads = self.of(done[0])[1]
        reads[:warps, done[1]] = self.now
        self.touched[:warps] = self.now


def _order() -> _Order:
    role: Any = _me()
    if not hasattr(role, "order"):
        role.order = _Order()
    order: _Order = role.order
    return order


_idle: set[tuple[Place, ...]] = set()


def _mark() -> None:
    calls: list[Place] = []
    frame: Any = sys._getframe(1)
    while frame is not None and _HERE in frame.f_code.co_filename:
        calls.append(place(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    if tuple(calls) not in _idle:
        _order().marked = True


def _key(b: Shared) -> tuple[int, int]:
    return id(b.memory), int(b.places.reshape(-1)[0])


def _all(b: Shared, warps: int) -> tuple[Tensor, Tensor]:
    at = b.touched
    return at, torch.full(at.shape, (1 << warps) - 1)


class _Shared(Shared):
    def _bytes_of(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.touched, h.reshape(-1, 1).expand(-1, clocks._size(self.dtype)).reshape(-1)

    def load(self, layout: Any) -> Value:
        h = held(layout, self.shape)
        _order().touch(self.memory, *self._bytes_of(h), write=False)
        return _with(super().load(layout), h)

    def store(self, x: Value) -> None:
        assert x.held is not None and list(x.held.shape) == self.shape
        _order().touch(self.memory, *self._bytes_of(x.held), write=True)
        super().store(x)


def _wait(b: Shared, phase: Any) -> None:
    order = _order()
    order.step()
    order.waits[_key(b)] = order.now
    clocks._wait(b, phase)


def _arrive(b: Shared, count: int = 1) -> None:
    _order().arrives(_key(b), True)
    clocks._arrive(b, count)


def _expect(b: Shared, size: int, pred: Any = True) -> None:
    if bool(base._plain(pred)):
        _order().arrives(_key(b), False)
    else:
        _order().step()
    clocks._expect(b, size, pred)


def _in(desc: Any, at: Any, barrier: Shared, to: Shared, pred: Any = True) -> None:
    if bool(base._plain(pred)):
        _order().touch(to.memory, *_all(to, 1), write=True, engine=True)
    else:
        _order().step()
    clocks._in(desc, at, barrier, to, pred)


def _out(desc: Any, at: Any, source: Shared) -> None:
    order = _order()
    order.touch(source.memory, *_all(source, 1), write=False, engine=True)
    order.copies.append((source.memory, source.touched))
    clocks._out(desc, at, source)


def _store_wait(pending: int) -> None:
    order = _order()
    while len(order.copies) > pending:
        order.again(order.copies.pop(0), 1)
    clocks._store_wait(pending)


def _product(a: Value, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    order = _order()
    order.touch(b.memory, *_all(b, order.warps), write=False)
    order.products.append((b.memory, b.touched))
    return _with(clocks._product(a, b, acc, use_acc, is_async), acc.held)


def _product_wait(pending: int, deps: list[Value]) -> Any:
    order = _order()
    while len(order.products) > pending:
        order.again(order.products.pop(0), order.warps)
    return clocks._product_wait(pending, deps)


def _specialize(roles: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    def of(f: Any, n: int) -> Any:
        def play(*args: Any) -> None:
            _order().warps = n
            f(*args)

        return play

    clocks._specialize(
        [(of(f, n), args) for (f, args), n in zip(roles, [WARPS, *warps], strict=True)], warps, registers
    )


# ---- which warps hold the elements of a value -------------------------------------------------------------------------


def _with(x: Value, h: Tensor | None) -> Value:
    x.held = None if x.v.dim() == 0 else h
    return x


def _meet(*xs: Any) -> Tensor | None:
    """Of operands of one shape the layouts are the same; of a row and a column those hold an element who hold both."""
    known = [h for x in xs if (h := getattr(x, "held", None)) is not None]

    def both(a: Tensor, b: Tensor) -> Tensor:
        assert a.shape != b.shape or torch.equal(a, b), "operands of two layouts"
        return a & b

    return reduce(both, known) if known else None


def _each(f: Any) -> Any:
    """An operator on elements."""

    def of(*args: Any, **options: Any) -> Any:
        y = f(*args, **options)
        if y is NotImplemented or any(y is x for x in args):
            return y
        inside = [z for x in args for z in (x if isinstance(x, list) else [x])]
        h = _meet(*inside)
        for z in y if isinstance(y, tuple) else (y,):
            if h is not None and isinstance(z, Pointer):
                z.held = h
            elif h is not None and z.v.dim():
                z.held = h.broadcast_to(z.v.shape)
        return y

    return of


def _alike(f: Any) -> Any:
    """Elements are only moved about: so are their holders."""

    def of(x: Value, *args: Any) -> Value:
        return _with(f(x, *args), None if x.held is None else f(Value(x.held), *args).v)

    return of


def _along(f: Any, all_: bool = False) -> Any:
    """A sum along an axis (all_: all sums): an exchange where other warps hold some of it."""

    def of(x: Value, axis: int, *rest: Any) -> Value:
        y = f(x, axis, *rest)
        if x.held is None:
            return y
        h = x.held
        if bool((h != h.narrow(axis, 0, 1)).any()):
            _order().exchange()
        return _with(y, h if all_ else reduce(torch.bitwise_or, h.unbind(axis)))

    return of


def _convert(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    h = held(layout, x.shape)
    moves = x.held is not None and bool((h & ~x.held).any())
    assert not (moves and assert_trivial), "not trivial"
    if moves:
        _order().exchange()
    return _with(Value(x.v), h)


def _made(f: Any) -> Any:
    def of(*args: Any, layout: Any = None) -> Value:
        y = f(*args)
        return y if layout is None else _with(y, held(layout, y.shape))

    return of


@cache
def _follow() -> None:
    """Values and pointers know who holds their elements, from now on."""
    signs = ("add", "sub", "mul", "truediv", "and", "or", "mod", "rshift", "lshift", "floordiv")
    names = [f"__{r}{n}__" for n in signs for r in ("", "r")] + [
        f"__{n}__" for n in ("lt", "le", "gt", "ge", "eq", "ne")
    ]
    for name in (*names, "__xor__", "__neg__", "to"):
        if name in vars(Value):
            setattr(Value, name, _each(getattr(Value, name)))
    for name in ("reshape", "permute", "__getitem__"):
        setattr(Value, name, _alike(getattr(Value, name)))
    for name in ("__add__", "__radd__"):
        setattr(Pointer, name, _each(getattr(Pointer, name)))


def _allocate(dtype: torch.dtype, shape: Any, layout: Any = None) -> Shared:
    x = clocks._allocate(dtype, shape, layout)
    return _Shared(x.memory, x.dtype, x.places)


def _full(f: Any) -> Any:
    """Layouts come last in Gluon's order of arguments, by name or not."""

    def of(*args: Any, layout: Any = None) -> Value:
        if isinstance(args[-1], Layout):
            *args, layout = args  # type: ignore[assignment]
        return _made(f)(*args, layout=layout)

    return of


_old = clocks._language


def _join(a: Value, b: Value) -> Value:
    h = _meet(a, b)
    return _with(_old.join(a, b), None if h is None else torch.stack([h, h], -1))


_language = SimpleNamespace(**vars(_old) | {
    "allocate_shared_memory": _allocate, "warp_specialize": _specialize, "thread_barrier": lambda: _order().barrier(),
    "convert_layout": _convert, "arange": _made(_old.arange), "full": _full(_old.full), "zeros": _full(_old.zeros),
    "join": _join,
    "split": lambda x: tuple(_with(y, x.held[..., 0]) for y in _old.split(x)),
    "associative_scan": _along(_old.associative_scan, True), "load": _each(_old.load),
} | {n: _along(getattr(_old, n)) for n in ("sum", "min", "max")}
  | {n: _each(getattr(_old, n)) for n in ("inline_asm_elementwise", "where", "atomic_add", "minimum", "maximum", "exp2",
                                         "abs", "broadcast")})  # fmt: skip
_NAMES = {
    "gl": _language, "unordered": _mark, "warpgroup_mma": _product, "warpgroup_mma_wait": _product_wait,
    "mma_v2": lambda a, b, acc, **options: _with(base._mma(a, b, acc, **options), acc.held),
    "mbarrier": SimpleNamespace(**vars(clocks._NAMES["mbarrier"]) | {"arrive": _arrive, "expect": _expect, "wait": _wait}),
    "tma": SimpleNamespace(async_copy_global_to_shared=_in, async_copy_shared_to_global=_out, store_wait=_store_wait),
}  # fmt: skip


def load(*modules: ModuleType, marks: Any = (), without: str = "", instead: str = "pass") -> dict[str, Any]:
    """As `gluon_clocks_on_cpu.load`, under the law. marks: of the compiled kernels, with whether they took a barrier
    (`marks_taken.py`); one that is not among them is taken to have."""
    of = [{calls[:n] for calls, took in marks if took is t for n in range(1, len(calls) + 1)} for t in (False, True)]
    _idle.clear()
    _idle.update(of[0] - of[1])
    names = _load(*modules, without=without, instead=instead, **_NAMES)
    _follow()
    return names

"""Runs a Gluon kernel's source on a CPU: every value a torch tensor, every layout ignored, program after program.

Triton's interpreter does not know Gluon. What a layout means for speed is lost here; what a kernel computes is not, nor the
rounding of its operands (a tf32 product cuts its operands to ten mantissa bits, as the tensor core does). Shared memory starts
as NaN, and an address outside the storage of the tensor it was derived from is an AssertionError.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_DTYPES = {n: getattr(torch, n) for n in ("float16", "float32", "bfloat16", "int16", "int32", "int64")}
_LAYOUTS = ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout", "NVMMASharedLayout",
            "SwizzledSharedLayout", "DistributedLinearLayout")  # fmt: skip


class Layout:
    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    @property
    def value(self) -> Layout:
        return self


def _plain(x: Any) -> Any:
    return x.v if isinstance(x, Value) else x


class Value:
    """A tensor of the kernel, or a number known only when it runs."""

    held: torch.Tensor | None = None  # which warps hold each element, where `gluon_warps_on_cpu.py` follows them

    def __init__(self, v: torch.Tensor) -> None:
        self.v = v

    @property
    def shape(self) -> list[int]:
        return list(self.v.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.v.dtype

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return Value(self.v.contiguous().view(dtype) if bitcast else self.v.to(dtype))

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.v.reshape(list(shape)))

    def permute(self, order: Sequence[int]) -> Value:
        return Value(self.v.permute(*order))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.v[index])

    def __bool__(self) -> bool:
        return bool(self.v)

    def __neg__(self) -> Value:
        return Value(-self.v)

    def __floordiv__(self, other: Any) -> Value:
        return Value(torch.div(self.v, _plain(other), rounding_mode="trunc"))


def _beside(x: torch.Tensor, other: Any) -> torch.Tensor:
    """A number of the kernel's source takes the type of what it meets."""
    other = _plain(other)
    if isinstance(other, torch.Tensor):
        return other
    same = x.dtype != torch.bool and x.dtype.is_floating_point >= isinstance(other, float)
    return torch.as_tensor(other, dtype=x.dtype if same else None)


def _operator(name: str) -> tuple[Any, Any]:
    f = getattr(torch, name)

    def forward(self: Value, other: Any) -> Any:
        return NotImplemented if isinstance(other, Pointer) else Value(f(self.v, _beside(self.v, other)))

    def reflected(self: Value, other: Any) -> Value:
        return Value(f(_beside(self.v, other), self.v))

    return forward, reflected


for _sign, _name in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "true_divide"), ("and", "bitwise_and"),
                     ("or", "bitwise_or"), ("mod", "remainder"), ("rshift", "bitwise_right_shift"),
                     ("lshift", "bitwise_left_shift")):  # fmt: skip
    for _attribute, _function in zip((f"__{_sign}__", f"__r{_sign}__"), _operator(_name), strict=True):
        setattr(Value, _attribute, _function)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(_name)[0])


class Pointer:
    """Offsets from the first element of a tensor."""

    held: torch.Tensor | None = None  # as a value's

    def __init__(self, base: torch.Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, offset
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset + _plain(other))

    __radd__ = __add__

    def reach(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(memory, offsets, which of them count)."""
        start, size = self.base.storage_offset(), self.base.untyped_storage().nbytes() // self.base.element_size()
        memory = torch.as_strided(self.base, (size - start,), (1,), start)
        offset = torch.as_tensor(self.offset)
        mask = torch.ones((), dtype=torch.bool) if mask is None else _plain(mask)
        mask = torch.broadcast_to(mask, offset.shape)
        used = offset[mask]
        assert not used.numel() or (int(used.min()) >= 0 and int(used.max()) < memory.numel()), "address outside"
        return memory, offset, mask

    def read(self, mask: Any, other: Any) -> torch.Tensor:
        memory, offset, mask = self.reach(mask)
        found = memory[torch.where(mask, offset, 0)]
        return torch.where(mask, found, torch.tensor(other or 0, dtype=found.dtype))

    def write(self, value: Any, mask: Any) -> None:
        memory, offset, mask = self.reach(mask)
        memory[offset[mask]] = torch.broadcast_to(torch.as_tensor(_plain(value)), offset.shape).to(memory.dtype)[mask]


class Shared:
    def __init__(self, v: torch.Tensor) -> None:
        self.v = v
        self.dtype, self.shape = v.dtype, list(v.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.v[int(_plain(i))])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.v.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.v.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        assert dtype == self.dtype
        return Shared(self.v.view(*shape))

    def load(self, layout: Any) -> Value:
        return Value(self.v.clone())

    def store(self, x: Value) -> None:
        assert x.dtype == self.dtype and x.shape == self.shape, (x.dtype, x.shape, self.dtype, self.shape)
        self.v.copy_(x.v)


def _cut(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous().view(torch.int32) & -0x2000).view(torch.float32)


def _mma(a: Value, b: Value, acc: Value, input_precision: str | None = None) -> Value:
    x, y = a.v, b.v
    assert x.dtype == y.dtype and acc.dtype == torch.float32 and (x.dtype != torch.float32 or input_precision == "tf32")
    if x.dtype == torch.float32:
        x, y = _cut(x), _cut(y)
    return Value((x.double() @ y.double() + acc.v.double()).float())


def _asm(code: str, constraints: str, args: list[Value], **options: Any) -> Value:
    name, x = code.split(".")[0], args[0].v
    if name == "and":
        return Value((x.contiguous().view(torch.int16) & args[1].v.contiguous().view(torch.int16)).view(x.dtype))
    if name == "shl":  # of two bfloat16 to the upper half of a float32 each
        return Value(x.float())
    if "neg.f32" in code:
        return Value(torch.exp2(-x.abs() if "abs.f32" in code else -x))
    return Value({"ex2": torch.exp2, "rcp": torch.reciprocal, "lg2": torch.log2}[name](x))


def _where(m: Value, a: Any, b: Any) -> Value:
    x = torch.where(m.v, _plain(a), _plain(b))
    return Value(x if isinstance(a, Value) or isinstance(b, Value) else x.float())


class _Grid:
    program, programs = 0, 1


_language = SimpleNamespace(
    **_DTYPES, **dict.fromkeys(_LAYOUTS, Layout),
    constexpr=lambda v: v, static_range=range, thread_barrier=lambda: None, inline_asm_elementwise=_asm, where=_where,
    convert_layout=lambda x, layout, assert_trivial=False: x,
    arange=lambda a, b, layout=None: Value(torch.arange(a, b, dtype=torch.int32)),
    zeros=lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, v, dtype, layout=None: Value(torch.full(shape, v, dtype=dtype)),
    sum=lambda x, axis: Value(x.v.double().sum(axis).to(x.dtype)), min=lambda x, axis: Value(x.v.amin(axis)),
    max=lambda x, axis: Value(x.v.amax(axis)),
    exp2=lambda x: Value(torch.exp2(x.v)), abs=lambda x: Value(x.v.abs()),
    minimum=lambda a, b, propagate_nan=None: Value(torch.minimum(a.v, _beside(a.v, b))),
    maximum=lambda a, b, propagate_nan=None: Value(torch.maximum(a.v, _beside(a.v, b))),
    load=lambda p, mask=None, other=None: Value(p.read(mask, other)),
    store=lambda p, value, mask=None: p.write(value, mask),
    program_id=lambda axis: Value(torch.tensor(_Grid.program)),
    num_programs=lambda axis: Value(torch.tensor(_Grid.programs)),
    allocate_shared_memory=lambda dtype, shape, layout=None: Shared(torch.full(shape, float("nan"), dtype=dtype)),
)  # fmt: skip
_copies = SimpleNamespace(
    async_copy_global_to_shared=lambda to, p, mask=None: to.v.copy_(p.read(mask, 0)),
    commit_group=lambda: None, wait_group=lambda n=0: None,
)  # fmt: skip


def load(*modules: ModuleType, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """The names of Gluon modules, one source after the other, with torch under them."""
    names = (names or {}) | {"gl": _language, "gluon": SimpleNamespace(jit=lambda f=None, **options: f or (lambda g: g)),
             "async_copy": _copies, "mma_v2": _mma,
             "unordered": lambda: None, "PropagateNan": SimpleNamespace(ALL=None)}  # fmt: skip
    for module in modules:
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        source = re.sub(r"^(from|import) .*?(\((.|\n)*?^\).*$|$)", "", source, flags=re.M)
        source = re.sub(r"(\w+): gl\.constexpr = ", r"\1 = ", source)
        exec(compile(source, module.__file__, "exec"), names)
    return names


def run(
    kernel: Any,
    programs: int,
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    constants: dict[str, Any],
) -> None:
    _Grid.programs = programs
    arguments = [None if t is None else Pointer(t) for t in tensors] + [Value(torch.tensor(n)) for n in numbers]
    for _Grid.program in range(programs):
        kernel(*arguments, **constants)

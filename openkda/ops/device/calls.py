"""Calls that look like an earlier one: a key for everything about a call but memory and values, and what is known by key.

Checks, the choice of an implementation and a launch's arguments cost ten times what the launch does, and follow from types,
dtypes, shapes, strides and devices alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

Key = tuple[object, ...]

_MOST_KINDS = 256
KEY_ANY_DEVICE = False
"""For tests of the host side on a CPU."""
_PLAIN = (Tensor, torch.nn.Parameter)
_ATOMS = frozenset({bool, int, float, str, type(None), torch.dtype, type})
_NOTHING = (None, None, None)
# Found once, because a call asks for each of them.
_grad_mode = torch.is_grad_enabled
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state
_batched = torch._C._functorch.is_legacy_batchedtensor


class Repeated:
    """What one op knows about the calls it has seen.

    modules: the implementation of a call that passed its checks. replays: a function that does such a call over again on other
    memory; it takes what the op hands it and returns the op's result, or None for "the long way, please".
    training: calls that autograd records have keys too; their replays record themselves.
    """

    def __init__(self, most: int = 4096, training: bool = False) -> None:
        self.modules: dict[Key, ModuleType] = {}
        self.replays: dict[Key, Callable[..., Any]] = {}
        self._latest: dict[Key, tuple[Key | None, Callable[..., bool] | None, Callable[..., Any] | None]] = {}
        self._most, self._training = most, training

    def look(
        self, tensors: Sequence[Tensor | None], options: tuple[object, ...]
    ) -> tuple[Key | None, Callable[..., Any] | None]:
        """(the call's key, its replay), each None where there is none.

        A key costs a microsecond a tensor. Of the latest key with these options a guard is kept, one call for all tensors.
        """
        if not (KEY_ANY_DEVICE or getattr(tensors[0], "is_cuda", False)) or is_watched():
            return None, None
        kind = (_grad_mode(), *options, *map(type, tensors))  # which the guard does not look at
        try:
            before, guard, again = self._latest.get(kind, _NOTHING)
        except TypeError:  # an option that has no hash
            return None, None
        if guard is not None and guard(*[t for t in tensors if t is not None]):
            return before, again
        key = call_key(tensors, options, self._training)
        again = None if key is None else self.replays.get(key)
        if key is not None and again is not None:
            if len(self._latest) >= _MOST_KINDS:
                self._latest.clear()
            self._latest[kind] = key, guard_of(tensors) if key == before else None, again
        return key, again

    def module(self, key: Key | None, choose: Callable[[], ModuleType]) -> ModuleType:
        """The implementation of a call: `choose()`, which also checks the call, once for all calls of one key."""
        known = None if key is None else self.modules.get(key)
        if known is None:
            known = choose()
            if key is not None:
                if len(self.modules) >= self._most:
                    self.forget()
                self.modules[key] = known
        return known

    def seen(self, key: Key | None) -> Key | None:
        """The key, from the second call on that has it."""
        return key if key in self.modules else None

    def forget(self) -> None:
        """As if no call had been seen."""
        self.modules.clear()
        self.replays.clear()
        self._latest.clear()


def guard_of(tensors: Sequence[Tensor | None]) -> Callable[..., bool] | None:
    """True only of tensors with the types, dtypes, sizes, strides, devices and `requires_grad` of those here (without the
    Nones), and under the same dispatch modes. None where this torch has no such guards, which are torch.compile's.
    """
    here = [t for t in tensors if t is not None]
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(t.shape) for t in here]
        strides: Any = [list(t.stride()) for t in here]
        check = TensorGuards(*here, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*here) is True else None
    except (ImportError, TypeError, SystemError, RuntimeError):
        return None


def is_watched() -> bool:
    """Whether someone looks at calls from outside: torch.compile, torch.jit, torch.func, dispatch modes (fake tensors)."""
    return bool(
        torch.compiler.is_compiling() or _modes() or forward_ad._current_level >= 0 or _transforms() or _tracing()
    )


def has_values(t: Tensor) -> bool:
    """Whether code here may branch on the values of t: not while torch.compile or torch.export traces, and not where there are
    none (meta and fake tensors)."""
    if torch.compiler.is_compiling() or t.is_meta:
        return False
    modes = torch._C._len_torch_dispatch_stack()
    if modes and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return False
    return type(t) in _PLAIN or not is_fake(t)


def goes_direct(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors may run its kernels without the registered operator, which costs 10 to 15 us.

    The operator is for those who look at a call from outside: see `is_watched`, and autograd and tensor subclasses. It also
    resolves lazy negation (`torch.imag` of a conjugate), which a kernel would not see, and takes many upstream gradients at
    once (`is_grads_batched`) one by one.
    """
    grad = torch.is_grad_enabled()
    return are_plain(*tensors) and not (grad and any(t is not None and t.requires_grad for t in tensors))


def are_plain(*tensors: Tensor | None) -> bool:
    """`goes_direct` for code that records its own derivative (`torch.autograd.Function`)."""
    return not is_watched() and all(
        t is None or (type(t) in _PLAIN and not t.is_neg() and not _batched(t)) for t in tensors
    )


def is_batched(*tensors: Tensor | None) -> bool:
    """Whether one of these stands for many (`is_grads_batched`, jacobian(vectorize=True))."""
    return not torch.compiler.is_compiling() and any(t is not None and _batched(t) for t in tensors)


def call_key(tensors: Iterable[Tensor | None], options: tuple[object, ...], training: bool = False) -> Key | None:
    """Everything about a call that checks and launches may depend on but memory and values; None for a call to look at anew.

    That is: CPU tensors (their values are checked), what would be recorded by autograd (unless `training`: then which tensors
    require gradients is part of the key), watched calls, and arguments of unusual types. Equal keys: whatever is true of one
    call's types, dtypes, shapes, strides and devices is true of the other's.
    """
    if is_watched() or not _ATOMS.issuperset(map(type, options)):
        return None
    grad = torch.is_grad_enabled()
    key: list[object] = []
    try:
        for t in tensors:
            if t is None:
                key.append(None)
            elif type(t) not in _PLAIN or not (t.is_cuda or KEY_ANY_DEVICE) or t.is_neg() or _batched(t):
                return None
            else:
                recorded = grad and t.requires_grad
                if recorded and not training:
                    return None
                key += (t.dtype, t.shape, t.stride(), t.device, recorded)
    except RuntimeError:  # a layout without strides
        return None
    return (*key, *options)

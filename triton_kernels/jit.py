"""Triton as type checkers should see it, and what launchers share: devices, sizes, divisors.

A decorated function is a device program, not Python.

Kernels are called with launch options that their signature lacks, constants are passed for
``tl.constexpr``, and the language's functions return tuples or tensors.

Inside :func:`compiling_only`, launchers compile their kernels and launch nothing. So all kernels of
a step are compiled before the first step, with tensors that need no memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton

_COMPILING_ONLY: ContextVar[bool] = ContextVar("compiling_only", default=False)
_RECORD: ContextVar[list[Call] | None] = ContextVar("record", default=None)
_Function: Any = triton.JITFunction
P = ParamSpec("P")
R = TypeVar("R")


class Call(NamedTuple):
    """A launch, or a function of torch's.

    Attributes:
        start: takes the arguments, and of a launch the keyword ``stream``.
    """

    start: Callable[..., object]
    arguments: tuple[Any, ...]
    launch: bool


class Kernel(_Function):
    """A function for the device. A launch compiles it first; inside :func:`compiling_only` it does
    nothing else. No multiplication is fused with an addition unless the kernel says so, because
    that rounds once instead of twice."""

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """See :meth:`triton.JITFunction.run`."""
        warmup, options = warmup or _COMPILING_ONLY.get(), {"enable_fp_fusion": False, **options}
        compiled = super().run(*args, grid=grid, warmup=warmup, **options)
        record = _RECORD.get()
        if record is not None and not warmup:
            signature = inspect.signature(self.fn)
            known = {k: v for k, v in options.items() if k in signature.parameters}
            bound = signature.bind(*args, **known)
            bound.apply_defaults()
            start = compiled[(*grid, 1, 1)[:3]]
            record.append(Call(start, tuple(bound.arguments.values()), launch=True))
        return compiled


def torch_call(function: Callable[..., object], *args: Any) -> None:
    """Call a function of torch's between launches."""
    function(*args)
    record = _RECORD.get()
    if record is not None and not _COMPILING_ONLY.get():
        record.append(Call(function, args, launch=False))


@contextmanager
def recording() -> Iterator[list[Call]]:
    """In this context, on this thread, launches and :func:`torch_call` are listed."""
    token = _RECORD.set([])
    try:
        listed = _RECORD.get()
        assert listed is not None
        yield listed
    finally:
        _RECORD.reset(token)


@contextmanager
def compiling_only() -> Iterator[None]:
    """In this context, on this thread, launches only compile."""
    token = _COMPILING_ONLY.set(True)
    try:
        yield
    finally:
        _COMPILING_ONLY.reset(token)


def jit(function: Any = None, **options: Any) -> Any:
    """:func:`triton.jit`, which Triton's interpreter replaces by its own."""
    if function is None:
        return lambda function: jit(function, **options)
    made = triton.jit(function, **options)
    return Kernel(function, **options) if isinstance(made, _Function) else made


_Constexpr: Any = triton.language.constexpr


class constant(_Constexpr):  # noqa: N801
    """A module's constant that its kernels may read.

    Before every launch, Triton compares all constants that the kernel reads with copies from when
    it was compiled, and its own comparison makes two objects for each. A module never changes its
    constants, so the copy is the constant itself.
    """

    def __deepcopy__(self, memo: object) -> constant:
        return self

    def __ne__(self, other: object) -> Any:
        return False if other is self else super().__ne__(other)


def on_device_of(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that makes the device of the tensor argument ``name`` current during a call: Triton
    launches on CUDA's current device, wherever the tensors are.

    The operator keeps its signature, for type checkers and for :func:`inspect.signature`.
    """

    def guard(operator: Callable[P, R]) -> Callable[P, R]:
        place = list(inspect.signature(operator).parameters).index(name)

        @functools.wraps(operator)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            tensor: Any = args[place] if place < len(args) else kwargs[name]
            with torch.cuda.device_of(tensor):
                return operator(*args, **kwargs)

        return guarded

    return guard


# Triton's own functions for sizes also work in kernels, and take the host as long as a view.
def cdiv(n: int, d: int) -> int:
    """``n / d``, rounded up."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``; ``n`` is positive."""
    return 1 << (n - 1).bit_length()


def row_stride(x: torch.Tensor | None) -> int:
    """The stride of rows, 0 without a tensor."""
    return 0 if x is None else x.stride(0)


def division(divisor: int) -> tuple[float, bool]:
    """What a kernel divides by; or if that has the same bits, the inverse that it multiplies with.
    And whether it divides."""
    divides = divisor & (divisor - 1) != 0
    return float(divisor) if divides else 1.0 / divisor, divides


if TYPE_CHECKING:

    class _Anything(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Anything):  # noqa: N801
        """Stands for ``triton.language``."""

        constexpr = Any

else:
    import triton.language as tl  # noqa: F401

"""Triton as type checkers should see it: what it decorates is a device program, not Python.

Kernels are called with launch options that their signature does not have, constants go where it
says ``tl.constexpr``, and the language's functions return tuples or tensors as the case may be.

Inside :func:`compiling_only` launchers compile what they would launch, and launch nothing: so all
that a step needs is compiled before the first one, for tensors that need not have any memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import triton

_COMPILING_ONLY: ContextVar[bool] = ContextVar("compiling_only", default=False)
_Function: Any = triton.JITFunction


class Kernel(_Function):
    """A function for the device; a launch compiles it first, and inside :func:`compiling_only` does
    nothing else."""

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """See :meth:`triton.JITFunction.run`."""
        warmup = warmup or _COMPILING_ONLY.get()
        return super().run(*args, grid=grid, warmup=warmup, **options)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, on this thread, launches compile and launch nothing."""
    token = _COMPILING_ONLY.set(True)
    try:
        yield
    finally:
        _COMPILING_ONLY.reset(token)


def jit(function: Any = None, **options: Any) -> Any:
    """:func:`triton.jit`, of which Triton's interpreter has its own."""
    if function is None:
        return lambda function: jit(function, **options)
    made = triton.jit(function, **options)
    return Kernel(function, **options) if isinstance(made, _Function) else made


# A module's constant that its kernels may read.
constant: Any = triton.language.constexpr

if TYPE_CHECKING:

    class _Anything(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Anything):  # noqa: N801
        """Stands for ``triton.language``."""

        constexpr = Any

else:
    import triton.language as tl  # noqa: F401

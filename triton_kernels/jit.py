"""Triton as type checkers should see it: what it decorates is a device program, not Python.

Kernels are called with launch options that their signature does not have, constants go where it
says ``tl.constexpr``, and the language's functions return tuples or tensors as the case may be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton

jit: Any = triton.jit
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

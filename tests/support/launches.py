"""The modules of the Triton kernels, and a record of what they launch instead of running it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

# A kernel's name, its constants, and the tensors that it did not get.
Variant = tuple[str, tuple[tuple[str, Any], ...], tuple[str, ...]]


def kernels(name: str) -> Any:
    """A module of the kernels' package, which not every machine can import."""
    return importlib.import_module(f"tagc.triton_kernels.{name}")


@contextmanager
def noting_launches() -> Iterator[set[Variant]]:
    """Record the variants of kernels that would be launched, if they differ by more than dtypes and
    alignment."""
    from triton.runtime.jit import JITFunction  # which not every machine has

    found: set[Variant] = set()

    def note(self: Any, *args: Any, **options: Any) -> Any:
        signature = inspect.signature(self.fn)
        defaults = {name: p.default for name, p in signature.parameters.items()}
        given = defaults | signature.bind_partial(*args).arguments | options
        constants = {p.name for p in self.params if p.is_constexpr} | {"num_warps"}
        missing = tuple(p.name for p in self.params if given[p.name] is None)
        chosen = tuple(sorted((n, v) for n, v in given.items() if n in constants))
        found.add((self.__name__, chosen, missing))
        return SimpleNamespace(hash=self.__name__)

    with mock.patch.object(JITFunction, "run", note):
        yield found

"""Run an operator without launching anything: its kernels' launches, and torch's own kernels.

Tensors are made but never touched, so that the system gives them addresses and no memory; the
operators' own torch calls (zeros, copies) are noted and not executed.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..compiled import compiling
from .operators import OPERATORS
from .work import Asked, Work


class _Noted(TorchDispatchMode):
    """Notes torch's kernels instead of running them."""

    def __init__(self, moved: list[float]) -> None:
        super().__init__()
        self._moved = moved

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        written = [
            i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
        ]
        if not written:
            return func(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        self._moved.append(float(sum(x.numel() * x.element_size() for x in tensors)))
        at = written[0]
        return args[at] if at < len(args) else kwargs[schema.arguments[at].name]


def ask(work: Work, arch: int) -> Asked:
    """Run an operator, compiling for ``arch`` and launching nothing.

    Raises:
        ValueError: for a hint or a result that fits no kernel that is launched.
    """
    ops = importlib.import_module("tagc.triton_kernels.ops")
    asked = Asked()
    try:
        with compiling(arch, asked.launches.append):
            call = OPERATORS[work.op](ops, work, asked)
            with _Noted(asked.torch):
                call()
    finally:
        ops.release()
    check(asked)
    return asked


def check(asked: Asked) -> None:
    """Every hint must have its argument, and every result its function; else it was renamed.

    Raises:
        ValueError: if one has not.
    """
    arguments: set[str] = set()
    functions: set[str] = set()
    for launch in asked.launches:
        name = launch.function.__name__
        for argument in launch.arguments:
            arguments |= {argument, f"{name}.{argument}"}
        functions |= {f"{name}.{called}" for called in _called(launch.function)}
    for what, given, there in (
        ("argument", asked.hints, arguments),
        ("function", asked.results, functions),
    ):
        if lost := sorted(given.keys() - there):
            raise ValueError(
                f"no kernel that is launched has {' or '.join(lost)}: was the {what} renamed? see "
                "benchmarks/counts/operators.py"
            )


def _called(kernel: Any) -> set[str]:
    """Device functions that a kernel calls, and those that these call."""
    found: dict[str, Any] = {}
    todo = [kernel.fn]
    while todo:
        function = todo.pop()
        for name in function.__code__.co_names:
            called = function.__globals__.get(name)
            if hasattr(called, "arg_names") and called.fn.__name__ not in found:
                found[called.fn.__name__] = called
                todo.append(called.fn)
    return set(found)

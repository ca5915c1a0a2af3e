"""Records calls of operators: the kinds of their tensors, and their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tagc.ops import Ops

OPERATORS = (
    "quantize", "dequantize", "quantize_matrix", "dequantize_matrix",
    "encode", "select", "decode", "insert", "peel", "undo_lag", "steer", "fingerprint",
)  # fmt: skip
# Kernels may take several rows at a time, a divisor of this number; further rows are no new case.
ROWS = 8


@dataclass(frozen=True)
class Call:
    """One call of an operator, reduced to the facts that choose a kernel.

    Attributes:
        operator: one of :data:`OPERATORS`.
        rows: all dimensions of the first tensor except the last; a size ``n`` above ``ROWS`` is
            reduced to ``ROWS + n % ROWS``.
        dtypes: dtypes of its tensors, by argument; None for a tensor that was not given.
        options: its other arguments.
        rest: last dimension of the first tensor modulo 16; 0 if there is a layout, which says it.
    """

    operator: str
    rows: tuple[int, ...]
    dtypes: tuple[tuple[str, torch.dtype | None], ...]
    options: tuple[tuple[str, Hashable], ...]
    rest: int = 0

    def dtype(self, argument: str) -> torch.dtype:
        """Dtype of a tensor that was given."""
        found = dict(self.dtypes)[argument]
        assert found is not None
        return found

    def given(self, argument: str) -> torch.dtype | None:
        """Dtype of a tensor; None if it was not given."""
        return dict(self.dtypes)[argument]

    def option(self, name: str) -> Any:
        """An argument that is not a tensor."""
        return dict(self.options)[name]

    def __str__(self) -> str:
        tensors = (
            f"{name} {str(dtype).removeprefix('torch.')}"
            for name, dtype in self.dtypes
            if dtype is not None and dtype != torch.int32
        )
        options = (f"{name}={value}" for name, value in self.options)
        return f"{self.operator}({', '.join([*tensors, *options])})"


class Recorder:
    """Operators that record their calls and pass them on; takes the place of
    :class:`tagc.ops.Ops`.

    Attributes:
        calls: the kinds of calls so far, in order of first use.
        count: number of all calls.
    """

    def __init__(self, ops: Ops, new: Callable[[], None] = lambda: None) -> None:
        """Record calls and pass them on to ``ops``.

        Args:
            new: called after a call of a new kind.
        """
        self._ops, self._new = ops, new
        self.calls: dict[Call, None] = {}
        self.count = 0
        for name in OPERATORS:
            setattr(self, name, self._noting(name, getattr(ops, name)))

    def __getattr__(self, name: str) -> Any:
        # Everything else in `Ops`: preparations, and the release of buffers.
        return getattr(self._ops, name)

    @property
    def ops(self) -> Ops:
        """This recorder, typed as ``Ops``."""
        return cast(Ops, self)

    def _noting(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(operator)

        def noting(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            returned = operator(*args, **kwargs)
            call = call_of(name, given.arguments)
            if call not in self.calls:
                self.calls[call] = None
                self._new()
            self.count += 1
            return returned

        return noting


def call_of(operator: str, arguments: dict[str, Any]) -> Call:
    """The call with these arguments. A missing argument is a tensor: options are never missing."""
    tensors = {n: a for n, a in arguments.items() if a is None or isinstance(a, Tensor)}
    first = next(a for a in tensors.values() if a is not None)
    return Call(
        operator,
        tuple(n if n <= ROWS else ROWS + n % ROWS for n in first.shape[:-1]),
        tuple((name, None if a is None else a.dtype) for name, a in tensors.items()),
        tuple((name, a) for name, a in arguments.items() if name not in tensors),
        0 if "layout" in arguments else first.shape[-1] % 16,
    )

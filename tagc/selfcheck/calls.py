"""Kinds of calls of operators, and those that a run makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from tagc.ops import Ops
from tagc.ops.exponents import ExponentLayout
from tagc.ops.sketch import SketchLayout

_NO_OPERATORS = ("release",)
OPERATORS = tuple(name for name in dir(Ops) if name[0] != "_" and name not in _NO_OPERATORS)
# Kernels may take several rows at a time, a divisor of this number; further rows are no new case.
ROWS = 8


@dataclass(frozen=True)
class Call:
    """One call of an operator, reduced to the facts that choose a kernel."""

    operator: str  # one of :data:`OPERATORS`
    rows: tuple[int, ...]  # dimensions of the first tensor but the last, at most ROWS + n % ROWS
    dtypes: tuple[tuple[str, torch.dtype | None], ...]  # by argument; None if it was not given
    options: tuple[tuple[str, Hashable], ...]  # the other arguments
    rest: int = 0  # last dimension of the first tensor modulo 16, unless a layout says it

    @classmethod
    def of(cls, operator: str, *rows: int, rest: int = 0, **arguments: Any) -> Call:
        """A call whose tensors are given as dtypes, or None."""
        tensors = {n: a for n, a in arguments.items() if a is None or isinstance(a, torch.dtype)}
        options = ((name, a) for name, a in arguments.items() if name not in tensors)
        return cls(operator, rows, tuple(tensors.items()), tuple(options), rest)

    def __getitem__(self, argument: str) -> Any:
        """The dtype of a tensor, or None if it was not given; or an option."""
        return dict((*self.dtypes, *self.options))[argument]

    def __str__(self) -> str:
        tensors = (
            f"{name} {str(dtype).removeprefix('torch.')}"
            for name, dtype in self.dtypes
            if dtype is not None and dtype != torch.int32
        )
        options = (f"{name}={value}" for name, value in self.options)
        return f"{self.operator}({', '.join([*tensors, *options])})"


class Recorder:
    """Operators that record their calls and pass them on to ``ops``, if there are any; takes the
    place of :class:`tagc.ops.Ops`. ``calls`` are the kinds of calls so far, in order of first use;
    ``new`` is called after one of a new kind."""

    def __init__(self, ops: Ops | None = None, new: Callable[[], None] = lambda: None) -> None:
        self._ops, self._new = ops, new
        self.calls: dict[Call, None] = {}
        for name in OPERATORS:
            setattr(self, name, partial(self._note, name, inspect.signature(getattr(Ops, name))))

    def __getattr__(self, name: str) -> Any:
        # Everything else in `Ops`: preparations, and the release of buffers.
        return getattr(self._ops, name)

    @property
    def ops(self) -> Ops:
        return cast(Ops, self)

    def _note(self, name: str, signature: inspect.Signature, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        returned = None if self._ops is None else getattr(self._ops, name)(*args, **kwargs)
        call = call_of(name, given.arguments)
        if call not in self.calls:
            self.calls[call] = None
            self._new()
        return returned


def call_of(operator: str, arguments: dict[str, Any]) -> Call:
    """The call with these arguments. A missing argument is a tensor: options are never missing."""
    first = next(a for a in arguments.values() if isinstance(a, Tensor))
    rows = (n if n <= ROWS else ROWS + n % ROWS for n in first.shape[:-1])
    rest = 0 if "layout" in arguments else first.shape[-1] % 16
    given = {name: a.dtype if isinstance(a, Tensor) else a for name, a in arguments.items()}
    return Call.of(operator, *rows, rest=rest, **given)


def exponent_calls(layout: ExponentLayout, ranks: int = 2) -> Iterator[Call]:
    """The calls of exact activations."""
    both = {"rows": torch.bfloat16, "message": torch.int32, "layout": layout}
    yield Call.of("pack_exponents", ranks, **both)
    yield Call.of("unpack_exponents", ranks, **both)


def sketch_calls(layout: SketchLayout) -> Iterator[Call]:
    """The calls of :class:`tagc.CountSketch`."""
    given = {**dict.fromkeys(("index", "seed", "cells"), torch.int32), "layout": layout}
    yield Call.of("insert", symbols=torch.int32, **given)
    yield Call.of("peel", **given)

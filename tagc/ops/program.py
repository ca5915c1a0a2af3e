"""Programs: what a unit launches, sends and waits for in one collective, in order.

A program is pure data. It is made before training, without tensors, and is the same on all ranks;
:class:`tagc.collect.Replay` binds it to tensors and runs it in every step. A program has no
branches: what a step decides selects another program. ``print(program)`` lists its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from tagc.ops.implementations import Ops

Level = Literal["flat", "across", "inside"]
"""Which ranks take part: all of the unit, or with two levels those across hosts or inside one."""

OWN: Literal["own"] = "own"
"""This rank's row among the ranks that send each other messages. Programs do not know their rank,
so that all ranks have the same; the row is filled in when they are bound."""

Index = None | int | Literal["own"] | tuple[int, int]
Kind = Literal["scratch", "kept", "state", "late"]


@dataclass(frozen=True)
class Place:
    """A named tensor, or a view of it.

    Attributes:
        shape: the shape of the whole tensor.
        kind: ``scratch`` is shared by all units, and its content lasts as long as the program;
            ``kept`` and ``state`` belong to the unit, and ``state`` is saved in checkpoints;
            ``late`` is handed over whenever the program runs.
        at: the view, an index for each dimension: None for all of it, a number, :data:`OWN`
            (which stays a dimension), or first and end.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind = "scratch"
    at: tuple[Index, ...] = ()

    def row(self, *index: Index) -> Place:
        """A view of the whole tensor's first dimensions."""
        return replace(self, at=(*index, *(None,) * (len(self.shape) - len(index))))

    def __getitem__(self, columns: slice) -> Place:
        """A view of columns, counted in this view."""
        at = self.at or (None,) * len(self.shape)
        span = at[-1]
        first, end = span if isinstance(span, tuple) else (0, self.shape[-1])
        stop = end if columns.stop is None else first + columns.stop
        return replace(self, at=(*at[:-1], (first + (columns.start or 0), stop)))

    def index(self, own: int) -> tuple[Any, ...]:
        """The index of this view in the whole tensor, on the rank with the row ``own``."""
        return tuple(_indexed(i, own) for i in self.at)

    @cached_property
    def numel(self) -> int:
        """Elements of the view."""
        at = self.at or (None,) * len(self.shape)
        return math.prod(
            size if i is None else i[1] - i[0] if isinstance(i, tuple) else 1
            for i, size in zip(at, self.shape, strict=True)
        )

    def __str__(self) -> str:
        if not self.at:
            return self.name
        spelled = (
            ":" if i is None else f"{i[0]}:{i[1]}" if isinstance(i, tuple) else str(i)
            for i in self.at
        )
        return f"{self.name}[{', '.join(spelled)}]"


def _indexed(index: Index, own: int) -> Any:
    if index is None:
        return slice(None)
    if index == OWN:
        return slice(own, own + 1)
    return slice(*index) if isinstance(index, tuple) else index


@dataclass(frozen=True)
class Operator:
    """An operator with its options, which are the fields of a subclass."""

    def bound(self, ops: Ops) -> Callable[..., object]:
        """The function that takes the launch's tensors, such as one of an implementation."""
        return self.run

    def run(self, *tensors: Tensor) -> None:
        """What it does, if it is the same on all devices."""
        raise NotImplementedError

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        """The view of an argument that the function takes. (It is made once, when a program is
        bound, unless the tensor comes late.)"""
        return tensor

    def prepare(self, ops: Ops, *places: Place | None) -> None:
        """Compile what a launch with these places calls, if an implementation compiles."""


@dataclass(frozen=True)
class Launch:
    """An operator on tensors.

    Attributes:
        places: the operator's tensors, in the order of its arguments.
        of: the codec and parameters, for errors.
    """

    operator: Operator
    places: tuple[Place | None, ...]
    of: str = ""

    def __str__(self) -> str:
        places = ", ".join("-" if place is None else str(place) for place in self.places)
        return f"{type(self.operator).__name__}({places})" + (f"   # {self.of}" if self.of else "")


@dataclass(frozen=True)
class Send:
    """Starts a collective.

    Attributes:
        kind: ``all-gather``: every rank's ``inp`` becomes a row of ``out``; ``all-gather each``:
            the same for every row of ``inp`` at once, see :meth:`Transport.gather_each`.
        ranks: how many take part.
        flight: the name to wait for.
    """

    kind: Literal["all-gather", "all-gather each"]
    level: Level
    ranks: int
    out: Place
    inp: Place
    flight: str

    @property
    def bytes(self) -> int:
        """Bytes that a rank sends to others."""
        return (self.ranks - 1) * self.inp.numel * self.inp.dtype.itemsize

    def __str__(self) -> str:
        return (
            f"send {self.kind} {self.level}: {self.inp} -> {self.out}, {self.bytes} bytes, "
            f"as {self.flight}"
        )


@dataclass(frozen=True)
class Wait:
    """Waits for a collective."""

    flight: str

    def __str__(self) -> str:
        return f"wait {self.flight}"


Step = Launch | Send | Wait


@dataclass(frozen=True, eq=False)
class Program:
    """Steps of one collective of a unit.

    Attributes:
        what: what it does, for errors: "the gathering of parameters of unit 'layers.0'".
        ranges: the profiler's ranges: names, each with the number of its steps, in order.
    """

    what: str
    ranges: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, what: str, parts: Iterable[tuple[str, Iterable[Step]]]) -> Program:
        """A program of parts, each a range of the profiler."""
        listed = [(name, tuple(steps)) for name, steps in parts]
        ranges = tuple((name, len(steps)) for name, steps in listed if steps)
        return cls(what, ranges, tuple(step for _, steps in listed for step in steps))

    @cached_property
    def places(self) -> dict[str, Place]:
        """The whole tensors, by name."""
        found = (place for step in self.steps for place in _places(step))
        return {place.name: replace(place, at=()) for place in found}

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The levels on which it sends, in the order of first use."""
        return tuple(dict.fromkeys(s.level for s in self.steps if isinstance(s, Send)))

    def sent(self, *levels: Level) -> int:
        """Bytes that a rank sends on these levels."""
        return sum(s.bytes for s in self.steps if isinstance(s, Send) and s.level in levels)

    @cached_property
    def words(self) -> int:
        """32-bit words of the longest message that leaves the host."""
        sends = (s for s in self.steps if isinstance(s, Send) and s.level != "inside")
        return max((s.inp.numel * s.inp.dtype.itemsize // 4 for s in sends), default=0)

    def prepare(self, ops: Ops) -> None:
        """Compile what its launches call, if an implementation compiles."""
        for step in self.steps:
            if isinstance(step, Launch):
                step.operator.prepare(ops, *step.places)

    def __str__(self) -> str:
        lines = (f"{i:3} {step}" for i, step in enumerate(self.steps))
        return "\n".join((self.what, *lines))


def _places(step: Step) -> Iterator[Place]:
    if isinstance(step, Launch):
        yield from filter(None, step.places)
    elif isinstance(step, Send):
        yield from (step.out, step.inp)

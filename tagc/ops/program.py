"""Programs: what a unit launches, sends and waits for in one collective, in order.

A program is pure data. It is made before training, without tensors, and is the same on all ranks;
:class:`tagc.collect.replay.Replay` binds it to tensors and runs it in every step. A program has no
branches: what a step decides selects another program. ``print(program)`` lists its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tagc.ops.implementations import Ops

Level = Literal["flat", "across", "inside"]
"""Which ranks take part: all of the unit, or with two levels those across hosts or inside one."""

OWN: Literal["own"] = "own"
"""This rank's row among the ranks that send each other messages. Programs do not know their rank,
so that all ranks have the same; the row is filled in when they are bound."""

Index = None | int | Literal["own"] | tuple[int, int]
Collective = Literal["all-gather", "all-gather each", "all-to-all", "reduce-scatter", "all-reduce"]
Kind = Literal["scratch", "kept", "state", "flag", "late"]


@dataclass(frozen=True)
class Place:
    """A named tensor, or a view of it.

    Attributes:
        shape: the shape of the whole tensor.
        kind: ``scratch`` is shared by all units, and its content lasts as long as the program;
            ``kept`` and ``state`` belong to the unit, and ``state`` is saved in checkpoints;
            ``flag``, boolean ``[1]``, is only ever set, and the host reads it later;
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

    @property
    def first_column(self) -> int:
        """The first column of the view in the whole tensor."""
        span = self.at[-1] if self.at else None
        return span[0] if isinstance(span, tuple) else 0

    @property
    def whole_rows(self) -> Place:
        """The rows of the view, with all columns."""
        rows = self.at[:-1]
        return replace(self, at=(*rows, None) if any(i is not None for i in rows) else ())

    def index(self, own: int) -> tuple[Any, ...]:
        """The index of this view in the whole tensor, on the rank with the row ``own``."""
        return tuple(_indexed(i, own) for i in self.at)

    @cached_property
    def view_shape(self) -> tuple[int, ...]:
        """The shape of the view."""
        at = self.at or (None,) * len(self.shape)
        return tuple(
            size if i is None else i[1] - i[0] if isinstance(i, tuple) else 1
            for i, size in zip(at, self.shape, strict=True)
            if not isinstance(i, int)
        )

    @property
    def numel(self) -> int:
        """Elements of the view."""
        return math.prod(self.view_shape)

    def __str__(self) -> str:
        if not self.at:
            return self.name
        parts = (
            ":" if i is None else f"{i[0]}:{i[1]}" if isinstance(i, tuple) else str(i)
            for i in self.at
        )
        return f"{self.name}[{', '.join(parts)}]"


def _indexed(index: Index, own: int) -> Any:
    if index is None:
        return slice(None)
    if index == OWN:
        return slice(own, own + 1)
    return slice(*index) if isinstance(index, tuple) else index


@dataclass(frozen=True)
class Operator:
    """An operator with its options, which are the fields of a subclass.

    Attributes:
        launches: whether it does nothing but launch operators of an implementation.
    """

    launches: ClassVar[bool] = False

    def bound(self, ops: Ops, own: int) -> Callable[..., object]:
        """The function that takes the launch's tensors, such as one of an implementation.

        Args:
            own: what stands for :data:`OWN`.
        """
        return self.run

    def run(self, *tensors: Tensor) -> None:
        """What it does, if it is the same on all devices."""
        raise NotImplementedError

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        """The view of an argument that the function takes. (It is made once, when a program is
        bound, unless the tensor comes late.)"""
        return tensor


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
            the same for every row of ``inp`` at once; ``all-to-all``: row ``d`` of ``inp`` goes to
            rank ``d``; ``reduce-scatter``: ``out`` ``[n, m]`` is the sum of this rank's rows of
            ``inp`` ``[n * W, m]``; ``all-reduce``: a sum in place, ``out`` is ``inp``.
        ranks: how many take part.
        flight: the name to wait for.
        columns: of an all-to-all, the columns that each rank needs of its row; None for all.
        in_flight: whether anything else runs before it is waited for.
    """

    kind: Collective
    level: Level
    ranks: int
    out: Place
    inp: Place
    flight: str
    columns: tuple[slice, ...] | None = None
    in_flight: bool = False

    def bytes_of(self, rank: int = 0) -> int:
        """Bytes that ``rank`` sends to others; they depend on it with :attr:`columns` only."""
        size = self.inp.dtype.itemsize
        if self.columns is not None:
            return sum(c.stop - c.start for r, c in enumerate(self.columns) if r != rank) * size
        sent = self.inp.numel * size
        if self.kind.startswith("all-gather"):
            return (self.ranks - 1) * sent
        part = sent * (self.ranks - 1) // self.ranks
        return 2 * part if self.kind == "all-reduce" else part

    def bytes_for(self, numel: float) -> float:
        """Bytes that a rank sends to others for ``numel`` elements of :attr:`inp`, in a ring if it
        sums; if ranks send unequal columns, an average over ranks for as many of each."""
        others = (self.ranks - 1) * numel * self.inp.dtype.itemsize
        if self.kind.startswith("all-gather"):
            return others
        return (2 if self.kind == "all-reduce" else 1) * others / self.ranks

    @property
    def scratch(self) -> Place | None:
        """What a backend that does not add up receives before a sum; None without a sum."""
        if self.kind != "reduce-scatter":
            return None
        return Place(f"{self.flight}.received", self.inp.shape, self.inp.dtype)

    def __str__(self) -> str:
        return (
            f"send {self.kind} {self.level}: {self.inp} -> {self.out}, {self.bytes_of()} bytes, "
            f"as {self.flight}"
        )


@dataclass(frozen=True)
class Wait:
    """Waits for a collective, of this run of a program or of an earlier one, if there is any.

    Attributes:
        turn: whether other units may take turns before it.
    """

    flight: str
    turn: bool = False

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
        ranges: list[tuple[str, int]] = []
        listed: list[Step] = []
        for name, steps in parts:
            before = len(listed)
            listed += steps
            length = len(listed) - before
            if ranges and ranges[-1][0] == name:
                length += ranges.pop()[1]
            if length:
                ranges.append((name, length))
        return cls(what, tuple(ranges), tuple(listed))

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The whole tensors. Scratch of one name may have several shapes, one after another."""
        found = (place for step in self.steps for place in _places(step))
        return tuple(dict.fromkeys(replace(place, at=()) for place in found))

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The levels on which it sends, in the order of first use."""
        return tuple(dict.fromkeys(s.level for s in self.sends))

    @cached_property
    def sent(self) -> int:
        """Bytes that a rank sends; only those to other hosts, if hosts have several ranks."""
        return sum(s.bytes_of() for s in self.sends if s.level != "inside")

    @cached_property
    def sent_inside(self) -> int:
        """Bytes that a rank sends to others of its host."""
        return sum(s.bytes_of() for s in self.sends if s.level == "inside")

    @cached_property
    def sends(self) -> tuple[Send, ...]:
        """The collectives that it starts."""
        return tuple(s for s in self.steps if isinstance(s, Send))

    @cached_property
    def words(self) -> int:
        """32-bit words of the longest message that leaves the host."""
        sends = (s for s in self.sends if s.level != "inside")
        return max((s.inp.numel * s.inp.dtype.itemsize // 4 for s in sends), default=0)

    def __str__(self) -> str:
        lines = (f"{i:3} {step}" for i, step in enumerate(self.steps))
        return "\n".join((self.what, *lines))


def _places(step: Step) -> Iterator[Place]:
    if isinstance(step, Launch):
        yield from filter(None, step.places)
    elif isinstance(step, Send):
        yield from (step.out, step.inp)

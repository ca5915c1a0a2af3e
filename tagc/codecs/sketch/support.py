"""A shared support: all ranks send the groups that the shard's owner chose one step ahead.

The owner chooses the largest groups of its own residual, and a window that rotates over all groups,
so that groups that are large only on other ranks are also sent. This step's messages carry its
choice for the next step.

All ranks know the groups, so the ``k``-th of them has the ``k``-th cell: no cell is lost to
hashing, and nothing is peeled. Operators write and read a table with a cell for every group
(:attr:`SketchLayout.direct`), which stays on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.codecs.sketch.plan import SketchPlan
from tagc.ops import Ops
from tagc.ops.bitmap import from_bitmap
from tagc.ops.program import OWN, Launch, Operator, Place
from tagc.ops.sketch import SketchLayout
from tagc.ops.torch_operators import Copy


@dataclass(frozen=True)
class Select(Operator):
    """``(owed [1, n], threshold [1], bitmap [1, words], counts [D, 4])``: the largest groups. The
    counts are the same in every row. See :func:`tagc.ops.reference.select`."""

    layout: SketchLayout
    capacity: int

    def bound(self, ops: Ops, own: int) -> Callable[..., object]:
        def select(owed: Tensor, threshold: Tensor, bitmap: Tensor, counts: Tensor) -> None:
            ops.select(
                owed, threshold, bitmap, counts[:1], layout=self.layout, capacity=self.capacity
            )
            counts.copy_(counts[:1].expand_as(counts))

        return select


@dataclass(frozen=True)
class Explore(Operator):
    """``(bitmap [n, words], at [] int64)``: adds the window of words from ``at``, and moves it."""

    window: int
    groups: int

    def run(self, bitmap: Tensor, at: Tensor) -> None:
        words = bitmap.shape[1]
        word = torch.arange(words, dtype=torch.int64, device=bitmap.device)
        bitmap.masked_fill_((word >= at) & (word < at + self.window), -1)
        # Bits past the last group stay clear.
        last = (1 << ((self.groups - 1) % 32 + 1)) - 1
        bitmap[:, -1].bitwise_and_(last if last < 1 << 31 else -1)
        at.copy_((at + self.window).clamp(max=words) % words)


@dataclass(frozen=True)
class Collect(Operator):
    """``(support [D, words], table [D, groups], cells [D, capacity], places [1, groups] int64)``:
    the cells of the support's groups, zeros behind them. ``places`` has, for this rank's shard,
    the number of every group among those of the support, from 1 on, and 0 for the others."""

    groups: int
    capacity: int

    def bound(self, ops: Ops, own: int) -> Callable[..., object]:
        def collect(support: Tensor, table: Tensor, cells: Tensor, places: Tensor) -> None:
            kept = from_bitmap(support, self.groups)
            of_all = kept.cumsum(1).mul_(kept)
            found = cells.new_zeros(len(cells), self.capacity + 1)
            found.scatter_(1, of_all, table)
            cells.copy_(found[:, 1:])
            places.copy_(of_all[own : own + 1])

        return collect


@dataclass(frozen=True)
class Spread(Operator):
    """``(cells [1, capacity], places [1, groups], table [1, groups])``: the cell of every group;
    zeros for groups that are not in the support."""

    def run(self, cells: Tensor, places: Tensor, table: Tensor) -> None:
        torch.gather(torch.cat((cells.new_zeros(1, 1), cells), 1), 1, places, out=table)


@dataclass(frozen=True)
class Unite(Operator):
    """``(support [1, words], index [W, words + 1], union [1, words + 1])``: the index of the
    support. Its poison word is set if any rank's is."""

    def run(self, support: Tensor, index: Tensor, union: Tensor) -> None:
        union[:, :-1] = support
        torch.amax(index[:, -1:], 0, keepdim=True, out=union[:, -1:])


class Support:
    """The groups that all ranks send, for every shard, of one segment.

    Attributes:
        number: which of the unit's supports it is.
        current: the supports of the next step, ``[D, words]`` int32.
        table: a cell for every group, of which the support's are sent, ``[D, groups]`` int32.
        union: the index for decoding this rank's shard.
        spread: the summed cells of this rank's shard, ``[1, groups]``.
        wanted: how many groups the owner should choose by size.
    """

    def __init__(self, plan: SketchPlan, number: int, rows: int) -> None:
        self.number, self._name = number, plan.name
        self._layout, self._capacity = plan.layout, plan.capacity
        layout, words = plan.layout, plan.layout.words
        # The window takes an eighth of the capacity. Windows are whole words of the bitmap.
        self._explore = Explore(max(1, plan.capacity // 256), layout.groups)
        rest = plan.capacity - 32 * self._explore.window
        self._select = Select(layout, rest)
        self.wanted = plan.density * layout.groups * rest / plan.capacity
        name = f"sketch.support.{number}"
        self.current = Place(f"{name}.current", (rows, words), torch.int32, "state")
        self._at = Place(f"{name}.at", (), torch.int64, "state")
        self._next = Place("support_next", (1, words), torch.int32)
        self.table = Place("cells_of_groups", (rows, layout.cells), torch.int32)
        groups = (1, layout.groups)
        self._places = Place(f"places.{number}", groups, torch.int64)
        self.spread = Place("cells_spread", groups, torch.int32)
        self.union = Place("support_index", (1, plan.layout.index_words), torch.int32)

    def start(self) -> Iterator[Launch]:
        """Start with the first window, for every shard."""
        yield Launch(self._explore, (self.current, self._at))

    def choose(
        self, owed: Place, threshold: Place, index: Place, counts: Place
    ) -> Iterator[Launch]:
        """Write the next support of this rank's shard to ``index`` ``[D, words]``.

        Args:
            owed: the rank's residual of its own shard, ``[1, columns]``.
            threshold: ``[1]``.
            counts: ``[D, 4]``, written.
        """
        yield Launch(self._select, (owed, threshold, self._next, counts), self._name)
        yield Launch(self._explore, (self._next, self._at))
        yield Launch(Copy(), (self._next, index))

    def collect(self, cells: Place) -> Iterator[Launch]:
        """Write the cells of the support's groups to ``cells`` ``[D, capacity]``."""
        places = (self.current, self.table, cells, self._places)
        yield Launch(Collect(self._layout.groups, self._capacity), places, self._name)

    def receive(self, index: Place, cells: Place) -> Iterator[Launch]:
        """Spread the sums ``[1, capacity]`` over :attr:`spread`, and take the owners' choices for
        the next step from ``index`` ``[D, words + 1]``."""
        yield Launch(Spread(), (cells, self._places, self.spread), self._name)
        yield Launch(Unite(), (self.current.row(OWN), index, self.union))
        yield Launch(Copy(), (index[: self._layout.words], self.current))

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for a support that exceeds the groups or the capacity."""
        current, at = state["current"], int(state["at"])
        groups, words = self._layout.groups, self._layout.words
        kept = from_bitmap(current, 32 * words)
        if bool(kept[:, groups:].any()) or int(kept.sum(1).max()) > self._capacity:
            raise ValueError(
                f"a shared support names groups that are not there, or more than "
                f"{self._capacity} of {groups}"
            )
        if not 0 <= at < words:
            raise ValueError(f"a window of exploration begins at word {at} of {words}")

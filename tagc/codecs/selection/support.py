"""A shared support: all ranks send the groups that the shard's owner chose one step ahead.

The owner chooses the largest groups of its own residual, and a window that rotates over all groups,
so that groups that are large only on other ranks are also sent. This step's messages carry its
choice for the next step.

All ranks know the groups, so the ``k``-th of them has the ``k``-th cell: no cell is lost to
hashing, and nothing is peeled. Operators write and read a table with a cell for every group
(:attr:`SketchLayout.direct`), which stays on the rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tagc.ops import Ops
from tagc.ops.bitmap import from_bitmap
from tagc.ops.sketch import SketchLayout


class Support:
    """The groups that all ranks send, for every shard.

    Attributes:
        current: the supports of the next step, ``[D, words]`` int32.
        wanted: how many groups the owner should choose by size.
    """

    def __init__(
        self,
        layout: SketchLayout,
        capacity: int,
        target: float,
        destinations: int,
        device: torch.device,
    ) -> None:
        """Start with the first window, for every shard.

        Args:
            capacity: the most groups of a support.
            target: the density to choose.
        """
        self._layout, self._capacity = layout, capacity
        self._words = layout.words
        # Bits past the last group stay clear.
        self._last = (1 << ((layout.groups - 1) % 32 + 1)) - 1
        # The window takes an eighth of the capacity. Windows are whole words of the bitmap.
        self._window = max(1, capacity // 256)
        self._selected = capacity - 32 * self._window
        self.wanted = target * layout.groups * self._selected / capacity
        self._at = 0
        self._next = torch.zeros(1, layout.words, dtype=torch.int32, device=device)
        self._explore(self._next)
        self.current = self._next.expand(destinations, -1).clone()

    def choose(
        self, ops: Ops, owed: Tensor, threshold: Tensor, index: Tensor, counts: Tensor
    ) -> None:
        """Write the next support of this rank's shard to ``index`` ``[D, words]``.

        Args:
            owed: the rank's residual of its own shard, ``[1, columns]``.
            threshold: ``[1]``.
            counts: ``[D, 4]``, written: the counts of this selection, the same in every row.
        """
        ops.select(
            owed, threshold, self._next, counts[:1], layout=self._layout, capacity=self._selected
        )
        counts.copy_(counts[:1].expand_as(counts))
        self._explore(self._next)
        index.copy_(self._next.expand_as(index))

    def receive(self, index: Tensor) -> None:
        """Take the owners' choices ``[D, words]`` for the next step."""
        self.current.copy_(index)

    def collect(self, table: Tensor, cells: Tensor) -> Tensor:
        """Write the cells of the support's groups to ``cells`` ``[D, capacity]``, zeros behind.

        Args:
            table: ``[D, groups]`` int32.

        Returns:
            The place of every group among those of the support, from 1 on, and 0 for the others;
            ``[D, groups]`` int64.
        """
        kept = from_bitmap(self.current, self._layout.groups)
        places = kept.cumsum(1).mul_(kept)
        found = cells.new_zeros(len(cells), self._capacity + 1)
        found.scatter_(1, places, table)
        cells.copy_(found[:, 1:])
        return places

    @staticmethod
    def spread(cells: Tensor, places: Tensor) -> Tensor:
        """The table ``[groups]`` of the cells ``[capacity]`` of a destination; zeros for groups
        that are not in its support.

        Args:
            places: the destination's ``[groups]``, as :meth:`collect` returned them.
        """
        return torch.cat((cells.new_zeros(1), cells)).gather(0, places)

    def state(self) -> dict[str, Tensor]:
        """The state that the next step depends on."""
        return {
            "current": self.current,
            "at": torch.tensor(self._at, dtype=torch.int64, device="cpu"),
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for a support that exceeds the groups or the capacity."""
        current, at = state["current"], int(state["at"])
        groups = self._layout.groups
        kept = from_bitmap(current, 32 * self._words)
        if bool(kept[:, groups:].any()) or int(kept.sum(1).max()) > self._capacity:
            raise ValueError(
                f"a shared support names groups that are not there, or more than "
                f"{self._capacity} of {groups}"
            )
        if not 0 <= at < self._words:
            raise ValueError(f"a window of exploration begins at word {at} of {self._words}")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state`."""
        self.current.copy_(state["current"])
        self._at = int(state["at"])

    def _explore(self, bitmap: Tensor) -> None:
        """Add the next window to ``bitmap`` ``[1, words]``."""
        stop = min(self._words, self._at + self._window)
        bitmap[:, self._at : stop] = -1
        bitmap[:, -1].bitwise_and_(self._last if self._last < 1 << 31 else -1)
        self._at = stop % self._words

"""A shared support: all ranks send the groups that the shard's owner chose one step ahead.

The owner takes the largest of what it owes itself, and a window that rotates over all groups, so
that what only other ranks see is sent too. Its choice for the next step rides in the messages of
this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tagc.ops import Ops
from tagc.ops.bitmap import from_bitmap
from tagc.ops.packed import PackedLayout


class Support:
    """The groups that all ranks send, for every shard.

    Attributes:
        current: ``[D, bitmap_words]`` int32, for the step to come.
        wanted: groups that the owner should choose for their size.
    """

    def __init__(
        self, layout: PackedLayout, target: float, destinations: int, device: torch.device
    ) -> None:
        """The first window, for every shard.

        Args:
            layout: groups, room for them, and how a choice travels; values do not matter.
            target: density to choose.
        """
        self._layout = layout
        self._words = layout.bitmap_words
        # Bits past the last group stay clear.
        self._last = (1 << ((layout.groups - 1) % 32 + 1)) - 1
        # An eighth of the room explores. Windows are whole words of the bitmap.
        self._window = max(1, layout.capacity // 256)
        self._selecting = replace(layout, capacity=layout.capacity - 32 * self._window)
        self.wanted = target * layout.groups * self._selecting.capacity / layout.capacity
        self._at = 0
        self._next = torch.zeros(1, layout.bitmap_words, dtype=torch.int32, device=device)
        self._explore(self._next)
        self.current = self._next.expand(destinations, -1).clone()

    def choose(
        self, ops: Ops, owed: Tensor, threshold: Tensor, index: Tensor, counts: Tensor
    ) -> None:
        """Write the next support of this rank's shard to ``index`` ``[D, index_words]``.

        Args:
            owed: ``[1, columns]``, the rank's residual of its own shard.
            threshold: ``[1]``.
            counts: ``[D, 4]``, written: what was selected here, for all destinations.
        """
        ops.select(owed, threshold, self._next, counts[:1], layout=self._selecting)
        counts.copy_(counts[:1].expand_as(counts))
        self._explore(self._next)
        ops.write_index(self._next, index[:1], layout=self._layout)
        index.copy_(index[:1].expand_as(index))

    def receive(self, ops: Ops, index: Tensor) -> None:
        """Take the owners' choices, ``[D, index_words]``, for the step to come."""
        ops.read_index(index, self.current, layout=self._layout)

    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on."""
        return {
            "current": self.current,
            "at": torch.tensor(self._at, dtype=torch.int64, device="cpu"),
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for a support that the operators have no room for."""
        current, at = state["current"], int(state["at"])
        groups = self._layout.groups
        kept = from_bitmap(current, 32 * self._words)
        if bool(kept[:, groups:].any()) or int(kept.sum(1).max()) > self._layout.capacity:
            raise ValueError(
                f"a shared support names groups that are not there, or more than "
                f"{self._layout.capacity} of {groups}"
            )
        if not 0 <= at < self._words:
            raise ValueError(f"a window of exploration begins at word {at} of {self._words}")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken."""
        self.current.copy_(state["current"])
        self._at = int(state["at"])

    def _explore(self, bitmap: Tensor) -> None:
        """Add the next window to ``[1, bitmap_words]``."""
        stop = min(self._words, self._at + self._window)
        bitmap[:, self._at : stop] = -1
        bitmap[:, -1] &= self._last if self._last < 1 << 31 else -1
        self._at = stop % self._words

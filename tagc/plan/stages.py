"""One collective of a unit's route, and the bytes that it sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tagc.plan.messages import MessagePlan, Segment

Collective = Literal["reduce-scatter", "all-gather", "all-reduce", "all-to-all"]
Level = Literal["flat", "across", "inside"]


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A collective among some ranks, which sends rows as they are, or messages about them.

    Attributes:
        level: ``flat`` among all ranks of the unit; where the ranks of a host work together,
            ``inside`` a host or ``across`` hosts.
        ranks: that take part.
        columns: elements of a row as it is.
        dtype: of them.
        rows: that a rank sends each other one.
        repeats: how often it runs in a step of one backward.
        decodes: how often its messages are decoded in that time.
        each_backward: whether it runs in the backward of every micro-batch; otherwise in the last.
        messages: that are sent; None where rows travel as they are.
    """

    collective: Collective
    level: Level
    ranks: int
    columns: int
    dtype: torch.dtype
    rows: int = 1
    repeats: int = 1
    decodes: int = 1
    each_backward: bool = True
    messages: MessagePlan | None = None

    @property
    def starts(self) -> int:
        """Collectives that are started in a step of one backward."""
        found = self.messages
        return self.repeats + (0 if found is None else (found.cells > 0) + (found.counts > 0))

    @property
    def bytes(self) -> float:
        """That a rank sends in a step of one backward, without those of :attr:`count_bytes`."""
        if self.messages is None:
            factor = self._reduced if self.collective == "all-reduce" else self.ranks - 1
            return factor * self.rows * self.columns * self.dtype.itemsize * self.repeats
        return sum(map(self._bytes_of, self.messages.segments))

    @property
    def count_bytes(self) -> float:
        """In the all-reduce of counts, for thresholds."""
        return 0.0 if self.messages is None else sum(map(self._counts_of, self.messages.segments))

    def bytes_of(self, segment: int) -> float:
        """Of one segment of the messages, its share of the counts included."""
        assert self.messages is not None
        found = self.messages.segments[segment]
        return self._bytes_of(found) + self._counts_of(found)

    @property
    def _reduced(self) -> float:
        """What a ring sends to reduce a byte on all ranks."""
        return 2 * (self.ranks - 1) / self.ranks

    def _bytes_of(self, segment: Segment) -> float:
        assert self.messages is not None
        others = self.ranks - 1
        words = others * self.rows * self.messages.words_of(segment) * self.repeats
        summed = self._reduced if self.messages.for_all else others
        return 4 * (words + summed * segment.codec.cells)

    def _counts_of(self, segment: Segment) -> float:
        assert self.messages is not None
        return 4 * self._reduced * self.messages.made * segment.codec.counts

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
    """A collective that sends rows uncompressed, or messages about them.

    Attributes:
        level: ``flat`` among all ranks of the unit; with two levels, ``inside`` a host or
            ``across`` hosts.
        ranks: how many ranks take part.
        columns: elements of an uncompressed row.
        dtype: the dtype of these elements.
        rows: rows that a rank sends to each other rank.
        repeats: how often it runs in a step with one backward.
        decodes: how often its messages are decoded in such a step.
        each_backward: whether it runs in the backward of every micro-batch, or only in the last.
        messages: the messages; None if rows are sent uncompressed.
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
        """Collectives started in a step with one backward."""
        found = self.messages
        return self.repeats + (0 if found is None else (found.cells > 0) + (found.counts > 0))

    @property
    def bytes(self) -> float:
        """Bytes that a rank sends in a step with one backward, without :attr:`count_bytes`."""
        if self.messages is None:
            factor = self._reduced if self.collective == "all-reduce" else self.ranks - 1
            return factor * self.rows * self.columns * self.dtype.itemsize * self.repeats
        return sum(map(self._bytes_of, self.messages.segments))

    @property
    def count_bytes(self) -> float:
        """Bytes that a rank sends in the all-reduce of counts, for thresholds."""
        return 0.0 if self.messages is None else sum(map(self._counts_of, self.messages.segments))

    def bytes_of(self, segment: int) -> float:
        """Bytes that a rank sends for one segment of the messages, including its counts.

        Args:
            segment: its index in the messages.
        """
        assert self.messages is not None
        found = self.messages.segments[segment]
        return self._bytes_of(found) + self._counts_of(found)

    @property
    def _reduced(self) -> float:
        """Bytes that a ring all-reduce sends per byte."""
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

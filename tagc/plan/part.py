"""A backward that reaches only part of a unit, in the columns of the plan.

FSDP reduces only the gradients that the backward produced, and leaves ``.grad`` of the other
parameters alone. This happens with a loss computed in chunks over the head, and with experts that
get no token. The plan's messages have room for all parameters, so missing columns are sent as
zeros. FSDP has no buffer for the results of missing columns, so their residuals wait for the next
backward that reaches them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tagc.ops.launches import Runs
from tagc.plan.messages import Segment
from tagc.plan.unit_plan import UnitPlan


@dataclass(frozen=True)
class Part:
    """The parameters of a unit that a backward reached.

    Attributes:
        names: the names of these parameters.
    """

    plan: UnitPlan
    names: frozenset[str]

    @cached_property
    def runs(self) -> Runs:
        """The columns of every parameter in the plan."""
        return tuple(self._runs(self.plan.segments, present=True))

    @cached_property
    def missing_runs(self) -> Runs:
        """The columns of the unit's other parameters."""
        return tuple(self._runs(self.plan.segments, present=False))

    @cached_property
    def columns(self) -> int:
        """Elements per shard in FSDP's buffer, which holds these parameters only."""
        return sum(run.stop - run.start for run in self.runs)

    @property
    def compressed(self) -> bool:
        """Whether any of these parameters is compressed."""
        return any(map(self.reaches, self.plan.compressed))

    @property
    def mark(self) -> int:
        """A hash of the names, never 0. Ranks that reached the same parameters have the same."""
        return zlib.crc32("\n".join(sorted(self.names)).encode()) % (2**31 - 1) + 1

    def missing_columns(self, segment: Segment) -> list[slice]:
        """Columns of the missing parameters in a segment, from its first column."""
        runs = self._runs([segment], present=False)
        return [slice(run.start - segment.start, run.stop - segment.start) for run in runs]

    def reaches(self, segment: Segment) -> bool:
        """Whether any of these parameters is in the segment."""
        return any(param.name in self.names for param in segment.params)

    def _runs(self, segments: Sequence[Segment], *, present: bool) -> Iterator[slice]:
        """The columns of each present parameter, or of each missing one."""
        for segment in segments:
            at = segment.start
            for param in segment.params:
                if (param.name in self.names) is present and param.columns:
                    yield slice(at, at + param.columns)
                at += param.columns

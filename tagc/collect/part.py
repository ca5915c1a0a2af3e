"""A backward that reaches a part of a unit: what FSDP reduces then, in the columns of the plan.

FSDP reduces the gradients that a backward brought, and leaves ``.grad`` of other parameters alone.
A loss in chunks does that with the head, and experts that get no token. The plan's messages have
room for all parameters, so missing columns count as zeros. FSDP has no place for what would come
out there: what is owed for these columns waits for the next backward that reaches them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tagc.codecs import Codec
from tagc.plan import Segment, UnitPlan


@dataclass(frozen=True)
class Part:
    """The parameters of a unit that a backward reached.

    Attributes:
        names: of these.
    """

    plan: UnitPlan
    names: frozenset[str]

    @cached_property
    def columns(self) -> int:
        """Elements of a shard of FSDP's buffer, which has no others."""
        return sum(run.stop - run.start for run in self._runs(present=True))

    @property
    def compressed(self) -> bool:
        """Whether any of them travels compressed."""
        return any(self._of(segment) for segment in self.plan.compressed)

    @property
    def mark(self) -> int:
        """The same number on ranks whose backwards reached the same parameters; never 0."""
        return zlib.crc32("\n".join(sorted(self.names)).encode()) % (2**31 - 1) + 1

    @property
    def missing(self) -> frozenset[str]:
        """The unit's other parameters."""
        return frozenset(p.name for p in self.plan.info.params) - self.names

    def expand(self, rows: Tensor) -> Tensor:
        """FSDP's ``rows`` ``[W, columns]`` in the plan's columns: ``[W, S]``, others zero."""
        whole = rows.new_zeros(len(rows), self.plan.columns)
        at = 0
        for run in self._runs(present=True):
            whole[:, run] = rows[:, at : at + run.stop - run.start]
            at += run.stop - run.start
        return whole

    def pick(self, whole: Tensor, out: Tensor) -> None:
        """Write what ``whole`` ``[S]`` has of these parameters to FSDP's ``out`` ``[columns]``."""
        torch.cat([whole[run] for run in self._runs(present=True)], out=out)

    def missing_columns(self, segment: Segment) -> list[slice]:
        """Columns of the others in a segment."""
        runs = self._runs(present=False, segments=[segment])
        return [slice(run.start - segment.start, run.stop - segment.start) for run in runs]

    def misses(self, codec: Codec, segments: Iterable[Segment]) -> bool:
        """Whether none of them is in the ``segments`` of a codec."""
        starts = codec.feedbacks.keys()
        return not any(self._of(segment) for segment in segments if segment.start in starts)

    def missing_mask(self, device: torch.device) -> Tensor:
        """``[S]`` boolean, true in the columns of the others."""
        mask = torch.zeros(self.plan.columns, dtype=torch.bool, device=device)
        for run in self._runs(present=False):
            mask[run] = True
        return mask

    def _of(self, segment: Segment) -> bool:
        return any(param.name in self.names for param in segment.params)

    def _runs(self, *, present: bool, segments: Sequence[Segment] | None = None) -> Iterator[slice]:
        """The columns of each of them, or of each of the others."""
        for segment in self.plan.segments if segments is None else segments:
            at = segment.start
            for param in segment.params:
                if (param.name in self.names) is present and param.columns:
                    yield slice(at, at + param.columns)
                at += param.columns

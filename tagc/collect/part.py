"""A backward that reaches only part of a unit, in the columns of the plan.

FSDP reduces only the gradients that the backward produced, and leaves ``.grad`` of the other
parameters alone. This happens with a loss computed in chunks over the head, and with experts that
get no token. The plan's messages have room for all parameters, so missing columns are sent as
zeros. FSDP has no buffer for the results of missing columns, so their residuals wait for the next
backward that reaches them.
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
        names: the names of these parameters.
    """

    plan: UnitPlan
    names: frozenset[str]

    @cached_property
    def columns(self) -> int:
        """Elements per shard in FSDP's buffer, which holds these parameters only."""
        return sum(run.stop - run.start for run in self._runs(present=True))

    @property
    def compressed(self) -> bool:
        """Whether any of these parameters is compressed."""
        return any(self._of(segment) for segment in self.plan.compressed)

    @property
    def mark(self) -> int:
        """A hash of the names, never 0. Ranks that reached the same parameters have the same."""
        return zlib.crc32("\n".join(sorted(self.names)).encode()) % (2**31 - 1) + 1

    @property
    def missing(self) -> frozenset[str]:
        """Names of the unit's other parameters."""
        return frozenset(p.name for p in self.plan.info.params) - self.names

    def expand(self, rows: Tensor) -> Tensor:
        """Copy FSDP's ``rows`` ``[W, columns]`` to the plan's columns, ``[W, S]``; the others are
        zero."""
        whole = rows.new_zeros(len(rows), self.plan.columns)
        at = 0
        for run in self._runs(present=True):
            whole[:, run] = rows[:, at : at + run.stop - run.start]
            at += run.stop - run.start
        return whole

    def pick(self, whole: Tensor, out: Tensor) -> None:
        """Copy these parameters' columns of ``whole`` ``[S]`` to FSDP's ``out`` ``[columns]``."""
        torch.cat([whole[run] for run in self._runs(present=True)], out=out)

    def missing_columns(self, segment: Segment) -> list[slice]:
        """Columns of the missing parameters in a segment, from its first column."""
        runs = self._runs(present=False, segments=[segment])
        return [slice(run.start - segment.start, run.stop - segment.start) for run in runs]

    def misses(self, codec: Codec, segments: Iterable[Segment]) -> bool:
        """Whether the codec's segments among ``segments`` hold none of these parameters."""
        starts = codec.feedbacks.keys()
        return not any(self._of(segment) for segment in segments if segment.start in starts)

    def missing_mask(self, device: torch.device) -> Tensor:
        """``[S]`` boolean, true in the columns of missing parameters."""
        mask = torch.zeros(self.plan.columns, dtype=torch.bool, device=device)
        for run in self._runs(present=False):
            mask[run] = True
        return mask

    def _of(self, segment: Segment) -> bool:
        return any(param.name in self.names for param in segment.params)

    def _runs(self, *, present: bool, segments: Sequence[Segment] | None = None) -> Iterator[slice]:
        """The columns of each present parameter, or of each missing one."""
        for segment in self.plan.segments if segments is None else segments:
            at = segment.start
            for param in segment.params:
                if (param.name in self.names) is present and param.columns:
                    yield slice(at, at + param.columns)
                at += param.columns

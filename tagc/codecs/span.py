"""Where a segment is in a unit and in a message."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

from tagc.codecs.plan import CodecPlan

PlanOf = TypeVar("PlanOf", bound=CodecPlan, covariant=True)


class CodecSegment(Protocol[PlanOf]):
    """Columns ``start`` to ``stop`` of a unit."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def codec(self) -> PlanOf: ...


SegmentOf = TypeVar("SegmentOf", bound=CodecSegment[CodecPlan])


class Span(NamedTuple, Generic[SegmentOf]):
    """A segment, its columns of a row, and its words in a message."""

    segment: SegmentOf
    columns: slice
    words: slice

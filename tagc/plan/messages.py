"""The messages of one stage: their segments, how many a rank makes and reads, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from tagc.codecs import CodecPlan, in_message_order, row_words
from tagc.plan.param_slices import filled_columns
from tagc.plan.units import UnitInfo, UnitParam


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Columns ``start`` to ``stop`` of a unit, which travel by one codec.

    Attributes:
        role: of its parameters; ``mixed`` in a flat buffer, where they need not share one.
    """

    start: int
    stop: int
    params: tuple[UnitParam, ...]
    role: str
    rule: int | None
    codec: CodecPlan

    @property
    def columns(self) -> int:
        """Elements of the segment in one shard."""
        return self.stop - self.start

    @property
    def compressed(self) -> bool:
        """Whether anything but the buffer itself travels."""
        return self.codec.compressed

    @property
    def frozen(self) -> bool:
        """Whether none of its parameters has a gradient."""
        return all(param.frozen for param in self.params)


@dataclass(frozen=True, kw_only=True)
class MessagePlan:
    """What the ranks of one stage send each other: a message has words of every segment.

    Attributes:
        segments: in column order, without gaps.
        made: messages that a rank encodes: one for all, or one for each rank that it sends to.
        read: messages that a rank decodes.
        rows: rows of elements that decoding writes.
        for_all: whether every rank gets the same message.
        sent: words of the message to each rank that are sent; None for all of them.
    """

    segments: tuple[Segment, ...]
    made: int
    read: int
    rows: int = 1
    for_all: bool = False
    sent: tuple[slice, ...] | None = None

    @cached_property
    def columns(self) -> int:
        """Elements that a message is about."""
        return self.segments[-1].stop if self.segments else 0

    @cached_property
    def words(self) -> int:
        """int32 words of all segments in a message."""
        return sum(s.codec.room for s in self.segments)

    @cached_property
    def row_words(self) -> int:
        """Words of a message with its stamp and padding: from one to the next."""
        return row_words(self.words)

    @cached_property
    def cells(self) -> int:
        """Words for each destination that are summed on the way, besides the message."""
        return sum(s.codec.cells for s in self.segments)

    @cached_property
    def counts(self) -> int:
        """Words for each destination that all ranks sum, for the next step's thresholds."""
        return sum(s.codec.counts for s in self.segments)

    @cached_property
    def ordered(self) -> tuple[Segment, ...]:
        """The segments in the order in which their words follow each other in a message."""
        return _ordered(self.segments)

    def words_of(self, segment: Segment) -> float:
        """Words of a segment in a message, padding included; if messages are sent in part, on
        average."""
        if self.sent is None:
            end = self.row_words - self.words if segment is self._largest else 0
            return segment.codec.room + end
        before = self.ordered[: self.ordered.index(segment)]
        start = sum(s.codec.room for s in before)
        stop = start + segment.codec.room
        parts = (min(stop, span.stop) - max(start, span.start) for span in self.sent)
        return sum(max(0, words) for words in parts) / len(self.sent)

    @cached_property
    def _largest(self) -> Segment:
        """The segment that the end of a message, stamp and padding, is counted for."""
        return max(self.segments, key=lambda s: s.codec.room)

    def stored_bytes(self, segment: Segment) -> int:
        """Bytes of a segment's error feedback: its residual, and what the owner keeps."""
        feedback = segment.codec.feedback
        if feedback is None:
            return 0
        owned = feedback.owner_bytes * segment.columns
        return self.made * feedback.row_bytes(segment.columns) + owned


def sent_spans(info: UnitInfo, segments: Sequence[Segment]) -> tuple[slice, ...] | None:
    """Words of the message to each owner that are sent; None for all of them.

    In a flat buffer an owner may have nothing of the first segments, or of the last, and fewer
    elements of dense ones than another.
    """
    if info.flat is None:
        return None
    ordered = _ordered(segments)
    words = sum(s.codec.room for s in ordered)
    spans = [(words, 0)] * info.world_size
    at = 0
    for segment in ordered:
        for row, columns in enumerate(filled_columns(info, segment.params)):
            used = segment.codec.used_words(columns)
            if used:
                spans[row] = (min(spans[row][0], at), at + used)
        at += segment.codec.room
    return tuple(slice(min(start, stop), stop) for start, stop in spans)


def _ordered(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    return tuple(chain.from_iterable(in_message_order(segments)))

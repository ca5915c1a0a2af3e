"""The messages of one stage: segments, sizes, and how many a rank encodes and decodes.

A rank's messages are the rows of one buffer. NCCL copies 16 bytes at a time between addresses that
are multiples of 16, otherwise one element at a time, which for messages is a byte (``reduceCopy``
in its ``common_kernel.h``). Triton's kernels load vectors under the same condition. So every
segment starts at a multiple of 4 words, and every message at a multiple of 32::

    | segment | 0-3 words | segment | 0-3 words | stamp | padding to 32 words |

The padding's content is undefined. The stamp always has room, but is written only if ranks exchange
no headers; see :mod:`tagc.collect.lockstep`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from tagc.codecs import CodecPlan, Span, in_message_order
from tagc.ops.dense import STAMP_WORDS
from tagc.plan.param_slices import filled_columns
from tagc.plan.units import UnitInfo, UnitParam

MESSAGE_FORMAT = 2
"""Version of the layout above."""
_ROW = 32


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Columns ``start`` to ``stop`` of a unit, sent by one codec.

    Attributes:
        rule: index of the rule that selects them; None if no rule does.
    """

    start: int
    stop: int
    params: tuple[UnitParam, ...]
    rule: int | None
    codec: CodecPlan

    @property
    def columns(self) -> int:
        """Elements of the segment in one shard."""
        return self.stop - self.start

    @property
    def compressed(self) -> bool:
        """Whether the segment is sent in another form than the buffer itself."""
        return self.codec.compressed

    @property
    def frozen(self) -> bool:
        """Whether none of its parameters has a gradient."""
        return all(param.frozen for param in self.params)


@dataclass(frozen=True, kw_only=True)
class MessagePlan:
    """The messages of one stage. A message has words of every segment.

    Attributes:
        segments: in column order, without gaps.
        made: messages that a rank encodes: one for all, or one for each rank that it sends to.
        read: messages that a rank decodes.
        rows: rows of elements that decoding writes.
        for_all: whether every rank gets the same message.
        in_column_order: whether segments lie in a message as in the unit, instead of by codec.
        sent: for each destination, the words of its message that are sent; None for all words.
    """

    segments: tuple[Segment, ...]
    made: int
    read: int
    rows: int = 1
    for_all: bool = False
    in_column_order: bool = False
    sent: tuple[slice, ...] | None = None

    @cached_property
    def columns(self) -> int:
        """Elements per message."""
        return self.segments[-1].stop if self.segments else 0

    @cached_property
    def words(self) -> int:
        """int32 words of all segments in a message."""
        return sum(s.codec.room for s in self.segments)

    @cached_property
    def row_words(self) -> int:
        """Words of a message including its stamp and padding."""
        return -(-(self.words + STAMP_WORDS) // _ROW) * _ROW

    @cached_property
    def spans(self) -> tuple[Span[Segment], ...]:
        """The segments in the order of their words in a message, with columns and words."""
        ordered = chain.from_iterable(in_message_order(self.segments))
        found, word = [], 0
        for s in self.segments if self.in_column_order else ordered:
            words = slice(word, word + s.codec.words)
            found.append(Span(s, slice(s.start, s.stop), words))
            word += s.codec.room
        return tuple(found)

    def words_of(self, segment: Segment) -> float:
        """Words of a segment in a message, including padding; an average if messages are sent in
        part."""
        if self.sent is None:
            # The largest one counts the stamp and padding at the end of a message as its own.
            largest = max(self.segments, key=lambda s: s.codec.room)
            return segment.codec.room + (segment is largest) * (self.row_words - self.words)
        start = next(span.words.start for span in self.spans if span.segment is segment)
        stop = start + segment.codec.room
        parts = (min(stop, span.stop) - max(start, span.start) for span in self.sent)
        return sum(max(0, words) for words in parts) / len(self.sent)

    def stored_bytes(self, segment: Segment) -> int:
        """Bytes of a segment's feedback: its residual and the owner state."""
        feedback = segment.codec.feedback
        if feedback is None:
            return 0
        owned = feedback.owner_bytes * segment.columns
        return self.made * feedback.row_bytes(segment.columns) + owned


def sent_spans(messages: MessagePlan, info: UnitInfo) -> tuple[slice, ...]:
    """For each owner, the words of its message that are sent.

    In a flat buffer an owner may have no elements in the first or last segments, and fewer elements
    of a dense segment than another owner.
    """
    spans = [(messages.words, 0)] * info.world_size
    for span in messages.spans:
        first = span.words.start
        for row, columns in enumerate(filled_columns(info, span.segment.params)):
            used = span.segment.codec.used_words(columns)
            if used:
                spans[row] = min(spans[row][0], first), first + used
    return tuple(slice(min(start, stop), stop) for start, stop in spans)

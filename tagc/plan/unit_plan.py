"""The plan of one unit in one direction: its segments, the messages that carry them, and the bytes
that these send and store.

FSDP's reduce-scatter buffer is ``[W, S]``, and a parameter occupies the same columns in each row;
the same holds for the all-gather's buffer. Adjacent parameters with the same rule (and role, if the
codec selects) form a *segment*, which one codec compresses. FSDP1 cuts its buffer into rows
regardless of parameters (see :mod:`tagc.plan.param_slices`), and all parameters with the same rule
form a segment.

A rank's messages are the rows of one buffer. NCCL copies 16 bytes at a time between addresses that
are multiples of 16, otherwise one element at a time, which for messages is a byte (``reduceCopy``
in its ``common_kernel.h``). Triton's kernels load vectors under the same condition. So every
segment starts at a multiple of 4 words, and every message at a multiple of 32::

    | segment | 0-3 words | segment | 0-3 words | stamp | padding to 32 words |

The padding's content is undefined. The stamp always has room, but is written only if ranks exchange
no headers; see :mod:`tagc.collect.lockstep`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from tagc.codecs import CodecPlan, Cut, Span, message_order
from tagc.ops.dense import STAMP_WORDS
from tagc.plan.param_slices import filled_columns
from tagc.plan.units import UnitInfo, UnitParam

Direction = Literal["gradients", "parameters", "replicas"]
COLLECTIVES: dict[Direction, str] = {
    "gradients": "the reduction of gradients",
    "parameters": "the gathering of parameters",
    "replicas": "the average over replicas",
}
"""What a unit's collective does, in texts for users."""

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
        ordered, found, word = self.segments, [], 0
        if not self.in_column_order:
            ordered = sorted(ordered, key=lambda s: message_order(s.codec))
        for s in ordered:
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


@dataclass(frozen=True, kw_only=True)
class TwoShots:
    """An all-reduce of a shard over ``N`` replicas in two shots. See :mod:`tagc.plan.two_shots`.

    Each replica owns a slice of the shard. It receives messages about its slice, sums them, and
    sends one message about the sum to all. In both shots a segment's slice has as many columns as
    its cuts' ``length`` in total.
    """

    reduce: MessagePlan  # the first shot, ``[N, C]`` to ``[C]``: a reduce-scatter of slices
    gather: MessagePlan  # the second, ``[C]`` to ``[N, C]``: an all-gather
    cuts: tuple[tuple[Cut, ...], ...]  # of each segment of the unit


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The segments of one unit in one direction, in column order, without gaps."""

    info: UnitInfo
    segments: tuple[Segment, ...]
    direction: Direction = "gradients"
    shots: TwoShots | None = None  # of an all-reduce; None in one shot
    # Between the ranks of a host that add up gradients, if they do not send them as they are.
    inside: MessagePlan | None = None

    @cached_property
    def messages(self) -> MessagePlan:
        """The first messages that are sent to other hosts."""
        if self.shots is not None:
            return self.shots.reduce
        W, H, copies = self.info.world_size, self.peers, self.keeps_copy
        gathers = self.direction == "parameters"
        messages = MessagePlan(
            segments=self.segments,
            made=1 if self.for_all else H,
            read=W if gathers and not copies else H,
            rows=(2 * H if copies else W) if gathers else 1,
            for_all=self.for_all,
            in_column_order=gathers,
        )
        flat = self.info.flat is not None
        return replace(messages, sent=sent_spans(messages, self.info)) if flat else messages

    @cached_property
    def flights(self) -> dict[str, MessagePlan]:
        """The messages that its programs send, by the name of the flight; empty if gradients or
        parameters are sent as they are."""
        if not self.compressed:
            return {}
        found = {} if self.inside is None else {"messages_inside": self.inside}
        found["messages"] = self.messages
        if self.shots is not None:
            found["sums_of_slices"] = self.shots.gather
        return found

    @cached_property
    def words(self) -> int:
        """int32 words of all segments in all messages, except those inside hosts."""
        return sum(m.words for m in self.flights.values() if m is not self.inside)

    @cached_property
    def columns(self) -> int:
        """Elements of a shard in the segments' arrangement."""
        return self.segments[-1].stop if self.segments else 0

    @cached_property
    def buffer_columns(self) -> int:
        """Elements of one shard of FSDP's own buffer."""
        return self.columns if self.info.flat is None else self.info.flat.columns

    def with_codecs(self, change: Callable[[Segment], CodecPlan]) -> UnitPlan:
        """The unit with other plans of its segments."""
        return replace(self, segments=tuple(replace(s, codec=change(s)) for s in self.segments))

    def dense_columns(self, params: Sequence[UnitParam]) -> float:
        """Columns of FSDP's buffer that these parameters take; if it is flat, an average over
        rows."""
        if self.info.flat is None:
            return sum(param.columns for param in params)
        numel, total = (sum(math.prod(p.shape) for p in ps) for ps in (params, self.info.params))
        return self.info.flat.columns * numel / max(1, total)

    def shares(self, segment: Segment) -> Iterator[tuple[UnitParam, float, float]]:
        """Each parameter of a segment, its dense columns, and its share of the segment's words."""
        columns = [self.dense_columns([param]) for param in segment.params]
        return zip(segment.params, columns, segment.codec.word_shares(columns), strict=True)

    @cached_property
    def for_all(self) -> bool:
        return self.direction == "parameters" or self.all_reduced

    @cached_property
    def all_reduced(self) -> bool:
        """Whether all ranks get the whole sum of the gradients: across replicas, and with DDP."""
        replicated = self.direction == "gradients" and self.info.replicated
        return replicated or self.direction == "replicas"

    @cached_property
    def peers(self) -> int:
        """How many ranks send each other messages: all, or with two levels one on every host."""
        return self.info.world_size // self.info.ranks_per_host

    @cached_property
    def rows(self) -> int:
        """Rows of the buffer of gradients: one for each shard; with DDP one for each rank of a
        host, which adds it up."""
        if self.direction == "replicas":
            return 1
        return self.info.ranks_per_host if self.info.replicated else self.info.world_size

    @cached_property
    def received_rows(self) -> int:
        """Rows of reduced gradients that a rank gets: its own shard, or with DDP all of them."""
        return self.rows if self.all_reduced else 1

    @cached_property
    def compressed(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.compressed)

    @cached_property
    def warmup_steps(self) -> int:
        """How many reductions of the whole unit are dense at first: the maximum over segments."""
        return max((s.codec.warmup_steps for s in self.segments), default=0)

    @cached_property
    def keeps_copy(self) -> bool:
        """Whether ranks keep a copy of all the unit's parameters, to add changes to."""
        return any(s.codec.of_changes for s in self.segments)

    @cached_property
    def reuses_forward_message(self) -> bool:
        """Whether the backward reuses the messages of the forward's all-gather."""
        wanted = any(s.codec.reuses_forward_message for s in self.segments)
        return wanted and self.info.per_step > 1 and not self.keeps_copy

    def dense_bytes(self, columns: float, micro_batches: int = 1) -> float:
        """Bytes that a rank sends for ``columns`` uncompressed columns in a step of
        ``micro_batches`` backwards; with two levels, only those to other hosts."""
        others = self.peers - 1
        if self.all_reduced:
            return 2 * others * columns * self.info.dtype.itemsize / self.peers
        return others * columns * self.info.dtype.itemsize * self.info.per_step * micro_batches

    def stored_bytes(self, segment: Segment) -> int:
        """Bytes that a rank stores for a segment between steps: residual, owner state, the
        forward's message, the copy, the plan of an exact message."""
        i, stored = self.segments.index(segment), 4 * segment.codec.measured_words
        for messages in self.flights.values():
            part = messages.segments[i]
            rule = part.codec.feedback
            if rule is not None:
                stored += messages.made * rule.row_bytes(part.columns)
                stored += 4 * part.columns * (rule.owner_state is not None)  # in float32
        if self.reuses_forward_message:
            stored += 4 * int(self.messages.words_of(segment)) * self.messages.read
        if self.keeps_copy:
            stored += self.peers * segment.columns * self.info.dtype.itemsize
        return stored


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

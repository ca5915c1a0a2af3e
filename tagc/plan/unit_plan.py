"""The plan of one unit in one direction: its segments, and what they cost on the wire.

FSDP's reduce-scatter buffer is ``[W, S]``, and a parameter occupies the same columns in each row;
so it does in the all-gather's buffer. Adjacent parameters that share rule and role form a
*segment*, which is compressed as one. In FSDP1's buffer, which is cut into rows regardless of
parameters (see :mod:`tagc.plan.param_slices`), all parameters that share a rule form one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from tagc.codecs import CodecPlan, Cut, in_message_order, row_words
from tagc.plan.param_slices import filled_columns
from tagc.plan.units import UnitInfo, UnitParam

Direction = Literal["gradients", "parameters", "replicas"]


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
class TwoShots:
    """An all-reduce of a shard over ``N`` replicas in two shots, of which each owns a slice:
    messages about every slice go to its owner, who adds them up, and sends one about the sum to
    all. See :mod:`tagc.plan.two_shots`.

    Attributes:
        reduce: the first shot, ``[N, C]`` to ``[C]``: a reduce-scatter of slices, as one of
            gradients is.
        gather: the second one, ``[C]`` to ``[N, C]``: an all-gather, as one of parameters is.
        cuts: of each segment of the unit; in both, the slices of a segment are one, of as many
            columns as its cuts have slices long.
    """

    reduce: UnitPlan
    gather: UnitPlan
    cuts: tuple[tuple[Cut, ...], ...]


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The segments of one unit in one direction, in column order, without gaps.

    Attributes:
        shots: where replicas do not send each other everything: how they go about it instead.
        inside: where ranks of a host add up and do not send each other the gradients as they are:
            what each sends another about the rows of one host, and gets from it. See
            :mod:`tagc.plan.inside`.
    """

    info: UnitInfo
    segments: tuple[Segment, ...]
    direction: Direction = "gradients"
    shots: TwoShots | None = None
    inside: UnitPlan | None = None

    @cached_property
    def stages(self) -> tuple[UnitPlan, ...]:
        """The exchanges of messages that follow each other in a step."""
        return (self,) if self.shots is None else (self.shots.reduce, self.shots.gather)

    @cached_property
    def columns(self) -> int:
        """Elements of one shard of the unit, as the segments arrange it."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def buffer_columns(self) -> int:
        """Elements of one shard of FSDP's own buffer."""
        return self.columns if self.info.flat is None else self.info.flat.columns

    def dense_columns(self, params: Sequence[UnitParam]) -> float:
        """Columns of FSDP's buffer that these parameters take; where that is flat, their share of
        it."""
        if self.info.flat is None:
            return sum(param.columns for param in params)
        numel, total = (sum(math.prod(p.shape) for p in ps) for ps in (params, self.info.params))
        return self.info.flat.columns * numel / max(1, total)

    @property
    def for_all(self) -> bool:
        """Whether all ranks get the same message, and decode the same."""
        return self.direction != "gradients"

    @cached_property
    def destinations(self) -> int:
        """Messages that a rank makes: one for all, or one to every owner that it sends to."""
        return 1 if self.for_all else self.sources

    @cached_property
    def sources(self) -> int:
        """Messages that a rank decodes."""
        everybodys = self.direction == "parameters" and not self.keeps_copy
        return self.info.world_size if everybodys else self.peers

    @cached_property
    def peers(self) -> int:
        """Ranks that send each other messages: one of every host, where those of a host work
        together."""
        return self.info.world_size // self.info.ranks_per_host

    @cached_property
    def compressed(self) -> tuple[Segment, ...]:
        """The segments that do not travel as they are."""
        return tuple(s for s in self.segments if s.compressed)

    @cached_property
    def dense(self) -> tuple[Segment, ...]:
        """The segments that do."""
        return tuple(s for s in self.segments if not s.compressed)

    def of(self, *plans: type[CodecPlan]) -> tuple[Segment, ...]:
        """The segments with such codecs."""
        return tuple(s for s in self.segments if isinstance(s.codec, plans))

    @cached_property
    def warmup_steps(self) -> int:
        """Reductions of the whole unit that go dense first: the most that any segment asks for."""
        return max((s.codec.warmup_steps for s in self.segments), default=0)

    @cached_property
    def words(self) -> int:
        """int32 words of the segments in the unit's message to one destination."""
        return sum(s.codec.room for s in self.segments)

    @cached_property
    def row_words(self) -> int:
        """Words of a message with its stamp and padding: from one to the next."""
        return row_words(self.words)

    @cached_property
    def sent(self) -> tuple[slice, ...] | None:
        """Words of the message to each owner that are sent; None for all of them.

        In a flat buffer an owner may have nothing of the first segments, or of the last, and of
        dense ones less than another.
        """
        if self.info.flat is None:
            return None
        spans = [(self.words, 0)] * self.info.world_size
        at = 0
        for segment in self.message:
            for row, columns in enumerate(filled_columns(self.info, segment.params)):
                used = segment.codec.used_words(columns)
                if used:
                    spans[row] = (min(spans[row][0], at), at + used)
            at += segment.codec.room
        return tuple(slice(min(start, stop), stop) for start, stop in spans)

    @cached_property
    def message(self) -> tuple[Segment, ...]:
        """The segments in the order in which their words follow each other in a message."""
        return tuple(chain.from_iterable(in_message_order(self.segments)))

    def sent_words(self, segment: Segment) -> float:
        """Words of a segment in a message, padding included; in a flat buffer, on average over
        all owners."""
        if self.sent is None:
            return self._words_of(segment)
        before = self.message[: self.message.index(segment)]
        start = sum(s.codec.room for s in before)
        stop = start + segment.codec.room
        parts = (min(stop, span.stop) - max(start, span.start) for span in self.sent)
        return sum(max(0, words) for words in parts) / self.info.world_size

    def _words_of(self, segment: Segment) -> int:
        """Words of a segment in a message. The end, stamp and padding, counts as the largest's."""
        largest = max(self.segments, key=lambda s: s.codec.room)
        rest = self.row_words - self.words if segment is largest else 0
        return segment.codec.room + rest

    @cached_property
    def keeps_copy(self) -> bool:
        """Whether ranks keep the unit's parameters, all of them, to add changes to."""
        return any(s.codec.of_changes for s in self.segments)

    @cached_property
    def reuses_forward_message(self) -> bool:
        """Whether the message of the forward's all-gather serves the backward's, too."""
        wanted = any(s.codec.reuses_forward_message for s in self.segments)
        return wanted and self.info.per_step > 1 and not self.keeps_copy

    @property
    def exchanges(self) -> int:
        """Messages of this unit that a rank sends in a step, for every destination."""
        return 1 if self.reuses_forward_message or self.keeps_copy else self.info.per_step

    def dense_bytes(self, columns: float) -> float:
        """Bytes that a rank sends in a step for so many columns uncompressed; where ranks of a host
        work together, those to other hosts."""
        others = self.peers - 1
        if self.direction == "replicas":  # an all-reduce of one shard
            return 2 * others / self.peers * columns * self.info.dtype.itemsize
        return others * columns * self.info.dtype.itemsize * self.info.per_step

    @property
    def inside_bytes(self) -> int:
        """Bytes that a rank sends to those of its own host: of gradients in a backward, to add up
        with them; of parameters in a step, to hand on what came from other hosts."""
        others = self.info.ranks_per_host - 1
        row = self.buffer_columns * self.info.dtype.itemsize
        if self.inside is not None:
            row = 4 * self.inside.row_words
        if self.direction == "parameters":
            hands_on_messages = self.compressed and not self.keeps_copy
            message = 4 * self.row_words * self.exchanges
            row = message if hands_on_messages else row * self.info.per_step
        return others * self.peers * row

    def wire_bytes(self, segment: Segment) -> float:
        """Bytes that a rank sends in a step for a segment, its share of the counts included."""
        if not self.compressed:
            return self.dense_bytes(self.dense_columns(segment.params))
        if self.shots is not None:
            return sum(part.wire_bytes(of) for part, of in self._slices_of(segment))
        W = self.peers
        words = (W - 1) * self.sent_words(segment) * self.exchanges
        reduced = 2 * (W - 1) / W
        words += (reduced if self.for_all else W - 1) * segment.codec.cells
        words += reduced * self.destinations * segment.codec.counts
        return 4 * words

    def stored_bytes(self, segment: Segment) -> int:
        """Bytes that a rank stores for a segment between steps: residual, what it keeps as an
        owner, the forward's message, the copy."""
        if self.shots is not None:
            return sum(part.stored_bytes(of) for part, of in self._slices_of(segment))
        feedback = segment.codec.feedback
        residual = feedback.row_bytes(segment.columns) if feedback else 0
        owned = feedback.owner_bytes * segment.columns if feedback else 0
        message = 4 * self._words_of(segment) * self.sources
        message = message if self.reuses_forward_message else 0
        copy = self.peers * segment.columns * self.info.dtype.itemsize if self.keeps_copy else 0
        return self.destinations * residual + owned + message + copy

    def _slices_of(self, segment: Segment) -> Iterator[tuple[UnitPlan, Segment]]:
        """What a segment is in either shot."""
        i = self.segments.index(segment)
        return ((part, part.segments[i]) for part in self.stages)

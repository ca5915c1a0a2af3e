"""The plan of one unit in one direction: its segments, and the bytes that they send and store.

FSDP's reduce-scatter buffer is ``[W, S]``, and a parameter occupies the same columns in each row;
the same holds for the all-gather's buffer. Adjacent parameters with the same rule (and role, if the
codec selects) form a *segment*, which one codec compresses. FSDP1 cuts its buffer into rows
regardless of parameters (see :mod:`tagc.plan.param_slices`), and all parameters with the same rule
form a segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from tagc.codecs import Cut
from tagc.plan.messages import MessagePlan, Segment, sent_spans
from tagc.plan.units import UnitInfo, UnitParam

Direction = Literal["gradients", "parameters", "replicas"]
COLLECTIVES: dict[Direction, str] = {
    "gradients": "the reduction of gradients",
    "parameters": "the gathering of parameters",
    "replicas": "the average over replicas",
}
"""What a unit's collective does, in texts for users."""


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
        i = self.segments.index(segment)
        stored = sum(m.stored_bytes(m.segments[i]) for m in self.flights.values())
        if self.reuses_forward_message:
            stored += 4 * int(self.messages.words_of(segment)) * self.messages.read
        if self.keeps_copy:
            stored += self.peers * segment.columns * self.info.dtype.itemsize
        return stored + 4 * segment.codec.measured_words

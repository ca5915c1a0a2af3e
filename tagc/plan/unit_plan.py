"""The plan of one unit in one direction: its segments, and what they cost on the wire.

FSDP's reduce-scatter buffer is ``[W, S]``, and a parameter occupies the same columns in each row;
so it does in the all-gather's buffer. Adjacent parameters that share rule and role form a
*segment*, which is compressed as one. In FSDP1's buffer, which is cut into rows regardless of
parameters (see :mod:`tagc.plan.param_slices`), all parameters that share a rule form one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from tagc.codecs import CodecPlan, Cut
from tagc.plan.messages import MessagePlan, Segment, sent_spans
from tagc.plan.stages import Collective, StagePlan
from tagc.plan.units import UnitInfo, UnitParam

Direction = Literal["gradients", "parameters", "replicas"]


@dataclass(frozen=True, kw_only=True)
class TwoShots:
    """An all-reduce of a shard over ``N`` replicas in two shots, of which each owns a slice:
    messages about every slice go to its owner, who adds them up, and sends one about the sum to
    all. See :mod:`tagc.plan.two_shots`.

    Attributes:
        reduce: messages of the first shot, ``[N, C]`` to ``[C]``: a reduce-scatter of slices.
        gather: those of the second one, ``[C]`` to ``[N, C]``: an all-gather.
        cuts: of each segment of the unit; in both, the slices of a segment are one, of as many
            columns as its cuts have slices long.
    """

    reduce: MessagePlan
    gather: MessagePlan
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
    inside: MessagePlan | None = None

    @cached_property
    def messages(self) -> MessagePlan:
        """Of the first stage that sends messages to other hosts."""
        if self.shots is not None:
            return self.shots.reduce
        W, H, copies = self.info.world_size, self.peers, self.keeps_copy
        gathers = self.direction == "parameters"
        return MessagePlan(
            segments=self.segments,
            made=1 if self.for_all else H,
            read=W if gathers and not copies else H,
            rows=(2 * H if copies else W) if gathers else 1,
            for_all=self.for_all,
            sent=sent_spans(self.info, self.segments),
        )

    @cached_property
    def route(self) -> tuple[StagePlan, ...]:
        """The collectives that carry the unit in a step, one after another."""
        if self.direction == "gradients":
            return self._reduction()
        return self._gather() if self.direction == "parameters" else self._average()

    def _reduction(self) -> tuple[StagePlan, ...]:
        on_hosts = self.info.ranks_per_host > 1
        across = StagePlan(
            collective="all-to-all" if self.compressed else "reduce-scatter",
            level="across" if on_hosts else "flat",
            ranks=self.peers,
            columns=self.buffer_columns,
            dtype=self.info.dtype,
            each_backward=not on_hosts,
            messages=self.messages if self.compressed else None,
        )
        inside = StagePlan(
            collective="reduce-scatter",
            level="inside",
            ranks=self.info.ranks_per_host,
            columns=self.buffer_columns,
            dtype=self.info.dtype,
            rows=self.peers,
            messages=self.inside,
        )
        return (inside, across) if on_hosts else (across,)

    def _gather(self) -> tuple[StagePlan, ...]:
        on_hosts = self.info.ranks_per_host > 1
        across = StagePlan(
            collective="all-gather",
            level="across" if on_hosts else "flat",
            ranks=self.peers,
            columns=self.buffer_columns,
            dtype=self.info.dtype,
            repeats=self.exchanges,
            decodes=1 if self.keeps_copy else self.info.per_step,
            each_backward=not self.keeps_copy,
            messages=self.messages if self.compressed else None,
        )
        # Ranks of a host hand messages on, or rows of the copy that they have.
        hand_on = self.compressed and not self.keeps_copy
        inside = StagePlan(
            collective="all-gather",
            level="inside",
            ranks=self.info.ranks_per_host,
            columns=self.messages.row_words if hand_on else self.buffer_columns,
            dtype=torch.int32 if hand_on else self.info.dtype,
            rows=self.peers,
            repeats=self.exchanges if hand_on else self.info.per_step,
        )
        return (across, inside) if on_hosts else (across,)

    def _average(self) -> tuple[StagePlan, ...]:
        def stage(collective: Collective, messages: MessagePlan | None = None) -> StagePlan:
            return StagePlan(
                collective=collective,
                level="flat",
                ranks=self.info.world_size,
                columns=self.buffer_columns,
                dtype=self.info.dtype,
                each_backward=False,
                messages=messages,
            )

        if not self.compressed:
            return (stage("all-reduce"),)
        if self.shots is None:
            return (stage("all-gather", self.messages),)
        return stage("all-to-all", self.shots.reduce), stage("all-gather", self.shots.gather)

    @cached_property
    def words(self) -> int:
        """int32 words of all segments in the messages of every stage but those inside hosts."""
        shots = () if self.shots is None else (self.shots.gather,)
        return sum(messages.words for messages in (self.messages, *shots))

    @cached_property
    def columns(self) -> int:
        """Elements of one shard of the unit, as the segments arrange it."""
        return self.segments[-1].stop if self.segments else 0

    @cached_property
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

    @cached_property
    def for_all(self) -> bool:
        """Whether all ranks get the same message, and decode the same."""
        return self.direction != "gradients"

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
    def keeps_copy(self) -> bool:
        """Whether ranks keep the unit's parameters, all of them, to add changes to."""
        return any(s.codec.of_changes for s in self.segments)

    @cached_property
    def reuses_forward_message(self) -> bool:
        """Whether the message of the forward's all-gather serves the backward's, too."""
        wanted = any(s.codec.reuses_forward_message for s in self.segments)
        return wanted and self.info.per_step > 1 and not self.keeps_copy

    @cached_property
    def exchanges(self) -> int:
        """All-gathers that a rank takes part in, in a step of one backward."""
        return 1 if self.reuses_forward_message or self.keeps_copy else self.info.per_step

    def dense_bytes(self, columns: float) -> float:
        """Bytes that a rank sends in a step for so many columns uncompressed; where ranks of a host
        work together, those to other hosts."""
        others = self.peers - 1
        if self.direction == "replicas":  # an all-reduce of one shard
            return 2 * others / self.peers * columns * self.info.dtype.itemsize
        return others * columns * self.info.dtype.itemsize * self.info.per_step

    @cached_property
    def inside_bytes(self) -> int:
        """Bytes that a rank sends to those of its own host: of gradients in a backward, to add up
        with them; of parameters in a step, to hand on what came from other hosts."""
        return int(sum(stage.bytes for stage in self.route if stage.level == "inside"))

    def wire_bytes(self, segment: Segment) -> float:
        """Bytes that a rank sends in a step for a segment, its share of the counts included; where
        ranks of a host work together, those to other hosts."""
        if not self.compressed:
            return self.dense_bytes(self.dense_columns(segment.params))
        i = self.segments.index(segment)
        return sum(stage.bytes_of(i) for stage in self.route if stage.level != "inside")

    def stored_bytes(self, segment: Segment) -> int:
        """Bytes that a rank stores for a segment between steps: residual, what it keeps as an
        owner, the forward's message, the copy."""
        i = self.segments.index(segment)
        found = [stage.messages for stage in self.route if stage.messages is not None]
        stored = sum(messages.stored_bytes(messages.segments[i]) for messages in found)
        if self.reuses_forward_message:
            stored += 4 * int(self.messages.words_of(segment)) * self.messages.read
        if self.keeps_copy:
            stored += self.peers * segment.columns * self.info.dtype.itemsize
        return stored

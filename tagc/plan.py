"""What a plan is: segments of every unit, and what each of them costs on the wire.

FSDP's reduce-scatter buffer is ``[W, S]``, and a parameter occupies the same columns in each row;
so it does in the all-gather's buffer. Adjacent parameters that share rule and role form a
*segment*, which is compressed as one. In FSDP1's buffer, which is cut into rows regardless of
parameters (see :mod:`tagc.pieces`), all parameters that share a rule form one. :mod:`tagc.planning`
makes a plan from a policy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from tagc.codec_plans import (
    CodecPlan,
    DensePlan,
    MatrixPlan,
    PackedPlan,
    QuantizedPlan,
    SketchPlan,
)
from tagc.ops import COUNTS
from tagc.pieces import FlatBuffer, filled
from tagc.plan_table import Row, as_text
from tagc.policy import ParamInfo, Policy

Direction = Literal["gradients", "parameters", "replicas"]


@dataclass(frozen=True, kw_only=True)
class UnitParam:
    """A parameter as FSDP shards it.

    Attributes:
        columns: elements in every shard, padding included; FSDP1: in the shard that has most.
        dim: FSDP2: dimension of ``shape`` that is sharded.
        start: FSDP1 only: its first element in the flat buffer.
        local: FSDP2: shape of every shard, padding included. (With tensor parallelism ``shape``
            does not say.)
    """

    name: str
    shape: tuple[int, ...]
    columns: int
    dim: int = 0
    start: int | None = None
    local: tuple[int, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class UnitInfo:
    """One collective of one FSDP unit.

    Attributes:
        params: in the order of FSDP's buffer.
        world_size: ranks that take part.
        dtype: of the buffer, which is ``[world_size, sum of columns]``.
        per_step: how often it runs in a step: 2 for the all-gather of a unit that FSDP reshards
            after forward.
        flat: FSDP1's buffer, in which parameters have no columns of their own.
    """

    name: str
    params: tuple[UnitParam, ...]
    world_size: int
    dtype: torch.dtype
    per_step: int = 1
    flat: FlatBuffer | None = None


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
        return not getattr(self.codec, "native", False)


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The segments of one unit in one direction, in column order, without gaps."""

    info: UnitInfo
    segments: tuple[Segment, ...]
    direction: Direction = "gradients"

    @property
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

    @property
    def destinations(self) -> int:
        """Messages that a rank makes: one to every owner, or one for all."""
        return 1 if self.for_all else self.info.world_size

    @property
    def compressed(self) -> tuple[Segment, ...]:
        """The segments that do not travel as they are."""
        return tuple(s for s in self.segments if s.compressed)

    @property
    def dense(self) -> tuple[Segment, ...]:
        """The segments that do."""
        return tuple(s for s in self.segments if not s.compressed)

    def of(self, *kinds: type[CodecPlan]) -> tuple[Segment, ...]:
        """The segments with such codecs."""
        return tuple(s for s in self.segments if isinstance(s.codec, kinds))

    @property
    def sketched(self) -> tuple[Segment, ...]:
        """The segments that travel as sketches."""
        return self.of(SketchPlan)

    @property
    def warmup_steps(self) -> int:
        """Reductions of the whole unit that go dense first: the most that any segment asks for."""
        return max((s.codec.warmup_steps for s in self.segments), default=0)

    @property
    def words(self) -> int:
        """int32 words of the unit's message to one destination."""
        return sum(s.codec.words for s in self.segments)

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
            codec = segment.codec
            for row, columns in enumerate(filled(self.info, segment.params)):
                used = codec.words if columns else 0
                if isinstance(codec, DensePlan):
                    used = replace(codec, numel=columns).words
                if getattr(codec, "shared", False):
                    used = codec.words  # what a rank chose for its own shard goes to all
                if used:
                    spans[row] = (min(spans[row][0], at), at + used)
            at += codec.words
        return tuple(slice(min(start, stop), stop) for start, stop in spans)

    @property
    def message(self) -> tuple[Segment, ...]:
        """The segments in the order in which their words follow each other in a message."""
        kinds = (SketchPlan, PackedPlan, QuantizedPlan, MatrixPlan, DensePlan)
        return tuple(segment for kind in kinds for segment in self.of(kind))

    def sent_words(self, segment: Segment) -> float:
        """Words of a segment in a message; in a flat buffer, on average over all owners."""
        if self.sent is None:
            return segment.codec.words
        before = self.message[: self.message.index(segment)]
        start = sum(s.codec.words for s in before)
        stop = start + segment.codec.words
        parts = (min(stop, span.stop) - max(start, span.start) for span in self.sent)
        return sum(max(0, words) for words in parts) / self.info.world_size

    @property
    def kept(self) -> bool:
        """Whether the message of the forward's all-gather serves the backward's, too."""
        plans = (s.codec for s in self.of(QuantizedPlan))
        return self.info.per_step > 1 and any(
            isinstance(plan, QuantizedPlan) and plan.keep_for_backward for plan in plans
        )

    def dense_bytes(self, columns: float) -> float:
        """Bytes that a rank sends in a step for so many columns uncompressed."""
        others = self.info.world_size - 1
        if self.direction == "replicas":  # an all-reduce of one shard
            return 2 * others / self.info.world_size * columns * self.info.dtype.itemsize
        return others * columns * self.info.dtype.itemsize * self.info.per_step

    def wire_bytes(self, segment: Segment) -> float:
        """Bytes that a rank sends in a step for a segment, its share of the counts included."""
        if not self.compressed:
            return self.dense_bytes(self.dense_columns(segment.params))
        W = self.info.world_size
        words = (W - 1) * self.sent_words(segment) * (1 if self.kept else self.info.per_step)
        if isinstance(segment.codec, SketchPlan):
            reduced = 2 * (W - 1) / W
            summed = reduced if self.for_all else W - 1
            words += summed * segment.codec.cells + reduced * self.destinations * COUNTS
        return 4 * words

    def stored_bytes(self, segment: Segment) -> int:
        """Bytes that a rank stores for a segment between steps: residual, what it keeps as an
        owner, kept message."""
        feedback = segment.codec.feedback
        residual = feedback.element_bytes * segment.columns if feedback else 0
        average = 4 * segment.columns if feedback and feedback.hands_out else 0
        message = 4 * segment.codec.words * self.info.world_size if self.kept else 0
        return round(self.destinations * residual) + average + message


@dataclass(frozen=True)
class Plan:
    """What ``tagc.wrap`` does to every parameter. ``str(plan)`` is a table.

    Attributes:
        units: gradients in the reduce-scatter.
        parameters: parameters in the all-gather; empty where the policy does not mention them.
        replicas: gradients in the all-reduce across replicas; likewise.
        notes: what ``codec: auto`` was decided by, and how.
    """

    policy: Policy
    units: tuple[UnitPlan, ...]
    parameters: tuple[UnitPlan, ...] = ()
    replicas: tuple[UnitPlan, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def all_units(self) -> tuple[UnitPlan, ...]:
        """Every direction."""
        return self.units + self.parameters + self.replicas

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row a parameter and direction, in the order of FSDP's buffers."""
        return tuple(_row(u, s, p) for u in self.all_units for s in u.segments for p in s.params)

    @property
    def warmup_steps(self) -> int:
        """Reductions that go dense before any unit is compressed in full."""
        return max((unit.warmup_steps for unit in self.all_units), default=0)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that ranks must agree on to exchange messages."""
        content = [
            [u.direction, repr(u.info), *map(repr, u.segments)]  # frozen dataclasses to the leaves
            for u in self.all_units
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __str__(self) -> str:
        return as_text(self.policy.name, self.rows, self.warmup_steps, self.notes)


def _row(unit: UnitPlan, segment: Segment, param: UnitParam) -> Row:
    columns = unit.dense_columns([param])
    share = wire_share = columns / (unit.dense_columns(segment.params) or 1)
    if isinstance(segment.codec, MatrixPlan):
        # Every matrix has a message of its own, with scales.
        layout = segment.codec.layouts[segment.params.index(param)]
        wire_share = layout.words / segment.codec.words
    return Row(
        direction=unit.direction,
        unit=unit.info.name or "(root)",
        param=param.name,
        shape=param.shape,
        role=ParamInfo.of(param.name, param.shape).role,
        codec=segment.codec.name,
        density=segment.codec.density,
        dense_bytes=unit.dense_bytes(columns),
        wire_bytes=unit.wire_bytes(segment) * wire_share,
        stored_bytes=unit.stored_bytes(segment) * share,
    )

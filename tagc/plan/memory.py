"""Memory that a rank needs for a plan: between steps, in shared buffers, and temporarily."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tagc.plan.messages import MessagePlan, Segment
from tagc.plan.param_slices import is_whole
from tagc.plan.stages import StagePlan
from tagc.plan.table import format_bytes
from tagc.plan.unit_plan import UnitPlan

Buffer = tuple[str, torch.dtype, int]
"""Name, dtype and number of elements."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a rank needs in addition to FSDP's own.

    Attributes:
        stored: bytes kept between steps: residuals, owner states, kept messages and copies.
        buffers: bytes of scratch buffers, allocated in the first step and shared by all units;
            between sites allocated for each exchange.
        moment: the most temporary bytes: what operators and feedback allocate on a CPU for the
            segment that needs most. (The eager reference takes more. The scratch of the kernels
            for GPUs is not counted.)
        waiting: additional bytes while micro-batches wait inside hosts
            (``set_requires_all_reduce(False)``).
    """

    stored: int
    buffers: int
    moment: int
    waiting: int = 0

    @property
    def peak(self) -> int:
        """The total without :attr:`waiting`."""
        return self.stored + self.buffers + self.moment

    @property
    def note(self) -> str:
        """A sentence for users."""
        moment = f" and up to {format_bytes(self.moment)} temporarily" if self.moment else ""
        waiting = (
            f"; {format_bytes(self.waiting)} more while micro-batches wait inside hosts"
            if self.waiting
            else ""
        )
        return (
            f"memory of a rank: {format_bytes(self.stored)} stored, "
            f"{format_bytes(self.buffers)} in scratch buffers{moment}{waiting}"
        )


def memory_of(units: Sequence[UnitPlan], *, gloo: bool) -> Memory:
    """The memory of units in all directions.

    Args:
        gloo: whether the backend is gloo, where sums need additional buffers.
    """
    return Memory(
        stored=sum(unit.stored_bytes(s) for unit in units for s in unit.segments),
        buffers=buffer_bytes(units, gloo=gloo),
        moment=max(map(_moment, units), default=0),
        waiting=sum(map(_waiting, units)),
    )


def buffer_bytes(units: Sequence[UnitPlan], *, gloo: bool) -> int:
    """Bytes of the scratch buffers that these units share."""
    largest: dict[tuple[str, torch.dtype], int] = {}
    for unit in units:
        for name, dtype, numel in buffers_of(unit, gloo=gloo):
            largest[name, dtype] = max(largest.get((name, dtype), 0), numel)
    return sum(numel * dtype.itemsize for (_, dtype), numel in largest.items())


def buffers_of(unit: UnitPlan, *, gloo: bool) -> Iterator[Buffer]:
    """The buffers of one unit, including those of its warm-up, by their names in
    :class:`tagc.codecs.workspace.Workspace`."""
    info, dtype, columns = unit.info, unit.info.dtype, unit.buffer_columns
    if info.world_size == 1:
        return
    for stage in unit.route:
        if unit.direction == "parameters":
            if stage.messages is not None:
                yield from _of_parameters(unit)
            if stage.level == "across" and not unit.keeps_copy:
                if stage.messages is None:
                    yield "across_recv", dtype, stage.ranks * columns
                else:
                    yield "across_recv", torch.int32, stage.ranks * stage.messages.row_words
        elif stage.level == "inside" and stage.collective == "all-gather":
            yield "host_average", dtype, columns
        elif stage.level == "inside":
            yield "inside_sum", dtype, stage.rows * columns
            if stage.messages is not None:
                yield "inside_send", torch.int32, stage.messages.made * stage.messages.row_words
                yield "inside_received", torch.int32, stage.messages.read * stage.messages.row_words
            if gloo and (stage.messages is None or unit.warmup_steps):
                yield "inside_recv", dtype, stage.rows * stage.ranks * columns
        else:
            if gloo and stage.level == "across" and (stage.messages is None or unit.warmup_steps):
                yield "dense_recv", dtype, stage.ranks * columns
            if stage.messages is not None:
                yield from _of_messages(stage.messages, gloo=gloo)
    if unit.shots is not None:
        slices = unit.peers * unit.shots.reduce.columns
        yield "slices", dtype, slices
        yield "slices", torch.float32, slices
        yield "slice_sum", torch.float32, unit.shots.reduce.columns
    if unit.compressed and info.flat is not None and not is_whole(info, unit.segments[0].params):
        yield "flat_grad", dtype, info.world_size * unit.columns
        yield "flat_shard", dtype, unit.columns


def _of_messages(messages: MessagePlan, *, gloo: bool) -> Iterator[Buffer]:
    yield "message_send", torch.int32, messages.made * messages.row_words
    yield "message_recv", torch.int32, messages.read * messages.row_words
    if messages.cells:
        yield "cells_send", torch.int32, messages.made * messages.cells
        for segment in messages.segments:
            if segment.codec.table_cells:
                cells = messages.made * segment.codec.table_cells
                yield "cells_of_groups", torch.int32, cells
        if not messages.for_all:
            yield "cells_sum", torch.int32, messages.cells
            if gloo:
                yield "cells_recv", torch.int32, messages.made * messages.cells


def _of_parameters(unit: UnitPlan) -> Iterator[Buffer]:
    messages = unit.messages
    yield "parameters_send", torch.int32, messages.row_words
    if not unit.reuses_forward_message:
        yield "parameters_recv", torch.int32, messages.read * messages.row_words
    if unit.keeps_copy:
        yield "changes", torch.float32, unit.columns


def _waiting(unit: UnitPlan) -> int:
    """Bytes of the waiting sum of a host's ranks, in float32."""
    if unit.all_reduced:
        return 0
    inside = (stage for stage in unit.route if stage.level == "inside")
    return sum(4 * s.rows * s.columns for s in inside if unit.direction == "gradients")


def _moment(unit: UnitPlan) -> int:
    """The most temporary bytes of any segment; segments run one after another."""
    if unit.info.world_size == 1:
        return 0
    found = (
        _moment_of(unit, stage, stage.messages, segment)
        for stage in unit.route
        if stage.messages is not None
        for segment in stage.messages.segments
    )
    return max(found, default=0)


def _moment_of(unit: UnitPlan, stage: StagePlan, messages: MessagePlan, segment: Segment) -> int:
    codec, feedback, dtype = segment.codec, segment.codec.feedback, unit.info.dtype
    half = dtype == torch.float16
    # The CPU's operators encode float16 from a copy in float32.
    found = 4 * messages.made * segment.columns if half and segment.compressed else 0
    if stage.level == "inside" and unit.direction == "gradients":
        return found + codec.sums_bytes(stage.rows, stage.ranks)
    found += codec.scratch_bytes(messages.made, messages.read)
    adds_up = messages.rows == 1  # otherwise each message fills a row of its own
    if adds_up:
        found += codec.widened_bytes(messages.read)
    if feedback is not None:
        found += feedback.scratch_bytes(segment.columns, dtype)
    if half and adds_up and codec.compressed and (feedback is None or not feedback.owner_state):
        # The sum in float32, two masks of its finite values, one of the others, and a result.
        found += 17 * segment.columns
    return found

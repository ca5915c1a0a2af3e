"""Memory that a rank needs for a plan: for good, and in buffers that all units share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tagc.codecs.delta import AT_A_TIME
from tagc.plan.param_slices import is_whole
from tagc.plan.table import format_bytes
from tagc.plan.unit_plan import Segment, UnitPlan

Buffer = tuple[str, torch.dtype, int]
"""Name, dtype and elements."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank, beside what FSDP itself needs.

    Attributes:
        stored: between steps: residuals, what owners keep, kept messages and copies.
        buffers: allocated in the first step, and kept for all units.
        moment: at most, for a moment, in the largest segment: what operators and feedback take
            beside their arguments. (The scratch of the kernels for GPUs is not counted.)
        waiting: more, while micro-batches wait inside hosts (``set_requires_all_reduce(False)``).
    """

    stored: int
    buffers: int
    moment: int
    waiting: int = 0

    @property
    def peak(self) -> int:
        """All of it, without micro-batches."""
        return self.stored + self.buffers + self.moment

    @property
    def note(self) -> str:
        """For people."""
        moment = f" and up to {format_bytes(self.moment)} for a moment" if self.moment else ""
        waiting = (
            f"; {format_bytes(self.waiting)} more while micro-batches wait inside hosts"
            if self.waiting
            else ""
        )
        return (
            f"memory of a rank: {format_bytes(self.stored)} stored, "
            f"{format_bytes(self.buffers)} in buffers that all units share{moment}{waiting}"
        )


def memory_of(units: Sequence[UnitPlan], *, gloo: bool, reference: bool = False) -> Memory:
    """What units need, in all directions.

    Args:
        gloo: whether the backend is gloo on a CPU, which adds up in buffers of its own.
        reference: whether operators are the eager reference.
    """
    largest: dict[tuple[str, torch.dtype], int] = {}
    for unit in units:
        for name, dtype, numel in buffers_of(unit, gloo=gloo):
            largest[name, dtype] = max(largest.get((name, dtype), 0), numel)
    return Memory(
        stored=sum(unit.stored_bytes(s) for unit in units for s in unit.segments),
        buffers=sum(numel * dtype.itemsize for (_, dtype), numel in largest.items()),
        moment=max((_moment(unit, reference=reference) for unit in units), default=0),
        waiting=sum(map(_waiting, units)),
    )


def buffers_of(unit: UnitPlan, *, gloo: bool) -> Iterator[Buffer]:
    """The buffers of one unit after its warm-up, by the names that
    :class:`tagc.codecs.workspace.Workspace` has them under; those of the warm-up, if it has one."""
    if unit.info.world_size == 1:
        return
    if unit.direction == "parameters":
        if unit.compressed:
            yield from _of_parameters(unit)
        return
    H, S, R = unit.peers, unit.buffer_columns, unit.info.ranks_per_host
    dtype = unit.info.dtype
    if R > 1 and unit.direction == "gradients":
        yield "inside_sum", dtype, H * S
        if unit.inside is not None:
            yield "inside_send", torch.int32, H * R * unit.inside.row_words
            yield "inside_received", torch.int32, H * R * unit.inside.row_words
        if gloo and (unit.inside is None or unit.warmup_steps):
            yield "inside_recv", dtype, H * R * S
        if not unit.compressed or unit.warmup_steps:
            yield "dense_recv", dtype, H * S
    if not unit.compressed:
        return
    if unit.shots is not None:
        for shot in unit.stages:
            yield "message_send", torch.int32, shot.destinations * shot.row_words
            yield "message_recv", torch.int32, shot.sources * shot.row_words
        slices = unit.info.world_size * unit.shots.reduce.columns
        yield "slices", dtype, slices
        yield "slices", torch.float32, slices
        yield "slice_sum", torch.float32, unit.shots.reduce.columns
        return
    yield "message_send", torch.int32, unit.destinations * unit.row_words
    yield "message_recv", torch.int32, unit.sources * unit.row_words
    cells = sum(s.codec.cells for s in unit.segments)
    if cells:
        yield "cells_send", torch.int32, unit.destinations * cells
    if cells and not unit.for_all:
        yield "cells_sum", torch.int32, cells
        yield "cells_recv", torch.int32, unit.destinations * cells
    if unit.info.flat is not None and not is_whole(unit.info, unit.segments[0].params):
        yield "flat_grad", dtype, unit.info.world_size * unit.columns
        yield "flat_shard", dtype, unit.columns


def _of_parameters(unit: UnitPlan) -> Iterator[Buffer]:
    yield "parameters_send", torch.int32, unit.row_words
    if not unit.reuses_forward_message:
        yield "parameters_recv", torch.int32, unit.sources * unit.row_words
    if unit.keeps_copy:
        rows = min(unit.peers, max(1, AT_A_TIME // max(1, unit.columns)))
        yield "changes", torch.float32, rows * unit.columns


def _waiting(unit: UnitPlan) -> int:
    """The sum of a host's ranks, in float32."""
    on_hosts = unit.direction == "gradients" and unit.info.ranks_per_host > 1
    return 4 * unit.peers * unit.buffer_columns if on_hosts else 0


def _moment(unit: UnitPlan, *, reference: bool) -> int:
    """At most, of the segments, one after the other."""
    if not unit.compressed or unit.info.world_size == 1:
        return 0
    found = max(
        _moment_of(part, segment, reference=reference)
        for part in unit.stages
        for segment in part.segments
    )
    if unit.inside is None:
        return found
    inside = [
        s.codec.sums_bytes(unit.peers, unit.info.ranks_per_host, reference=reference)
        + _widened(unit, s, unit.info.world_size, reference=reference)
        for s in unit.inside.segments
    ]
    return max(found, *inside)


def _widened(unit: UnitPlan, segment: Segment, rows: int, *, reference: bool) -> int:
    """What the CPU's operators make of float16 before they encode it."""
    widens = unit.info.dtype == torch.float16 and segment.compressed and not reference
    return 4 * rows * segment.columns if widens else 0


def _moment_of(unit: UnitPlan, segment: Segment, *, reference: bool) -> int:
    codec, feedback, D = segment.codec, segment.codec.feedback, unit.destinations
    found = codec.scratch_bytes(D, unit.sources, reference=reference)
    if unit.direction != "parameters":  # of which nothing is added up
        found += codec.widened_bytes(unit.sources)
    found += _widened(unit, segment, D, reference=reference)
    if feedback is not None:
        if feedback.dtype == torch.int8 and reference:
            # It is stored as the codec `quantized` would send it.
            found = max(found, 41 * D * segment.columns)
        found += feedback.scratch_bytes(D, segment.columns, unit.info.dtype, reference=reference)
    owns = feedback is not None and feedback.owner_state is not None
    ranged = unit.info.dtype == torch.float16 and unit.direction != "parameters"
    if ranged and codec.compressed and not owns:
        found += 17 * segment.columns  # to keep a sum inside the range
    return found

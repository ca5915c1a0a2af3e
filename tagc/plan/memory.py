"""Memory that a rank needs for a plan: between steps, in shared buffers, and temporarily."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tagc.plan.messages import MessagePlan, Segment
from tagc.plan.programs import programs_of
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
    if unit.info.world_size == 1:
        return
    for program in programs_of(unit):
        places = [p for p in program.places if p.kind == "scratch"]
        if gloo:
            places += filter(None, (send.scratch for send in program.sends))
        for place in places:
            yield place.name, place.dtype, math.prod(place.shape)


def _waiting(unit: UnitPlan) -> int:
    """Bytes of the waiting sum of a host's ranks, in float32."""
    adds_up = unit.direction == "gradients" and unit.info.ranks_per_host > 1
    return 4 * unit.peers * unit.buffer_columns if adds_up and not unit.all_reduced else 0


def _moment(unit: UnitPlan) -> int:
    """The most temporary bytes of any segment; segments run one after another."""
    if unit.info.world_size == 1:
        return 0
    found = (
        _moment_of(unit, messages, segment)
        for messages in unit.flights.values()
        for segment in messages.segments
    )
    return max(found, default=0)


def _moment_of(unit: UnitPlan, messages: MessagePlan, segment: Segment) -> int:
    codec, feedback, dtype = segment.codec, segment.codec.feedback, unit.info.dtype
    half = dtype == torch.float16
    # The CPU's operators encode float16 from a copy in float32.
    encoding = 4 * messages.made * segment.columns if half and segment.compressed else 0
    if messages is unit.inside:
        return max(encoding, codec.sums_bytes(messages.rows, unit.info.ranks_per_host))
    adds_up = messages.rows == 1  # otherwise each message fills a row of its own
    decoding = codec.widened_bytes(messages.read) if adds_up else 0
    after = 0 if feedback is None else feedback.scratch_bytes(segment.columns, dtype)
    if half and adds_up and codec.compressed:
        # Two masks of the finite values of a sum in float32, one of the others, and a result.
        after = max(after, 13 * segment.columns)
    scratch = codec.scratch_bytes(messages.made, messages.read)
    return scratch + max(encoding, decoding, after)

"""The programs of a unit, the bytes that they send, and the memory that they need between steps and
in shared buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from tagc.codecs.sketch import COUNTING
from tagc.ops import COUNTS
from tagc.ops.program import Program, Send
from tagc.plan.gathers import Gathers
from tagc.plan.reductions import Reductions, Variant
from tagc.plan.table import format_bytes
from tagc.plan.unit_plan import UnitPlan


def programs_of(unit: UnitPlan, *, stamped: bool = False) -> Iterator[Program]:
    """The programs that a unit runs in training, but those for parts of it, in the order of first
    use.

    Args:
        stamped: see :attr:`Variant.stamped`.
    """
    if unit.direction != "parameters":
        yield from Reductions(unit).in_order(stamped=stamped)
    elif unit.compressed or unit.info.ranks_per_host > 1:  # else the backend gathers itself
        yield from (program for program, _ in programs_in_step(unit))


def programs_in_step(unit: UnitPlan, micro_batches: int = 1) -> Iterator[tuple[Program, int]]:
    """The programs of a step of ``micro_batches`` backwards, long after warm-up, and how often each
    runs; with what the backend does itself for a unit that is not compressed.

    Only the last backward sums over replicas and between hosts (``no_sync``,
    ``set_requires_all_reduce(False)``), and changes of parameters are sent once.
    """
    if unit.direction == "parameters":
        gathers, times = Gathers(unit), micro_batches * unit.info.per_step
        if not unit.compressed:
            yield gathers.uncompressed, times
        elif unit.keeps_copy:
            saves = gathers.sizes is None or gathers.saves
            yield gathers.whole, int(not saves)
            if gathers.sizes is not None:
                yield gathers.sizes, 1
                yield gathers.largest.changes, 0
            yield gathers.changes, int(saves)
            yield gathers.read, times - 1
        elif unit.reuses_forward_message:
            yield gathers.message, 0
            yield gathers.kept_message, micro_batches
            yield gathers.again, times - micro_batches
        elif gathers.sizes is not None:
            yield gathers.sizes, times
            yield gathers.largest.message, 0
            yield gathers.message, times if gathers.saves else 0
            yield gathers.uncompressed, 0 if gathers.saves else times
        else:
            yield gathers.message, times
        return
    reductions, whole = Reductions(unit), Variant(messages=bool(unit.compressed))
    on_hosts = unit.info.ranks_per_host > 1
    yield reductions.lower(whole), 1 if unit.all_reduced or on_hosts else micro_batches
    if on_hosts and not unit.all_reduced:
        yield reductions.lower(whole._replace(levels="inside")), micro_batches - 1


@lru_cache(maxsize=1 << 12)  # making programs takes most of the time of advice
def sends_in_step(unit: UnitPlan, micro_batches: int = 1) -> tuple[tuple[Send, int], ...]:
    """The collectives with other ranks in such a step, and how often each starts."""
    return tuple(
        (send, times)
        for program, times in programs_in_step(unit, micro_batches)
        for send in program.sends
        if times and send.ranks > 1
    )


def bytes_in_step(unit: UnitPlan, micro_batches: int = 1) -> list[float]:
    """Bytes that a rank sends to other hosts in such a step, for each segment."""
    sends = [(s, n) for s, n in sends_in_step(unit, micro_batches) if s.level != "inside"]
    return [
        sum(times * send.bytes_for(_elements(unit, send, i)) for send, times in sends)
        for i in range(len(unit.segments))
    ]


def bytes_inside(unit: UnitPlan) -> int:
    """Bytes that a rank sends inside its host: of gradients in a backward, of parameters in a
    step."""
    sends = [(s, n) for s, n in sends_in_step(unit) if s.level == "inside"]
    return int(sum(times * send.bytes_for(send.inp.numel) for send, times in sends))


def _elements(unit: UnitPlan, send: Send, i: int) -> float:
    """Elements of segment ``i`` in a collective."""
    if send.inp.dtype.is_floating_point:
        return send.inp.view_shape[0] * unit.dense_columns(unit.segments[i].params)
    messages = unit.flights.get(send.flight, unit.messages)
    segment = messages.segments[i]
    cells = segment.codec.cells
    beside = {"cells": cells, COUNTING: COUNTS if cells else 0}
    return messages.made * beside.get(send.flight, messages.words_of(segment))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a rank needs in addition to FSDP's own.

    Attributes:
        stored: bytes kept between steps: residuals, owner states, kept messages and copies.
        buffers: bytes of scratch buffers, allocated in the first step and shared by all units;
            between sites allocated for each exchange. (Temporary tensors of operators
            are not counted.)
        waiting: additional bytes while micro-batches wait inside hosts
            (``set_requires_all_reduce(False)``).
    """

    stored: int
    buffers: int
    waiting: int = 0

    @property
    def peak(self) -> int:
        """The total without :attr:`waiting`."""
        return self.stored + self.buffers

    @property
    def note(self) -> str:
        text = (
            f"memory of a rank: {format_bytes(self.stored)} stored, "
            f"{format_bytes(self.buffers)} in scratch buffers"
        )
        if self.waiting:
            text += f"; {format_bytes(self.waiting)} more while micro-batches wait inside hosts"
        return text


def memory_of(units: Sequence[UnitPlan], *, gloo: bool) -> Memory:
    """The memory of units in all directions. On gloo, sums need additional buffers."""
    waiting = (
        unit.peers * unit.buffer_columns
        for unit in units
        if unit.direction == "gradients" and unit.info.ranks_per_host > 1 and not unit.all_reduced
    )
    return Memory(
        stored=sum(unit.stored_bytes(s) for unit in units for s in unit.segments),
        buffers=buffer_bytes(units, gloo=gloo),
        waiting=4 * sum(waiting),  # in float32
    )


def buffer_bytes(units: Sequence[UnitPlan], *, gloo: bool) -> int:
    """Bytes of the scratch buffers that these units share."""
    largest = buffers_of(units, gloo=gloo)
    return sum(numel * dtype.itemsize for (_, dtype), numel in largest.items())


def buffers_of(units: Sequence[UnitPlan], *, gloo: bool) -> dict[tuple[str, torch.dtype], int]:
    """Elements of the scratch buffers that units share, by name and dtype, including those of the
    warm-up."""
    largest: dict[tuple[str, torch.dtype], int] = {}
    for program in (p for u in units if u.info.world_size > 1 for p in programs_of(u)):
        places = [p for p in program.places if p.kind == "scratch"]
        if gloo:
            places += filter(None, (send.scratch for send in program.sends))
        for place in places:
            key = place.name, place.dtype
            largest[key] = max(largest.get(key, 0), math.prod(place.shape))
    return largest

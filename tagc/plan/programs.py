"""The programs of a unit, and the bytes that they send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from tagc.codecs.sketch import COUNTING
from tagc.ops.program import Program, Send
from tagc.plan.gathers import Gathers
from tagc.plan.messages import Segment
from tagc.plan.reductions import Reductions, Variant
from tagc.plan.unit_plan import UnitPlan


def programs_of(unit: UnitPlan, *, stamped: bool = False) -> Iterator[Program]:
    """The programs that a unit runs in training, but those for parts of it, in the order of first
    use.

    Args:
        stamped: see :attr:`Variant.stamped`.
    """
    if unit.direction != "parameters":
        yield from Reductions(unit).in_order(stamped=stamped)
        return
    gathers = Gathers(unit)
    if not unit.compressed:
        if unit.info.ranks_per_host > 1:
            yield gathers.uncompressed
    elif unit.keeps_copy:
        yield from (gathers.whole, gathers.changes, gathers.read)
    elif unit.reuses_forward_message:
        yield from (gathers.message, gathers.kept_message, gathers.again)
    else:
        yield gathers.message


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
            yield gathers.changes, 1
            yield gathers.read, times - 1
        elif unit.reuses_forward_message:
            yield gathers.kept_message, micro_batches
            yield gathers.again, times - micro_batches
        else:
            yield gathers.message, times
        return
    reductions, whole = Reductions(unit), Variant(messages=bool(unit.compressed))
    if unit.all_reduced:
        yield reductions.lower(whole), 1
    elif unit.info.ranks_per_host == 1:
        yield reductions.lower(whole), micro_batches
    else:
        yield reductions.lower(whole), 1
        yield reductions.lower(replace(whole, levels="inside")), micro_batches - 1


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
    """Bytes that a rank sends for each segment of a unit in such a step; with two levels, only
    those to other hosts."""
    sends = [(s, n) for s, n in sends_in_step(unit, micro_batches) if s.level != "inside"]
    return [
        sum(times * send.bytes_for(_elements(unit, send, i)) for send, times in sends)
        for i in range(len(unit.segments))
    ]


def bytes_inside(unit: UnitPlan) -> int:
    """Bytes that a rank sends to ranks of its own host: of gradients in a backward, to add them up;
    of parameters in a step, to forward what came from other hosts."""
    sends = [(s, n) for s, n in sends_in_step(unit) if s.level == "inside"]
    return int(sum(times * send.bytes_for(send.inp.numel) for send, times in sends))


def _elements(unit: UnitPlan, send: Send, i: int) -> float:
    """How many elements that a rank sends are about segment ``i``."""
    if send.inp.dtype.is_floating_point:
        return send.inp.view_shape[0] * unit.dense_columns(unit.segments[i].params)
    messages = unit.flights.get(send.flight, unit.messages)
    segment: Segment = messages.segments[i]
    beside = {"cells": segment.codec.cells, COUNTING: segment.codec.counts}
    return messages.made * beside.get(send.flight, messages.words_of(segment))

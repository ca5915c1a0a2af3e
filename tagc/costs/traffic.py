"""Bytes that a rank must send, predicted from a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tagc.plan import UnitPlan


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a rank must send for one unit in one step.

    Attributes:
        collectives: how many are started.
        reduced: in the backend's own reduce-scatter.
        gathered: in the backend's own all-gather.
        ring: in all-reduces, and in messages that are the same for all.
        all_to_all: in messages to each rank, or cells for it.
        across: between hosts, where ranks of a host add up first: each sends to those with its
            place on the others.
        inside: to ranks of the same host.
    """

    collectives: int = 0
    reduced: float = 0.0
    gathered: float = 0.0
    ring: float = 0.0
    all_to_all: float = 0.0
    across: float = 0.0
    inside: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Traffic(**sums)

    def times(self, repeats: int) -> Traffic:
        """The same so often."""
        return Traffic(**{f.name: repeats * getattr(self, f.name) for f in fields(self)})


def traffic(unit: UnitPlan, micro_batches: int = 1) -> Traffic:
    """What a rank sends of a unit in a step of so many backwards: gradients leave a host in the
    last one only, if those of a host add up, and those of replicas likewise
    (``set_requires_all_reduce(False)``); parameters are sent in each, but for changes."""
    once = _traffic(unit)
    if not _once_a_step(unit):
        return once.times(micro_batches)
    more = Traffic(collectives=_inside_collectives(unit), inside=once.inside)
    return once + more.times(micro_batches - 1)


def codings(unit: UnitPlan, micro_batches: int) -> int:
    """How often a unit's messages are encoded in a step of so many backwards, relative to one."""
    return 1 if _once_a_step(unit) else micro_batches


def _once_a_step(unit: UnitPlan) -> bool:
    if unit.direction == "parameters":
        return unit.keeps_copy
    return unit.direction == "replicas" or unit.info.ranks_per_host > 1


def _inside_collectives(unit: UnitPlan) -> int:
    """Collectives among the ranks of a host, in one backward with its forward."""
    if unit.info.ranks_per_host == 1:
        return 0
    hands_on_messages = unit.compressed and not unit.keeps_copy
    return unit.exchanges if hands_on_messages else unit.info.per_step


def _traffic(unit: UnitPlan) -> Traffic:
    W, repeats = unit.info.world_size, unit.info.per_step
    if W == 1:
        return Traffic()
    if not unit.compressed:
        dense = unit.dense_bytes(unit.buffer_columns)
        if unit.info.ranks_per_host > 1:
            collectives = repeats + _inside_collectives(unit)
            return Traffic(collectives=collectives, across=dense, inside=unit.inside_bytes)
        if unit.direction == "gradients":
            return Traffic(collectives=1, reduced=dense)
        if unit.direction == "parameters":
            return Traffic(collectives=repeats, gathered=dense)
        return Traffic(collectives=repeats, ring=dense)
    if unit.shots is not None:
        return sum(map(_traffic, unit.stages), Traffic())
    W, exchanges = unit.peers, unit.exchanges
    messages = 4.0 * (W - 1) * sum(map(unit.sent_words, unit.segments)) * exchanges
    summed = [s.codec for s in unit.segments if s.codec.cells]
    cells = 4.0 * sum(codec.cells for codec in summed)
    counts = 4.0 * 2 * (W - 1) / W * unit.destinations * sum(codec.counts for codec in summed)
    collectives = exchanges + bool(summed) + any(codec.counts for codec in summed)
    if unit.info.ranks_per_host > 1:
        sent = messages + (W - 1) * cells + counts
        collectives += _inside_collectives(unit)
        return Traffic(collectives=collectives, across=sent, inside=unit.inside_bytes)
    if unit.direction == "gradients":
        # Cells go by all-to-all on gloo; NCCL's ring is no worse.
        return Traffic(collectives=collectives, ring=counts, all_to_all=messages + (W - 1) * cells)
    return Traffic(collectives=collectives, ring=messages + 2 * (W - 1) / W * cells + counts)

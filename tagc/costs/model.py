"""Predicts the seconds of a step, on the link and in codecs, from a plan.

Three inputs are measured or assumed; everything else follows from the plan:

* the compute seconds of a step, without any communication;
* a :class:`Link`: bandwidth and latency;
* the :class:`Speed` of every codec, or the device's memory bandwidth.

A unit's collectives take ``latency * collectives + bytes / bandwidth``, and codecs take seconds per
element. A step takes ``compute + codec + link - hidden``, where ``hidden = min(overlap * link,
compute)``: compute hides at most the share ``overlap`` of the communication, and at most its own
duration. Codecs are not hidden, because they use the cores or the memory that compute uses. The
step is one long after warm-up.

Bytes are those that a rank sends: ``(W - 1) / W`` of the buffer for a reduce-scatter or an
all-to-all, ``W - 1`` messages for an all-gather, and ``2 (W - 1) / W`` of the buffer for an
all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tagc.costs.codec_time import CodecTime, codec_seconds
from tagc.costs.link import Link
from tagc.costs.traffic import Traffic, traffic
from tagc.plan import Direction, Plan, UnitInfo, UnitPlan, native_units


def unit_seconds(unit: UnitPlan, link: Link, time: CodecTime, micro_batches: int = 1) -> float:
    """Seconds per step of one unit in one direction, on the link and in codecs."""
    sent = link.seconds(traffic(unit, micro_batches), unit.info.world_size)
    return sent + codec_seconds(unit, time, micro_batches)


@dataclass(frozen=True)
class Workload:
    """Work of a rank in a step, independent of the link.

    Attributes:
        traffic: the traffic of all units, by direction and number of ranks.
        codec: seconds in codecs.
    """

    traffic: Mapping[tuple[Direction, int], Traffic]
    codec: float


def workload(
    plan: Plan,
    time: CodecTime,
    *,
    gathers: Sequence[UnitInfo] = (),
    micro_batches: int = 1,
) -> Workload:
    """Add up the units of a plan.

    Args:
        time: codec time; see :func:`measured_time`, :func:`memory_time`, :func:`no_time`.
        gathers: the all-gathers of the model. They count even if the plan has no rules for them.
        micro_batches: backwards per optimizer step.
    """
    units = [*plan.all_units]
    if not plan.parameters:
        units += native_units(gathers, "parameters")
    sums: dict[tuple[Direction, int], Traffic] = {}
    for unit in units:
        key = (unit.direction, unit.info.world_size)
        sums[key] = sums.get(key, Traffic()) + traffic(unit, micro_batches)
    codec = sum(codec_seconds(unit, time, micro_batches) for unit in units)
    return Workload(sums, codec)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A predicted step.

    Attributes:
        compute: seconds without communication.
        codec: seconds in codecs.
        link: seconds in collectives.
        overlap: share of ``link`` that compute can hide, in [0, 1].
        wire_bytes: bytes that a host sends.
    """

    compute: float
    codec: float
    link: float
    overlap: float
    wire_bytes: float

    @property
    def hidden(self) -> float:
        """Seconds of communication that overlap with compute."""
        return min(self.overlap * self.link, self.compute)

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.codec + self.link - self.hidden


def step_cost(
    work: Workload,
    links: Link | Mapping[Direction, Link],
    *,
    compute: float = 0.0,
    overlap: float = 0.0,
) -> StepCost:
    """Predict a step.

    Args:
        links: the link of all traffic, or one for each direction.
        compute: seconds of a step without communication.
        overlap: share of the communication that compute can hide; 0 for gloo on CPUs, because
            ranks wait for every collective there.
    """
    seconds = carried = 0.0
    for (direction, world_size), sent in work.traffic.items():
        link = links if isinstance(links, Link) else links[direction]
        seconds += link.seconds(sent, world_size)
        carried += link.carried(sent, world_size)
    return StepCost(
        compute=compute, codec=work.codec, link=seconds, overlap=overlap, wire_bytes=carried
    )

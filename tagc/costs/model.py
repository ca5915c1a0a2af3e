"""What a step costs: seconds on the link and in codecs, predicted from a plan.

Three things are measured (or assumed), all else follows from the plan:

* the compute seconds of a step, without any communication;
* a :class:`Link`: bandwidth and latency;
* a :class:`Speed` of every codec, or the device's memory bandwidth.

One unit's collectives cost ``latency * collectives + bytes / bandwidth``, codecs cost seconds per
element, and a step is ``compute + codec + link - hidden``, of which ``hidden = min(overlap * link,
compute)``: compute hides at most the share ``overlap`` of the communication, and never more than it
lasts itself. Codecs are not hidden: they use the cores or the memory that compute uses. The
warm-up is left out; this is a step long after it.

Bytes are those that a rank sends: ``(W - 1) / W`` of the buffer for a reduce-scatter or an
all-to-all, ``W - 1`` messages for an all-gather, ``2 (W - 1) / W`` of it for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tagc.codecs.dense import DensePlan
from tagc.costs.codec_time import CodecTime, codec_seconds
from tagc.costs.link import Link
from tagc.costs.traffic import Traffic, traffic
from tagc.plan import Direction, Plan, Segment, UnitInfo, UnitPlan


def unit_seconds(unit: UnitPlan, link: Link, time: CodecTime, micro_batches: int = 1) -> float:
    """Seconds per step of one unit in one direction: on the link and in codecs."""
    sent = link.seconds(traffic(unit, micro_batches), unit.info.world_size)
    return sent + codec_seconds(unit, time, micro_batches)


@dataclass(frozen=True)
class Workload:
    """What a rank does in a step, whatever the link.

    Attributes:
        traffic: of all units, by direction and number of ranks.
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
        gathers: the all-gathers of the model, which also cost where the plan leaves them alone.
        micro_batches: backwards for each step of the optimizer.
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
        """Seconds of communication that pass while the device computes."""
        return min(self.overlap * self.link, self.compute)

    @property
    def seconds(self) -> float:
        """Of the whole step."""
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
        links: of all traffic, or of each direction.
        compute: seconds of a step without communication.
        overlap: share of the communication that compute can hide; 0 for gloo on CPUs, where
            ranks wait for every collective.
    """
    seconds = carried = 0.0
    for (direction, world_size), sent in work.traffic.items():
        link = links if isinstance(links, Link) else links[direction]
        seconds += link.seconds(sent, world_size)
        carried += link.carried(sent, world_size)
    return StepCost(
        compute=compute, codec=work.codec, link=seconds, overlap=overlap, wire_bytes=carried
    )


def native_units(infos: Iterable[UnitInfo], direction: Direction) -> list[UnitPlan]:
    """Units that travel as FSDP sends them."""
    units = []
    for info in infos:
        columns = sum(p.columns for p in info.params)
        segment = Segment(
            start=0,
            stop=columns,
            params=info.params,
            role="other",
            rule=None,
            codec=DensePlan(numel=columns, wire=info.dtype),
        )
        units.append(UnitPlan(info=info, segments=(segment,), direction=direction))
    return units

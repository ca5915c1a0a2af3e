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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tagc.codec_plans import CodecPlan, DensePlan, SketchPlan
from tagc.ops import COUNTS
from tagc.plan import Direction, Plan, Segment, UnitInfo, UnitPlan

# gloo's own reduce-scatter sends what an all-reduce would: twice what it must, at any size.
GLOO_REDUCE_SCATTER = 2.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """How fast ranks reach each other.

    Attributes:
        bandwidth: bytes/s that a host sends while all hosts do.
        latency: seconds per collective, on top of its bytes.
        reduce_scatter: seconds per byte of the backend's own reduce-scatter, relative to
            ``1 / bandwidth``; ``GLOO_REDUCE_SCATTER`` for gloo, which sends that many bytes.
        all_gather: likewise of its own all-gather, which on gloo often leaves one direction of a
            link idle.
        ranks_per_host: ranks that share the host's link. Rings (reduce-scatter, all-gather,
            all-reduce) cross it with one rank's bytes; in an all-to-all every rank crosses it.
    """

    bandwidth: float
    latency: float = 0.0
    reduce_scatter: float = 1.0
    all_gather: float = 1.0
    ranks_per_host: int = 1

    def seconds(self, traffic: Traffic, world_size: int) -> float:
        """Seconds of a unit's collectives, one after the other."""
        idle = (self.all_gather - 1) * traffic.gathered
        busy = self.carried(traffic, world_size)
        return traffic.collectives * self.latency + (busy + idle) / self.bandwidth

    def carried(self, traffic: Traffic, world_size: int) -> float:
        """Bytes that leave a host over this link."""
        W, R = world_size, self.ranks_per_host
        crossing = R * (W - R) / (W - 1) if W > R else 1.0
        rings = traffic.reduced * self.reduce_scatter + traffic.gathered + traffic.ring
        return rings + traffic.all_to_all * crossing


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a codec takes on one device.

    Attributes:
        encode: seconds per element that a rank encodes.
        decode: seconds per element that it decodes; of sketches, which are summed before they are
            decoded, per element of the sum.
    """

    encode: float
    decode: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a rank must send for one unit in one step.

    Attributes:
        collectives: how many are started.
        reduced: in the backend's own reduce-scatter.
        gathered: in the backend's own all-gather.
        ring: in all-reduces, and in messages that are the same for all.
        all_to_all: in messages to each rank, or cells for it.
    """

    collectives: int = 0
    reduced: float = 0.0
    gathered: float = 0.0
    ring: float = 0.0
    all_to_all: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            collectives=self.collectives + other.collectives,
            reduced=self.reduced + other.reduced,
            gathered=self.gathered + other.gathered,
            ring=self.ring + other.ring,
            all_to_all=self.all_to_all + other.all_to_all,
        )


def traffic(unit: UnitPlan) -> Traffic:
    """What a rank sends of a unit in a step."""
    W, repeats = unit.info.world_size, unit.info.per_step
    if W == 1:
        return Traffic()
    if not unit.compressed:
        dense = unit.dense_bytes(unit.buffer_columns)
        if unit.direction == "gradients":
            return Traffic(collectives=1, reduced=dense)
        if unit.direction == "parameters":
            return Traffic(collectives=repeats, gathered=dense)
        return Traffic(collectives=repeats, ring=dense)
    exchanges = 1 if unit.kept else repeats
    messages = 4.0 * (W - 1) * sum(map(unit.sent_words, unit.segments)) * exchanges
    sketches = [s.codec for s in unit.sketched if isinstance(s.codec, SketchPlan)]
    sums = len({codec.symbol.dtype for codec in sketches})
    cells = 4.0 * sum(codec.cells for codec in sketches)
    counts = 4.0 * 2 * (W - 1) / W * unit.destinations * COUNTS * len(sketches)
    collectives = exchanges + sums + bool(sketches)
    if unit.direction == "gradients":
        # Cells go by all-to-all on gloo; NCCL's ring is no worse.
        return Traffic(collectives=collectives, ring=counts, all_to_all=messages + (W - 1) * cells)
    return Traffic(collectives=collectives, ring=messages + 2 * (W - 1) / W * cells + counts)


CodecTime = Callable[[UnitPlan, Segment], float]
"""Seconds that a rank spends per step encoding and decoding a segment that rides in a message."""


def speed_key(codec: CodecPlan) -> str:
    """What a codec's speed depends on, sizes aside."""
    stored = codec.feedback
    return " ".join(
        [
            codec.name.removesuffix(" kept"),
            *([f"at {codec.density:g}"] if codec.density < 1 else []),
            *([f"with {str(stored.dtype).removeprefix('torch.')} feedback"] if stored else []),
        ]
    )


def measured_time(speeds: Mapping[str, Speed]) -> CodecTime:
    """Codec time by measured speeds, which are by :func:`speed_key`."""

    def seconds(unit: UnitPlan, segment: Segment) -> float:
        key = speed_key(segment.codec)
        if key not in speeds:
            raise ValueError(f"no speed was measured for {key!r}, only for {', '.join(speeds)}")
        encoded, decoded = _elements(unit, segment)
        return speeds[key].encode * encoded + speeds[key].decode * decoded

    return seconds


def memory_time(bandwidth: float) -> CodecTime:
    """The least codec time on a device whose memory moves ``bandwidth`` bytes/s: what encoding and
    decoding must read and write, once, and nothing else. Real kernels take longer."""

    def seconds(unit: UnitPlan, segment: Segment) -> float:
        codec, info = segment.codec, unit.info
        encoded, _ = _elements(unit, segment)
        stored = codec.feedback.element_bytes if codec.feedback else 0
        messages = encoded / max(1, segment.columns)
        encode = encoded * (info.dtype.itemsize + 2 * stored)
        encode += 4 * messages * (codec.words + codec.cells)
        copies = info.world_size if unit.direction == "parameters" else 1
        decode = 4 * (info.world_size * codec.words + codec.cells)
        decode += copies * segment.columns * info.dtype.itemsize
        return (encode + decode * info.per_step) / bandwidth

    return seconds


def no_time(unit: UnitPlan, segment: Segment) -> float:
    """Codec time left out."""
    return 0.0


def _elements(unit: UnitPlan, segment: Segment) -> tuple[int, int]:
    """Elements that a rank encodes and decodes in a step."""
    repeats = unit.info.per_step
    encoded = unit.destinations * segment.columns * (1 if unit.kept else repeats)
    messages = 1 if isinstance(segment.codec, SketchPlan) else unit.info.world_size
    return encoded, messages * segment.columns * repeats


def codec_seconds(unit: UnitPlan, time: CodecTime) -> float:
    """Seconds that a rank spends per step encoding and decoding a unit."""
    if not unit.compressed or unit.info.world_size == 1:
        return 0.0
    return sum(time(unit, segment) for segment in unit.segments if segment.columns)


def unit_seconds(unit: UnitPlan, link: Link, time: CodecTime) -> float:
    """Seconds per step of one unit in one direction: on the link and in codecs."""
    return link.seconds(traffic(unit), unit.info.world_size) + codec_seconds(unit, time)


@dataclass(frozen=True)
class Workload:
    """What a rank does in a step, whatever the link.

    Attributes:
        traffic: of all units, by direction and number of ranks.
        codec: seconds in codecs.
    """

    traffic: Mapping[tuple[Direction, int], Traffic]
    codec: float


def workload(plan: Plan, time: CodecTime, *, gathers: Sequence[UnitInfo] = ()) -> Workload:
    """Add up the units of a plan.

    Args:
        time: codec time; see :func:`measured_time`, :func:`memory_time`, :func:`no_time`.
        gathers: the all-gathers of the model, which also cost where the plan leaves them alone.
    """
    units = [*plan.all_units]
    if not plan.parameters:
        units += native_units(gathers, "parameters")
    sums: dict[tuple[Direction, int], Traffic] = {}
    for unit in units:
        key = (unit.direction, unit.info.world_size)
        sums[key] = sums.get(key, Traffic()) + traffic(unit)
    return Workload(sums, sum(codec_seconds(unit, time) for unit in units))


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

"""Seconds that codecs take, by what was measured or assumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tagc.codecs import CodecPlan
from tagc.costs.traffic import codings
from tagc.plan import Segment, UnitPlan


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
        stored = codec.feedback.row_bytes(segment.columns) if codec.feedback else 0
        messages = encoded / max(1, segment.columns)
        encode = encoded * info.dtype.itemsize + messages * 2 * stored
        encode += 4 * messages * (codec.words + codec.cells)
        rows = info.world_size if unit.direction == "parameters" else 1
        if unit.keeps_copy:  # the own row is read, and all that are kept are read and written
            encode += segment.columns * info.dtype.itemsize
            rows = 2 * unit.peers
        decode = 4 * (unit.sources * codec.words + codec.cells)
        decode += rows * segment.columns * info.dtype.itemsize
        return (encode + decode * _decodings(unit)) / bandwidth

    return seconds


def no_time(unit: UnitPlan, segment: Segment) -> float:
    """Codec time left out."""
    return 0.0


def _elements(unit: UnitPlan, segment: Segment) -> tuple[int, int]:
    """Elements that a rank encodes and decodes in a step."""
    encoded = unit.destinations * segment.columns * unit.exchanges
    messages = 1 if segment.codec.cells else unit.sources
    return encoded, messages * segment.columns * _decodings(unit)


def _decodings(unit: UnitPlan) -> int:
    """How often a unit's messages are decoded in a step: a copy has them for good."""
    return 1 if unit.keeps_copy else unit.info.per_step


def codec_seconds(unit: UnitPlan, time: CodecTime, micro_batches: int = 1) -> float:
    """Seconds that a rank spends encoding and decoding a unit in a step of so many backwards."""
    if not unit.compressed or unit.info.world_size == 1:
        return 0.0
    seconds = sum(_seconds(part, time) for part in unit.stages) * codings(unit, micro_batches)
    if unit.inside is not None:
        seconds += unit.peers * _seconds(unit.inside, time) * micro_batches
    return seconds


def _seconds(unit: UnitPlan, time: CodecTime) -> float:
    return sum(time(unit, segment) for segment in unit.segments if segment.columns)

"""Seconds that codecs take, by what was measured or assumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tagc.codecs import CodecPlan
from tagc.plan import Segment, StagePlan, UnitPlan


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


CodecTime = Callable[[StagePlan, Segment], float]
"""Seconds that a rank spends in a step of one backward to encode and decode one segment of the
messages of a stage."""


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

    def seconds(stage: StagePlan, segment: Segment) -> float:
        key = speed_key(segment.codec)
        if key not in speeds:
            raise ValueError(f"no speed was measured for {key!r}, only for {', '.join(speeds)}")
        assert stage.messages is not None
        encoded = stage.messages.made * stage.repeats
        # Cells are decoded once, as a sum.
        decoded = (1 if segment.codec.cells else stage.messages.read) * stage.decodes
        speed = speeds[key]
        return segment.columns * (speed.encode * encoded + speed.decode * decoded)

    return seconds


def memory_time(bandwidth: float) -> CodecTime:
    """The least codec time on a device whose memory moves ``bandwidth`` bytes/s: what encoding and
    decoding must read and write, once, and nothing else. Real kernels take longer."""

    def seconds(stage: StagePlan, segment: Segment) -> float:
        assert stage.messages is not None
        codec, messages = segment.codec, stage.messages
        row = segment.columns * stage.dtype.itemsize
        stored = codec.feedback.row_bytes(segment.columns) if codec.feedback else 0
        encode = messages.made * (row + 2 * stored + 4 * (codec.words + codec.cells))
        decode = 4 * (messages.read * codec.words + codec.cells) + messages.rows * row
        # Of a copy the own row is read, too.
        kept = row if codec.of_changes else 0
        return (encode * stage.repeats + kept + decode * stage.decodes) / bandwidth

    return seconds


def no_time(stage: StagePlan, segment: Segment) -> float:
    """Codec time left out."""
    return 0.0


def codec_seconds(unit: UnitPlan, time: CodecTime, micro_batches: int = 1) -> float:
    """Seconds that a rank spends encoding and decoding a unit in a step of so many backwards."""
    total = 0.0
    for stage in unit.route:
        if stage.messages is not None and stage.ranks > 1:
            once = sum(time(stage, s) for s in stage.messages.segments if s.columns)
            total += once * (micro_batches if stage.each_backward else 1)
    return total

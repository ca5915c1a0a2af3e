"""Seconds that codecs take, from measurements or assumptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tagc.codecs import CodecPlan
from tagc.plan import Segment, StagePlan, UnitPlan


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds per element that a codec takes on one device.

    Attributes:
        encode: seconds per element that a rank encodes.
        decode: seconds per element that a rank decodes. Sketches are summed before they are
            decoded, so for them it is per element of the sum.
    """

    encode: float
    decode: float


CodecTime = Callable[[StagePlan, Segment], float]
"""Seconds that a rank spends encoding and decoding one segment of a stage's messages, in a step
with one backward."""


def speed_key(codec: CodecPlan) -> str:
    """The properties of a codec that decide its speed, except sizes."""
    stored = codec.feedback
    return " ".join(
        [
            codec.name.removesuffix(" kept"),
            *([f"at {codec.density:g}"] if codec.density < 1 else []),
            *([f"with {str(stored.dtype).removeprefix('torch.')} feedback"] if stored else []),
        ]
    )


def measured_time(speeds: Mapping[str, Speed]) -> CodecTime:
    """Codec time from measured speeds, by :func:`speed_key`. It raises ValueError for a codec
    without a speed."""

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
    """A lower bound of codec time on a device with a memory bandwidth of ``bandwidth`` bytes/s. It
    counts only the bytes that encoding and decoding must read and write, each once. Real kernels
    take longer."""

    def seconds(stage: StagePlan, segment: Segment) -> float:
        assert stage.messages is not None
        codec, messages = segment.codec, stage.messages
        row = segment.columns * stage.dtype.itemsize
        stored = codec.feedback.row_bytes(segment.columns) if codec.feedback else 0
        encode = messages.made * (row + 2 * stored + 4 * (codec.words + codec.cells))
        decode = 4 * (messages.read * codec.words + codec.cells) + messages.rows * row
        # A codec of changes also reads its own row of the copy.
        kept = row if codec.of_changes else 0
        return (encode * stage.repeats + kept + decode * stage.decodes) / bandwidth

    return seconds


def no_time(stage: StagePlan, segment: Segment) -> float:
    """No codec time: codecs count as free."""
    return 0.0


def codec_seconds(unit: UnitPlan, time: CodecTime, micro_batches: int = 1) -> float:
    """Seconds that a rank spends encoding and decoding a unit in a step of ``micro_batches``
    backwards."""
    total = 0.0
    for stage in unit.route:
        if stage.messages is not None and stage.ranks > 1:
            once = sum(time(stage, s) for s in stage.messages.segments if s.columns)
            total += once * (micro_batches if stage.each_backward else 1)
    return total

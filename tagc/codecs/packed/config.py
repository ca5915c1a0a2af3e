"""Codec `packed`, as a policy spells it."""

from typing import Annotated, ClassVar, Literal

from tagc.codecs.config import Block, CodecConfig, Density, Steps, unit


class PackedConfig(CodecConfig):
    """Kept elements with their index, one message to each owner, who adds them up in float32.

    `density` and `warmup_steps` as for the sketch. Elements are kept in groups of `group`, and
    quantized to `bits` in blocks of `block` kept elements that share a scale.
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("residual", "none")

    kind: Literal["packed"] = "packed"
    """The codec's name."""
    density: Density
    """Share of the elements that a rank keeps, the largest."""
    bits: Annotated[Literal[4, 8], unit("bits per kept element")] = 8
    """Size of a kept element's code."""
    group: Annotated[Literal[1, 2, 4], unit("elements")] = 1
    """Neighbours that are kept, or not, together."""
    block: Block = 256
    """Kept elements that share a scale of 16 bits."""
    warmup_steps: Steps = 0
    """How many of the first reductions go dense; a unit waits for the longest of its rules."""

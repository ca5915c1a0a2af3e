"""Rules for the dimensions of a device mesh: how activations travel through their groups."""

from typing import Annotated, ClassVar, Literal

from tagc.codecs.config import Block, CodecConfig, Strict, unit


class QuantizedActivationsConfig(CodecConfig):
    """Every element in `bits`, with a scale for every `block` elements.

    Nothing is kept between steps, so what a backward computes again has the same bits, also with
    `rounding: stochastic`: chance comes from the elements themselves.
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("none",)

    kind: Literal["quantized"] = "quantized"
    """The codec's name."""
    bits: Annotated[Literal[4, 8], unit("bits per element")] = 8
    """Size of an element's code."""
    block: Block = 64
    """How many neighbouring elements share a scale of 16 bits."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest code, or randomly up or down with the right mean."""


class DimensionRule(Strict):
    """How activations and their gradients travel through the groups of one mesh dimension."""

    codec: QuantizedActivationsConfig
    """How large floating tensors are sent. Everything else travels as it is."""

"""Codec `quantized`, as a policy spells it."""

from typing import ClassVar, Literal

from tagc.codecs.config import Block, CodecConfig


class QuantizedConfig(CodecConfig):
    """Every element in `bits`, with a scale for every `block` elements; summed in float32."""

    feedback_kinds: ClassVar[tuple[str, ...]] = ("average", "residual", "momentum", "none")

    kind: Literal["quantized"] = "quantized"
    bits: Literal[2, 4, 8] = 4
    block: Block = 256


class QuantizedParametersConfig(CodecConfig):
    """Parameters in `bits`, with a scale for every `block` elements, in FSDP's all-gather.

    An element is off by up to `1 / (2 L)` of the largest magnitude of its block, where `L` is 127
    for 8 bits and 7 for 4 (and that largest one itself by `1 / 256`): an outlier makes zeros of its
    neighbours. What is frozen and few bits cannot carry, such as masks, is gathered as it is.

    With `keep_for_backward` a rank keeps the messages that it received in forward, the unit's
    other parameters in them too, and gathers nothing in backward. (It matters where FSDP reshards
    after forward, and so gathers twice.) Parameters that change between a forward and its backward
    are then an error.
    """

    kind: Literal["quantized"] = "quantized"
    bits: Literal[4, 8] = 8
    block: Block = 256
    keep_for_backward: bool = False

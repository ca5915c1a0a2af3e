"""Codec `quantized`, as a policy spells it."""

from typing import Annotated, ClassVar, Literal

from tagc.codecs.config import Block, CodecConfig, unit


class QuantizedConfig(CodecConfig):
    """Every element in `bits`, with a scale for every `block` elements; summed in float32.

    With `rounding: stochastic` what is rounded away is right on average, and nothing of it is kept:
    the codec then needs no memory. A run repeats to the bit all the same.
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("average", "residual", "none")

    kind: Literal["quantized"] = "quantized"
    """The codec's name."""
    bits: Annotated[Literal[4, 8], unit("bits per element")] = 4
    """Size of an element's code."""
    block: Block = 256
    """Neighbours that share a scale of 16 bits."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest code, or up and down by chance, so that the mean is right; `stochastic` goes
    with feedback kind `none`, and is what makes that one sound."""

    @property
    def allowed_feedback(self) -> tuple[str, ...]:
        """See :attr:`CodecConfig.allowed_feedback`: what is right on average owes nothing."""
        return ("none",) if self._stochastic else self.feedback_kinds

    @property
    def spelled(self) -> str:
        """See :attr:`CodecConfig.spelled`."""
        return super().spelled + (" with rounding 'stochastic'" if self._stochastic else "")

    @property
    def _stochastic(self) -> bool:
        return self.rounding == "stochastic"


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
    """The codec's name."""
    bits: Annotated[Literal[4, 8], unit("bits per element")] = 8
    """Size of an element's code."""
    block: Block = 256
    """Neighbours that share a scale of 16 bits."""
    keep_for_backward: bool = False
    """Whether the message of the forward is kept, so that nothing is gathered in backward."""

"""Codec `dense`, as a policy spells it."""

from typing import Literal

from tagc.codecs.config import CodecConfig


class DenseConfig(CodecConfig):
    """The gradient as it is, through the ordinary reduce-scatter.

    With the `wire` `bfloat16` it travels rounded to 16 bits, and is summed in float32.
    """

    kind: Literal["dense"] = "dense"
    """The codec's name."""
    wire: Literal["native", "bfloat16"] = "native"
    """What travels: the gradient's own dtype, or bfloat16."""

    @property
    def compresses(self) -> bool:
        """Whether anything but the ordinary collective is needed."""
        return self.wire != "native"

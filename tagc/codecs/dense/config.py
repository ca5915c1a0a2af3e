"""Codec `dense`, as a policy spells it."""

from typing import Literal

from tagc.codecs.config import CodecConfig
from tagc.codecs.special import Special


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

    def carries(self, special: Special) -> bool:
        """See :meth:`CodecConfig.carries`: as bfloat16, what FSDP's own mixed precision makes of
        them."""
        return not self.compresses or special is not Special.LARGE

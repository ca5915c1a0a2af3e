"""The configuration of codec `sketch` in a policy."""

from typing import ClassVar, Literal

from tagc.codecs.config import CodecConfig, Density, Steps


class SketchConfig(CodecConfig):
    """Kept elements, quantized and summed in a count sketch.

    `density` is the fraction of elements that a rank keeps, in (0, 1]. `symbol` is the group size
    and quantization of one 32-bit symbol; `auto` chooses by the number of ranks.

    With `support: own`, every rank keeps its largest groups, and the sketch has room for their
    union. With `support: shared`, all ranks keep the groups that the shard's owner chose one step
    ahead (with DDP, where no rank owns a shard, it is `own`). The first `warmup_steps` reductions
    are dense, because gradients change fastest at the start of training. (A unit uses the longest
    warm-up of its rules.)
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("residual", "none")

    kind: Literal["sketch"] = "sketch"
    """The codec's name."""
    density: Density
    """Share of the elements that a rank keeps, in the largest groups."""
    symbol: Literal["auto", "int8x4", "int16x2", "int32x1"] = "auto"
    """Contents of 32 bits: int8x4 is 4 elements of 8 bits; auto chooses by the number of ranks."""
    support: Literal["own", "shared"] = "own"
    """Whether a rank keeps its own largest groups, or those that the shard's owner chose."""
    warmup_steps: Steps = 0
    """How many of the first reductions are dense; a unit uses the longest warm-up of its rules."""

    @property
    def shares_support(self) -> bool:
        return self.support == "shared"

"""Codec `sketch`, as a policy spells it."""

from typing import ClassVar, Literal

from tagc.codecs.config import CodecConfig, Density, Steps


class SketchConfig(CodecConfig):
    """Kept elements, quantized and summed in a count sketch.

    `density` is the fraction of elements that a rank keeps, in (0, 1]. `symbol` is the group size
    and quantization of one 32-bit symbol; `auto` picks by the number of ranks. With the
    `support` `own` every rank keeps its largest groups, and the sketch has room for the union of
    them; with `shared` all ranks keep the groups that the shard's owner chose one step ahead. The
    first `warmup_steps` reductions go dense: gradients change fastest at the start of a training.
    (A unit waits for the longest warm-up of its rules.)
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("residual", "none")

    kind: Literal["sketch"] = "sketch"
    """The codec's name."""
    density: Density
    """Share of the elements that a rank keeps, the largest groups."""
    symbol: Literal["auto", "int8x4", "int16x2", "int32x1"] = "auto"
    """What 32 bits hold: so many elements of so many bits; auto: by the number of ranks."""
    support: Literal["own", "shared"] = "own"
    """Whether a rank keeps what is largest to it, or what the owner of the shard chose for all."""
    warmup_steps: Steps = 0
    """How many of the first reductions go dense; a unit waits for the longest of its rules."""

    @property
    def shares_support(self) -> bool:
        """See :attr:`CodecConfig.shares_support`."""
        return self.support == "shared"

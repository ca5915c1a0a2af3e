"""Codec `packed`, as a policy spells it."""

from typing import ClassVar, Literal

from tagc.codecs.config import Block, CodecConfig, Density, Steps


class PackedConfig(CodecConfig):
    """Kept elements with their index, one message to each owner, who adds them up in float32.

    `density` and `warmup_steps` as for the sketch. Elements are kept in groups of `group`, and
    quantized to `bits` in blocks of `block` kept elements that share a scale. `support` is as for
    the sketch: a rank's `own`, or `shared`.
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("residual", "momentum", "none")

    kind: Literal["packed"] = "packed"
    density: Density
    bits: Literal[4, 8, 16] = 8
    group: Literal[1, 2, 4, 8, 16, 32] = 1
    block: Block = 256
    support: Literal["own", "shared"] = "own"
    warmup_steps: Steps = 0

    @property
    def shares_support(self) -> bool:
        """See :attr:`CodecConfig.shares_support`."""
        return self.support == "shared"

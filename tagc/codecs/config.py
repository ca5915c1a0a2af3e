"""What the configurations of all codecs have in common, as a policy's YAML spells them."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from tagc.codecs.special import Special

Density = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Steps = Annotated[int, Field(ge=0, le=2**31 - 1)]
Block = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]


class Strict(BaseModel):
    """A part of a policy: immutable, and without keys that it does not know."""

    # Strict, so that `true` is no 1 and "0.2" no number.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CodecConfig(Strict):
    """What a policy says about a codec; `kind` is its name there."""

    feedback_kinds: ClassVar[tuple[str, ...]] = ("none",)
    """Kinds of feedback that it can have; the first is what it gets without a word."""

    @property
    def compresses(self) -> bool:
        """Whether anything but the ordinary collective is needed."""
        return True

    @property
    def shares_support(self) -> bool:
        """Whether all ranks are to send the groups that a shard's owner chose."""
        return False

    @property
    def needs_matrices(self) -> bool:
        """Whether it has rows and columns to scale, so that its segments consist of matrices."""
        return False

    def carries(self, special: Special) -> bool:
        """Whether frozen parameters with such values come out of an all-gather as they were."""
        return False

    @property
    def spelled(self) -> str:
        """For people."""
        return f"codec {type(self).model_fields['kind'].default!r}"

    @property
    def for_vectors(self) -> str:
        """What parameters without rows and columns may have instead."""
        return "codec 'quantized' or 'dense'"

"""Codec `delta`, as a policy spells it."""

from typing import Annotated, Literal, Self

from pydantic import model_validator

from tagc.codecs.config import Block, CodecConfig, unit
from tagc.codecs.special import Special


class DeltaConfig(CodecConfig):
    """What changed in parameters since the last message, in `bits`, in FSDP's all-gather.

    Ranks keep a copy of the unit's parameters, those of a host together one, which holds what all
    others know of them; messages go once for every step of the optimizer, in the first forward
    after it, and nothing else leaves a host. 8 and 4 bits have a scale for every `block` elements;
    2 and 1 bit have no code for zero, and scales of rows and columns, as the codec `matrix`.
    """

    kind: Literal["delta"] = "delta"
    """The codec's name."""
    bits: Annotated[Literal[2, 4, 8], unit("bits per element")] = 4
    """Size of an element's code."""
    block: Block = 256
    """Neighbours that share a scale of 16 bits; with 8 and 4 bits only."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest code, or up and down by chance, so that changes smaller than half a code reach
    the copy now and then, and not only once they have added up; with 8 and 4 bits only."""

    @model_validator(mode="after")
    def _check_rounding(self) -> Self:
        if self.rounding == "stochastic" and self.needs_matrices:
            raise ValueError(f"rounding 'stochastic' goes with bits 4 or 8, not {self.bits}")
        return self

    def carries(self, special: Special) -> bool:
        """See :meth:`CodecConfig.carries`: they go whole once, and do not change."""
        return True

    @property
    def needs_matrices(self) -> bool:
        """See :attr:`CodecConfig.needs_matrices`."""
        return self.bits < 4

    @property
    def spelled(self) -> str:
        """See :attr:`CodecConfig.spelled`."""
        return f"codec 'delta' with bits {self.bits}"

    @property
    def for_vectors(self) -> str:
        """See :attr:`CodecConfig.for_vectors`."""
        return "bits 4 or 8, or codec 'dense'"

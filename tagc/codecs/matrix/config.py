"""Codec `matrix`, as a policy spells it."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tagc.codecs.config import CodecConfig, Steps, unit


class MatrixConfig(CodecConfig):
    """Every element of a matrix in `bits`, with a scale for each row and each column.

    The scales follow the gradient of the step, which is a sum of outer products; what is left
    after dividing by them is closer to Gaussian, and a few bits go a long way. With a `group`, so
    many neighbours in a row share one code, which says which of them is the largest, and its sign:
    0.5 bits per element. `level` multiplies the values that codes stand for: above 1, a message
    carries more of what is owed, and more noise. The `warmup_steps` are as for the sketch.
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("residual", "average", "none")

    kind: Literal["matrix"] = "matrix"
    """The codec's name."""
    bits: Annotated[Literal[1, 2], unit("bits per code")] = 1
    """Size of a code."""
    group: Annotated[Literal[1, 8], unit("elements")] = 1
    """Neighbours in a row that share one code; above 1 with bits 1 only."""
    level: Annotated[float, Field(ge=0.5, le=2, allow_inf_nan=False), unit("factor")] = 1
    """Multiplies the values that codes stand for."""
    warmup_steps: Steps = 0
    """How many of the first reductions go dense; a unit waits for the longest of its rules."""

    @model_validator(mode="after")
    def _check_group(self) -> Self:
        if self.group > 1 and self.bits > 1:
            raise ValueError(
                f"bits {self.bits}: a group of {self.group} shares a code, with bits 1"
            )
        return self

    @property
    def needs_matrices(self) -> bool:
        """See :attr:`CodecConfig.needs_matrices`."""
        return True

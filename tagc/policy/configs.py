"""What a rule's `codec` can be: the configurations of all codecs, and `auto`."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import Field

from tagc.codecs import CODECS, CodecConfig
from tagc.codecs.config import unit


class AutoConfig(CodecConfig):
    """The fastest of dense, bfloat16, 8 and 4 bits on the link that `tagc.wrap` measures.

    `min_bits` bounds the choice from below. None of them costs visible quality: 4 bits go with
    the rule's feedback, by default `average` (LoCo); with kind `none` they are rounded by chance.
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("average", "residual", "none")

    kind: Literal["auto"] = "auto"
    """The codec's name."""
    min_bits: Annotated[Literal[4, 8, 16, 32], unit("bits per element")] = 4
    """The fewest that may be chosen."""


class AutoParametersConfig(AutoConfig):
    """Likewise for parameters, which have no feedback, and so get 8 bits at least; or, where a rank
    may store `memory` bytes for every parameter of the model, 4 bits of changes against a copy (2
    bytes in bfloat16, divided by the ranks on a host), and 8 bits that are kept for backward (1.01
    bytes).
    """

    memory: Annotated[float, Field(ge=0, allow_inf_nan=False), unit("bytes per parameter")] = 0.0
    """What a rank may store for every parameter of the model."""


GRADIENT_CONFIGS: tuple[type[CodecConfig], ...] = (
    *(kind.config for kind in CODECS if kind.config),
    AutoConfig,
)
PARAMETER_CONFIGS: tuple[type[CodecConfig], ...] = (
    *(kind.parameter_config for kind in CODECS if kind.parameter_config),
    AutoParametersConfig,
)

if TYPE_CHECKING:
    # Each has a `kind` of its own, by which pydantic tells them apart.
    AnyGradientConfig = AnyParameterConfig = Any
else:
    AnyGradientConfig = Annotated[Union[GRADIENT_CONFIGS], Field(discriminator="kind")]  # noqa: UP007
    AnyParameterConfig = Annotated[Union[PARAMETER_CONFIGS], Field(discriminator="kind")]  # noqa: UP007

"""The configurations that a rule's `codec` can have: those of all codecs, and `auto`."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import Field

from tagc.codecs import CODECS, CodecConfig
from tagc.codecs.config import unit


class AutoConfig(CodecConfig):
    """The fastest of dense, bfloat16, 8 and 4 bits on the link that `tagc.wrap` measures.

    `min_bits` excludes choices with fewer bits. No choice costs visible quality: 4 bits use the
    rule's feedback, by default `average` (LoCo); with kind `none` they are rounded stochastically.
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("average", "residual", "none")

    kind: Literal["auto"] = "auto"
    """The codec's name."""
    min_bits: Annotated[Literal[4, 8, 16, 32], unit("bits per element")] = 4
    """Fewest bits to choose from."""


class AutoParametersConfig(AutoConfig):
    """The fastest codec for parameters on the link that `tagc.wrap` measures.

    Parameters have no feedback, so they get at least 8 bits. With enough `memory`, tagc may also
    choose 4 bits of changes against a copy (2 bytes per parameter in bfloat16, divided by the ranks
    on a host), or 8 bits that are kept for backward (1.01 bytes per parameter).
    """

    memory: Annotated[float, Field(ge=0, le=1024), unit("bytes per parameter")] = 0.0
    """Bytes that a rank may store for each parameter of the model."""


GRADIENT_CONFIGS: tuple[type[CodecConfig], ...] = (
    *(kind.config for kind in CODECS if kind.config),
    AutoConfig,
)
PARAMETER_CONFIGS: tuple[type[CodecConfig], ...] = (
    *(kind.parameter_config for kind in CODECS if kind.parameter_config),
    AutoParametersConfig,
)

if TYPE_CHECKING:
    # pydantic distinguishes them by their `kind`.
    AnyGradientConfig = AnyParameterConfig = Any
else:
    AnyGradientConfig = Annotated[Union[GRADIENT_CONFIGS], Field(discriminator="kind")]  # noqa: UP007
    AnyParameterConfig = Annotated[Union[PARAMETER_CONFIGS], Field(discriminator="kind")]  # noqa: UP007

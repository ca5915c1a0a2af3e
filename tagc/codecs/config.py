"""The base of all codecs' configurations in a policy."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema


def unit(name: str) -> FieldInfo:
    """The unit of a number in a policy. The JSON Schema has it in the key `x-unit`."""
    return Field(json_schema_extra={"x-unit": name})


@dataclass(frozen=True)
class InSchema:
    """Changes a field's JSON Schema, because files may spell its value in other ways than
    Python."""

    change: Callable[[JsonDict], JsonDict]

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonDict:
        return self.change(handler(core))


Density = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), unit("share of the elements")]
Steps = Annotated[int, Field(ge=0, le=2**31 - 1), unit("reductions")]
Block = Annotated[Literal[32, 64, 128, 256, 512, 1024, 2048, 4096], unit("elements")]


class Strict(BaseModel):
    """A part of a policy. It is immutable and refuses unknown keys. The string below a field
    describes its key in the JSON Schema.
    """

    # Strict, so that `true` does not pass for 1, nor "0.2" for a number.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


def _require_kind(schema: dict[str, Any]) -> None:
    # The key has a default in Python, but a file needs it to name the codec.
    schema["required"] = ["kind", *schema.get("required", ())]
    del schema["properties"]["kind"]["default"]


class Special(Enum):
    """Values of a frozen parameter that codecs may change; ``value`` is text for users."""

    NOT_FINITE = "values that are not finite"
    LARGE = "values at the edge of their dtype"
    FEW = "only two values, as masks have, or one"


class CodecConfig(Strict):
    """The settings of a codec in a policy; `kind` is the codec's name."""

    model_config = ConfigDict(json_schema_extra=_require_kind)

    feedback_kinds: ClassVar[tuple[str, ...]] = ("none",)
    """The kinds of feedback that the codec supports; the first is the default."""
    selects: ClassVar[bool] = False
    """Whether the codec leaves elements below a threshold of the segment for later."""

    @property
    def allowed_feedback(self) -> tuple[str, ...]:
        """The :attr:`feedback_kinds` that fit these settings."""
        return self.feedback_kinds

    @property
    def compresses(self) -> bool:
        """Whether the codec needs more than the ordinary collective."""
        return True

    @property
    def shares_support(self) -> bool:
        """Whether all ranks should send the groups that a shard's owner chose."""
        return False

    @property
    def needs_matrices(self) -> bool:
        """Whether the codec scales rows and columns, so that its segments consist of matrices."""
        return False

    def carries(self, special: Special) -> bool:
        """Whether an all-gather returns frozen parameters with such values unchanged."""
        return False

    @property
    def description(self) -> str:
        """The codec's name in texts for users."""
        return f"codec {type(self).model_fields['kind'].default!r}"

    @property
    def for_vectors(self) -> str:
        """The alternatives that a message suggests for parameters without rows and columns."""
        return "codec 'quantized' or 'dense'"

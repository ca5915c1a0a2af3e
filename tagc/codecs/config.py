"""What the configurations of all codecs have in common, as a policy's YAML spells them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from tagc.codecs.special import Special


def unit(name: str) -> FieldInfo:
    """What a number in a policy counts, for the JSON Schema, where it is the key `x-unit`."""
    return Field(json_schema_extra={"x-unit": name})


@dataclass(frozen=True)
class InSchema:
    """Changes what the JSON Schema says of a field where files may spell it in other ways than
    Python has it."""

    change: Callable[[JsonDict], JsonDict]

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonDict:
        return self.change(handler(core))


Density = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), unit("share of the elements")]
Steps = Annotated[int, Field(ge=0, le=2**31 - 1), unit("reductions")]
Block = Annotated[Literal[32, 64, 128, 256, 512, 1024, 2048, 4096], unit("elements")]


class Strict(BaseModel):
    """A part of a policy: immutable, and without keys that it does not know. The string below a
    field describes its key in the JSON Schema.
    """

    # Strict, so that `true` is no 1 and "0.2" no number.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


def _require_kind(schema: dict[str, Any]) -> None:
    # It has a default in Python, but by it a file says which codec is meant.
    schema["required"] = ["kind", *schema.get("required", ())]
    del schema["properties"]["kind"]["default"]


class CodecConfig(Strict):
    """What a policy says about a codec; `kind` is its name there."""

    model_config = ConfigDict(json_schema_extra=_require_kind)

    feedback_kinds: ClassVar[tuple[str, ...]] = ("none",)
    """Kinds of feedback that it can have; the first is what it gets without a word."""

    @property
    def allowed_feedback(self) -> tuple[str, ...]:
        """Those of :attr:`feedback_kinds` that it can have as it is set."""
        return self.feedback_kinds

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

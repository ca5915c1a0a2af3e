"""Policies: which gradients travel compressed, and how.

A policy is a list of rules over the model's parameters; the first rule that matches decides, and
a parameter that none matches is dense. `Policy.load` reads one from a YAML file, a built-in name
or a dict. Norms, biases and other small parameters are a fraction of a percent of the elements
and much of the error, so compression reaches them only where a rule names them.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tagc.policy_file import (
    Document,
    PolicyError,
    builtin_names,
    raise_problems,
    read_builtin,
    read_file,
    translate,
)
from tagc.roles import ParamInfo, Role, clean_name

__all__ = [
    "SMALL",
    "Codec",
    "DenseCodec",
    "Feedback",
    "ParamInfo",
    "Policy",
    "PolicyError",
    "Rule",
    "SketchCodec",
    "When",
    "policies",
]

SMALL = 16384
"""Elements below which a parameter is dense, unless a rule names it or states its `min_numel`."""


class _Model(BaseModel):
    # Strict, so that `true` is no 1 and "0.2" no number.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SketchCodec(_Model):
    """Kept elements, quantized and summed in a count sketch.

    `density` is the fraction of elements that a rank keeps, in (0, 1]. `symbol` is the group size
    and quantization of one 32-bit symbol; `auto` picks by the number of ranks. The first
    `warmup_steps` reductions go dense: gradients change fastest at the start of a training. (A
    unit waits for the longest warm-up of its rules.)
    """

    compresses: ClassVar[bool] = True

    kind: Literal["sketch"] = "sketch"
    density: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    symbol: Literal["auto", "int8x4", "int16x2", "int32x1", "float32"] = "auto"
    warmup_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0


class DenseCodec(_Model):
    """The gradient as it is, through the ordinary reduce-scatter."""

    compresses: ClassVar[bool] = False

    kind: Literal["dense"] = "dense"


# Another codec is a class with a `kind` of its own and a place in this union.
Codec = Annotated[SketchCodec | DenseCodec, Field(discriminator="kind")]


class Feedback(_Model):
    """What becomes of the part of a gradient that a codec did not send.

    `residual` keeps it per rank in `dtype` and adds it to the next gradient; `none` drops it.
    """

    kind: Literal["none", "residual"] = "residual"
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _check_dtype(self) -> Self:
        if self.kind == "none" and self.dtype != "float32":
            raise ValueError(f"dtype {self.dtype!r} has no effect: kind 'none' stores nothing")
        return self


def _as_tuple(value: object) -> tuple[object, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a string or a non-empty list of strings, not {value!r:.40}")
    return tuple(value)


def _as_range(value: object) -> tuple[int, int]:
    ends: list[Any] = []
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", value)
        ends = [int(end) for end in found.groups() if end] if found else []
    elif isinstance(value, list | tuple) and len(value) == 2:
        ends = list(value)
    elif isinstance(value, int):
        ends = [value]
    # A bool is an int, too, but no layer.
    if not ends or any(type(end) is not int for end in ends) or not 0 <= ends[0] <= ends[-1]:
        raise ValueError(
            f"must be a range such as '0-11', [0, 11] or one number, not {value!r:.40}"
        )
    return ends[0], ends[-1]


_Item = TypeVar("_Item")
_OneOrMore = Annotated[tuple[_Item, ...], BeforeValidator(_as_tuple)]
_Glob = Annotated[str, Field(min_length=1)]
_Layers = Annotated[tuple[int, int], BeforeValidator(_as_range)]
_Numel = Annotated[int, Field(ge=0, le=2**63 - 1)]


class When(_Model):
    """Conditions on a parameter. All that are given must hold; none given holds for every one.

    `role`: one of `tagc.roles.ROLES` or a list of them. `name`: a glob or a list of globs, case
    sensitive, over the whole name without wrapper prefixes. `layers`: indices of transformer
    blocks, inclusive, as "4-11", [4, 11] or one number. `min_numel` and `max_numel`: elements
    before sharding, inclusive.
    """

    role: _OneOrMore[Role] | None = None
    name: _OneOrMore[_Glob] | None = None
    layers: _Layers | None = None
    min_numel: _Numel | None = None
    max_numel: _Numel | None = None

    @field_validator("role", "name")
    @classmethod
    def _sort(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        # The order of alternatives has no meaning, so it must not reach the policy's hash.
        return None if value is None else tuple(sorted(set(value)))

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        low, high = self.min_numel, self.max_numel
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_numel {low} is above max_numel {high}: nothing can match")
        return self

    def matches(self, param: ParamInfo) -> bool:
        """Whether all conditions hold for the parameter."""
        if self.role is not None and param.role not in self.role:
            return False
        if self.name is not None:
            name = clean_name(param.name)
            if not any(fnmatchcase(name, glob) for glob in self.name):
                return False
        if self.layers is not None:
            first, last = self.layers
            if param.layer is None or not first <= param.layer <= last:
                return False
        if self.min_numel is not None and param.numel < self.min_numel:
            return False
        return self.max_numel is None or param.numel <= self.max_numel


class Rule(_Model):
    """One rule: the parameters `when` selects go through `codec`, with `feedback`.

    Without `feedback`, a codec that compresses gets `Feedback()`, another gets kind `none`.
    """

    when: When
    codec: Codec
    feedback: Feedback = Field(default=cast(Feedback, None), validate_default=True)

    @field_validator("feedback", mode="before")
    @classmethod
    def _default_feedback(cls, value: object, info: ValidationInfo) -> object:
        codec = info.data.get("codec")  # absent if it was invalid
        if value is None:
            dense = codec is not None and not codec.compresses
            return Feedback(kind="none" if dense else "residual")
        return value

    @field_validator("feedback")
    @classmethod
    def _check_feedback(cls, value: Feedback, info: ValidationInfo) -> Feedback:
        codec = info.data.get("codec")
        if codec is not None and not codec.compresses and value.kind != "none":
            raise ValueError(
                f"kind {value.kind!r} has no effect: codec {codec.kind!r} sends everything; "
                "leave feedback out"
            )
        return value

    def matches(self, param: ParamInfo) -> bool:
        """Whether the rule selects the parameter.

        A rule that compresses and gives no `name` passes over every parameter with fewer than two
        dimensions, and, unless it states `min_numel`, over those with fewer than `SMALL` elements.
        """
        if self.codec.compresses and self.when.name is None:
            if param.ndim < 2:
                return False
            if self.when.min_numel is None and param.numel < SMALL:
                return False
        return self.when.matches(param)


def _check_schema(value: object) -> object:
    # A Literal compares with ==, so 1.0 and true would pass for 1.
    if type(value) is not int or value != 1:
        raise ValueError(f"must be 1, the only schema so far, not {value!r:.40}")
    return value


def _as_rules(value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a non-empty list of rules, not {value!r:.40}")
    return tuple(value)


class Policy(_Model):
    """An ordered list of rules for the gradients. Equal content is equal, whatever its source.

    Load policies with `Policy.load`, whose errors are all PolicyError; the constructor raises
    pydantic's ValidationError, which is a ValueError too.
    """

    schema_version: Annotated[Literal[1], BeforeValidator(_check_schema)] = Field(alias="schema")
    about: str = ""
    gradients: Annotated[tuple[Rule, ...], BeforeValidator(_as_rules)]

    _name: str = PrivateAttr(default="<dict>")

    @classmethod
    def load(cls, source: "str | os.PathLike[str] | Mapping[str, Any] | Policy") -> "Policy":
        """A policy from its built-in name, a YAML file, a mapping, or itself.

        A string with a path separator or the suffix .yaml or .yml is a file, any other is a
        built-in name.

        Raises:
            PolicyError: no such policy, or not a valid one; the message lists every problem.
        """
        if isinstance(source, Policy):
            return source
        if isinstance(source, Mapping):
            return _validate(Document(source="<dict>", data=dict(source)), "<dict>")
        if isinstance(source, os.PathLike) or (isinstance(source, str) and _is_path(source)):
            path = os.fsdecode(source)
            return _validate(read_file(path), path)
        if isinstance(source, str):
            return _validate(read_builtin(source), source)
        raise PolicyError(
            f"a policy is a built-in name, a path or a mapping, not {type(source).__name__}"
        )

    @property
    def name(self) -> str:
        """The built-in name, the path of the file, or `<dict>`."""
        return self._name

    @property
    def hash(self) -> str:
        """SHA-256, in hex, of the rules with every default filled in; not of `about` and name."""
        content = self.model_dump(mode="json", by_alias=True, exclude={"about"})
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def match(self, param: ParamInfo) -> int | None:
        """Index in `gradients` of the first rule that selects the parameter; None is dense."""
        for index, rule in enumerate(self.gradients):
            if rule.matches(param):
                return index
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


def policies() -> dict[str, str]:
    """The built-in policies: name to `about`, sorted by name."""
    return {name: Policy.load(name).about for name in builtin_names()}


def _is_path(source: str) -> bool:
    return source.endswith((".yaml", ".yml")) or any(
        separator in source for separator in (os.sep, os.altsep) if separator
    )


def _validate(document: Document, name: str) -> Policy:
    try:
        policy = Policy.model_validate(document.data)
    except ValidationError as error:
        raise_problems(document, translate(error, document.data, _keys_at))
        raise AssertionError("a ValidationError without errors") from error
    raise_problems(document, ())
    policy._name = name
    return policy


def _keys_at(loc: tuple[str | int, ...]) -> list[str]:
    """The keys of the mapping at pydantic's location, for the nearest valid spelling."""
    last = loc[-1] if loc else ""
    model: type[_Model] = Rule
    if isinstance(last, str):
        codecs = {
            codec.model_fields["kind"].default: codec for codec in get_args(get_args(Codec)[0])
        }
        model = {"when": When, "feedback": Feedback, **codecs}.get(last, Policy)
    return [info.alias or key for key, info in model.model_fields.items()]

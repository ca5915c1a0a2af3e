"""Conditions of rules: which parameters a rule selects."""

import re
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple, Self, TypeVar

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator
from pydantic.config import JsonDict

from tagc.codecs.config import InSchema, Strict, unit
from tagc.policy.roles import ParamInfo, Role, clean_name
from tagc.policy.suggest import short


def _as_tuple(value: object) -> tuple[object, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a string or a non-empty list of strings, not {short(value)}")
    return tuple(value)


_LAST = 10**9 - 1  # index of a block; text has at most nine digits


def _as_range(value: object) -> tuple[int, int]:
    ends: list[Any] = []
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", value)
        ends = [int(end) for end in found.groups() if end] if found else []
    elif isinstance(value, list | tuple) and len(value) == 2:
        ends = list(value)
    elif isinstance(value, int):
        ends = [value]
    # A bool is also an int, but not a layer.
    whole = ends and all(type(end) is int for end in ends)
    if not whole or not 0 <= ends[0] <= ends[-1] <= _LAST:
        raise ValueError(
            f"must be a range such as '0-11', [0, 11] or one number, not {short(value)}"
        )
    return ends[0], ends[-1]


def _or_one(array: JsonDict) -> JsonDict:
    return {"anyOf": [array["items"], {**array, "minItems": 1}]}


_LAYER: JsonDict = {"type": "integer", "minimum": 0, "maximum": _LAST}
_RANGE: JsonDict = {
    "anyOf": [
        {"type": "string", "pattern": r"^\s*[0-9]{1,9}\s*(-\s*[0-9]{1,9}\s*)?$"},
        _LAYER,
        {"type": "array", "items": _LAYER, "minItems": 2, "maxItems": 2},
    ],
    "x-unit": "index of a block",
}
_Item = TypeVar("_Item")
OneOrMore = Annotated[tuple[_Item, ...], BeforeValidator(_as_tuple), InSchema(_or_one)]
Glob = Annotated[str, Field(min_length=1)]
_Layers = Annotated[tuple[int, int], BeforeValidator(_as_range), WithJsonSchema(_RANGE)]
_Numel = Annotated[int, Field(ge=0, le=2**63 - 1), unit("elements")]


class Near(IntEnum):
    """The condition that keeps a rule from selecting a parameter; a later one is a nearer miss."""

    NOTHING = 0
    ROLE = 1
    NAME = 2
    LAYERS = 3
    SIZE = 4
    NO_MATRIX = 5
    SMALL = 6


class Miss(NamedTuple):
    """Why a rule does not select a parameter; `why` is text for users."""

    near: Near
    why: str


class When(Strict):
    """Conditions on a parameter. All given conditions must hold; {} selects every parameter."""

    role: OneOrMore[Role] | None = None
    """The parameter's part of the transformer, or a list of parts."""
    name: OneOrMore[Glob] | None = None
    """Glob that the whole name matches, or a list of globs; case sensitive. Wrapper prefixes are
    removed from the name first."""
    layers: _Layers | None = None
    """Blocks to select, both ends included: "4-11", [4, 11], or one number."""
    min_numel: _Numel | None = None
    """Fewest elements of the parameter, before sharding. Without this key, a rule that compresses
    and gives no name skips parameters below 16384 elements."""
    max_numel: _Numel | None = None
    """Most elements of the parameter, before sharding."""

    @field_validator("role", "name")
    @classmethod
    def _sort(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        # The order of alternatives means nothing, so it must not change the policy's hash.
        return None if value is None else tuple(sorted(set(value)))

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        low, high = self.min_numel, self.max_numel
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_numel {low} is above max_numel {high}: nothing can match")
        return self

    def miss(self, param: ParamInfo) -> Miss | None:
        """The condition that does not hold for the parameter; None if all hold."""
        if self.role is not None and param.role not in self.role:
            return Miss(Near.ROLE, "no rule for its role")
        if self.name is not None:
            name = clean_name(param.name)
            if not any(fnmatchcase(name, glob) for glob in self.name):
                return Miss(Near.NAME, "no rule for its name")
        if self.layers is not None:
            first, last = self.layers
            if param.layer is None or not first <= param.layer <= last:
                return Miss(Near.LAYERS, "no rule for its layer")
        if self.min_numel is not None and param.numel < self.min_numel:
            return Miss(Near.SIZE, f"{param.numel:,} elements < min_numel {self.min_numel:,}")
        if self.max_numel is not None and param.numel > self.max_numel:
            return Miss(Near.SIZE, f"{param.numel:,} elements > max_numel {self.max_numel:,}")
        return None

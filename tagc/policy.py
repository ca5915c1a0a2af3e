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
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self, TypeVar, cast, get_args

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from tagc.policy_codecs import (
    FEEDBACK_KINDS,
    Codec,
    Feedback,
    GradientCodec,
    ParameterCodec,
    Strict,
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
    "ParamInfo",
    "ParameterRule",
    "Policy",
    "PolicyError",
    "Rule",
    "When",
    "first_match",
    "policies",
]

SMALL = 16384
"""Elements below which a parameter is dense, unless a rule names it or states its `min_numel`."""


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


class When(Strict):
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


class _Selects(Strict):
    """What rules for gradients and for parameters have in common."""

    when: When
    codec: Any

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


class Rule(_Selects):
    """One rule: the gradients of the parameters that `when` selects go through `codec`, with
    `feedback`. Without `feedback`, a codec gets the first kind of those that it can have:
    `average` if it sends every element, `residual` if it selects, `none` if it is dense.
    """

    codec: Codec
    feedback: Feedback = Field(default=cast(Feedback, None), validate_default=True)

    @field_validator("feedback", mode="before")
    @classmethod
    def _default_feedback(cls, value: object, info: ValidationInfo) -> object:
        codec = info.data.get("codec")  # absent if it was invalid
        if value is None:
            return Feedback(kind="none" if codec is None else FEEDBACK_KINDS[codec.kind][0])
        return value

    @field_validator("feedback")
    @classmethod
    def _check_feedback(cls, value: Feedback, info: ValidationInfo) -> Feedback:
        codec = info.data.get("codec")
        if codec is None:
            return value
        kinds = FEEDBACK_KINDS[codec.kind]
        if value.kind not in kinds:
            if codec.kind == "dense":
                raise ValueError(
                    f"kind {value.kind!r} has no effect: codec 'dense' sends everything; "
                    "leave feedback out"
                )
            raise ValueError(
                f"kind {value.kind!r} would forget most of what codec {codec.kind!r} does not "
                f"select; choose {' or '.join(kinds)}"
            )
        if getattr(codec, "support", "own") == "shared" and value.kind == "none":
            raise ValueError("support 'shared' is chosen from residuals, and kind 'none' has none")
        return value


class ParameterRule(_Selects):
    """One rule: the parameters that `when` selects are gathered through `codec`."""

    codec: Annotated[ParameterCodec, Field(discriminator="kind")]


def _check_schema(value: object) -> object:
    # A Literal compares with ==, so 1.0 and true would pass for 1.
    if type(value) is not int or value != 1:
        raise ValueError(f"must be 1, the only schema so far, not {value!r:.40}")
    return value


def _as_rules(value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a non-empty list of rules, not {value!r:.40}")
    return tuple(value)


class Policy(Strict):
    """Ordered lists of rules: for the `gradients` in FSDP's reduce-scatter, the `parameters` in
    its all-gather, and the gradients in the all-reduce across `replicas` of the sharded model.
    Equal content is equal, whatever its source.

    Load policies with `Policy.load`, whose errors are all PolicyError; the constructor raises
    pydantic's ValidationError, which is a ValueError too.
    """

    schema_version: Annotated[Literal[1], BeforeValidator(_check_schema)] = Field(alias="schema")
    about: str = ""
    gradients: Annotated[tuple[Rule, ...], BeforeValidator(_as_rules)]
    parameters: Annotated[tuple[ParameterRule, ...], BeforeValidator(_as_rules)] = ()
    replicas: Annotated[tuple[Rule, ...], BeforeValidator(_as_rules)] = ()

    _name: str = PrivateAttr(default="<dict>")

    @field_validator("replicas")
    @classmethod
    def _check_owners(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        problem = ValueError("'shared' is the choice of a shard's owner, and replicas have none")
        found = [
            InitErrorDetails(
                type="value_error",
                loc=(i, "codec", rule.codec.kind, "support"),
                input="shared",
                ctx={"error": problem},
            )
            for i, rule in enumerate(rules)
            if getattr(rule.codec, "support", "own") == "shared"
        ]
        if found:
            raise ValidationError.from_exception_data(cls.__name__, found)
        return rules

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
        return first_match(self.gradients, param)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


def first_match(rules: Sequence[Rule | ParameterRule], param: ParamInfo) -> int | None:
    """Index of the first rule that selects the parameter; None is dense."""
    for index, rule in enumerate(rules):
        if rule.matches(param):
            return index
    return None


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
    of_parameters = bool(loc) and loc[0] == "parameters"
    model: type[Strict] = ParameterRule if of_parameters else Rule
    if isinstance(last, str):
        kinds = get_args(ParameterCodec if of_parameters else GradientCodec)
        codecs = {codec.model_fields["kind"].default: codec for codec in kinds}
        model = {"when": When, "feedback": Feedback, **codecs}.get(last, Policy)
    return [info.alias or key for key, info in model.model_fields.items()]

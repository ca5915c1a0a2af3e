"""Policies: which gradients travel compressed, and how.

A policy is a list of rules over the model's parameters; the first rule that matches decides, and
a parameter that none matches is dense. `Policy.load` reads one from a YAML file, a built-in name
or a dict. Norms, biases and other small parameters are a fraction of a percent of the elements
and much of the error, so compression reaches them only where a rule names them.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, field_validator
from pydantic_core import InitErrorDetails

from tagc.codecs.config import Strict
from tagc.codecs.feedback import FeedbackConfig
from tagc.policy.conditions import When
from tagc.policy.configs import GRADIENT_CONFIGS, PARAMETER_CONFIGS
from tagc.policy.document import (
    Document,
    PolicyError,
    builtin_names,
    raise_problems,
    read_builtin,
    read_file,
    short,
    translate,
)
from tagc.policy.roles import ParamInfo
from tagc.policy.rules import ParameterRule, Rule, first_match
from tagc.policy.tuning import Tuning


def _check_schema(value: object) -> object:
    # A Literal compares with ==, so 1.0 and true would pass for 1.
    if type(value) is not int or value != 1:
        raise ValueError(f"must be 1, the only schema so far, not {short(value)}")
    return value


def _as_rules(value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a non-empty list of rules, not {short(value)}")
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
    tuning: Tuning | None = None
    """Factors between a dense run's settings and this policy's; none are said without."""
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
            if rule.codec.shares_support
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
        """SHA-256, in hex, of the rules with every default filled in; not of `about`, `tuning` and
        name."""
        content = self.model_dump(mode="json", by_alias=True, exclude={"about", "tuning"})
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def match(self, param: ParamInfo) -> int | None:
        """Index in `gradients` of the first rule that selects the parameter; None is dense."""
        return first_match(self.gradients, param)

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
    of_parameters = bool(loc) and loc[0] == "parameters"
    model: type[Strict] = ParameterRule if of_parameters else Rule
    if isinstance(last, str):
        configs = PARAMETER_CONFIGS if of_parameters else GRADIENT_CONFIGS
        by_kind = {config.model_fields["kind"].default: config for config in configs}
        named = {"when": When, "feedback": FeedbackConfig, "tuning": Tuning}
        model = {**named, **by_kind}.get(last, Policy)
    return [info.alias or key for key, info in model.model_fields.items()]

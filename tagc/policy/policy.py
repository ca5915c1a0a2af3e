"""Policies: which gradients travel compressed, and how.

A policy is a list of rules over the model's parameters; the first rule that matches decides, and
a parameter that none matches is dense. `Policy.load` reads one from a YAML file, a built-in name
or a dict. One that extends another has its rules behind its own. Norms, biases and other small
parameters are a fraction of a percent of the elements and much of the error, so compression reaches
them only where a rule names them.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
)

from tagc.codecs.config import InSchema, Strict
from tagc.policy.canonical import canonical
from tagc.policy.conditions import Glob, OneOrMore
from tagc.policy.document import (
    DICT,
    Document,
    PolicyError,
    Problem,
    builtin_names,
    is_path,
    read,
    read_builtin,
    read_file,
)
from tagc.policy.problems import raise_problems, translate
from tagc.policy.roles import ParamInfo, Role, clean_name
from tagc.policy.rules import ParameterRule, Rule, first_match
from tagc.policy.suggest import short
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


def _check_replicas(rule: Rule) -> Rule:
    if rule.codec.shares_support:
        raise ValueError(
            "codec.support 'shared' is the choice of a shard's owner, and replicas have none"
        )
    if rule.feedback.lead == "measured":
        raise ValueError(
            "feedback.lead 'measured' differs from rank to rank, and replicas must stay alike; "
            "name a number"
        )
    return rule


_Rule = TypeVar("_Rule")
_Rules = Annotated[
    tuple[_Rule, ...],
    BeforeValidator(_as_rules),
    InSchema(lambda array: {**array, "minItems": 1}),
]


DIRECTIONS = ("gradients", "parameters", "replicas")
"""A policy's lists of rules."""

Inside = Literal["native", "bfloat16", "int8"]
"""How what a policy compresses travels between the ranks of a host, which add it up first."""

VARIABLE = "TAGC_POLICY"
"""The environment variable that names the policy where the program names none."""


class Policy(Strict):
    """Ordered lists of rules: for the `gradients` in FSDP's reduce-scatter, the `parameters` in
    its all-gather, and the gradients in the all-reduce across `replicas` of the sharded model.
    Equal content is equal, whatever its source.

    Load policies with `Policy.load`, whose errors are all PolicyError; the constructor raises
    pydantic's ValidationError, which is a ValueError too.
    """

    schema_version: Annotated[Literal[1], BeforeValidator(_check_schema)] = Field(alias="schema")
    """Version of the keys; 1 so far."""
    about: str = ""
    """One sentence for people."""
    gradients: _Rules[Rule]
    """Rules for gradients in FSDP's reduce-scatter; the first that selects a parameter decides, and
    what none selects is dense."""
    parameters: _Rules[ParameterRule] = ()
    """Rules for parameters in FSDP's all-gather; likewise."""
    replicas: _Rules[Annotated[Rule, AfterValidator(_check_replicas)]] = ()
    """Rules for gradients in the all-reduce across replicas of the sharded model; likewise."""
    inside: Inside = "native"
    """Where the ranks of a host add up gradients before one message a host is sent: how those that
    rules compress travel between them. `native` is their own dtype, `bfloat16` 2 bytes, and `int8`
    one, with a scale for every 256, rounded by chance; sums are in float32. For hosts whose ranks
    reach each other slowly (PCIe)."""
    roles: dict[Role, OneOrMore[Glob]] = Field(default={})
    """Roles that parameters of this model have by their names: globs, or a list of them, as in
    `name`. The first that fits decides, before what tagc knows of names."""
    tuning: Tuning | None = None
    """Factors between a dense run's settings and this policy's; if omitted, no hint is printed."""

    _name: str = PrivateAttr(default=DICT)
    # Where each rule of a list comes from, and which of that is the policy's own.
    _origins: dict[str, tuple[str, ...]] = PrivateAttr(default_factory=dict)
    _source: str = PrivateAttr(default=DICT)

    @field_validator("roles")
    @classmethod
    def _sort(cls, roles: dict[Role, tuple[str, ...]]) -> dict[Role, tuple[str, ...]]:
        # As in `When`: the order of alternatives has no meaning. That of the roles has.
        return {role: tuple(sorted(set(globs))) for role, globs in roles.items()}

    @classmethod
    def load(
        cls, source: "str | os.PathLike[str] | Mapping[str, Any] | Policy | None" = None
    ) -> "Policy":
        """A policy from its built-in name, a YAML file, a mapping, or itself; if None is given, the
        one that the environment variable `TAGC_POLICY` names, else `auto`.

        A string with a path separator or the suffix .yaml or .yml is a file, any other is a
        built-in name.

        Raises:
            PolicyError: no such policy, or not a valid one; the message lists every problem.
        """
        if isinstance(source, Policy):
            return source
        if source is None:
            named = os.environ.get(VARIABLE)
            try:
                return cls.load(named or "auto")
            except PolicyError as error:
                raise PolicyError(f"{VARIABLE}={named}: {error}") from None
        policy = _resolved(read(source))
        policy._name = DICT if isinstance(source, Mapping) else os.fsdecode(source)
        return policy

    @property
    def name(self) -> str:
        """The built-in name, the path of the file, or `<dict>`."""
        return self._name

    @property
    def hash(self) -> str:
        """SHA-256, in hex, of the canonical form, version 1, of what the policy changes in a run:
        not of `about`, `tuning` and name. Renames in the code, and new keys that have their
        default, change nothing in it."""
        form = canonical(
            gradients=self.gradients,
            parameters=self.parameters,
            replicas=self.replicas,
            inside=self.inside,
            roles=self.roles,
        )
        return hashlib.sha256(form.encode()).hexdigest()

    def with_inside(self, inside: Inside) -> "Policy":
        """The same, but for how ranks of a host add up; its name says so."""
        policy = self.model_copy(update={"inside": inside})
        policy._name = f"{self.name}, inside {inside}"
        return policy

    def origins(self, direction: str) -> tuple[str, ...]:
        """For each rule of this list the file that it stands in, or `<dict>`."""
        return self._origins.get(direction, ())

    def inherits(self, direction: str, index: int) -> bool:
        """Whether a rule of this list comes from a policy that this one extends."""
        origins = self.origins(direction)
        return bool(origins) and origins[index] != self._source

    def describe(self, name: str, shape: Sequence[int]) -> ParamInfo:
        """What the policy knows of a parameter: its role by `roles`, else by `tagc`'s table."""
        info = ParamInfo.of(name, tuple(shape))
        cleaned = clean_name(name)
        for role, globs in self.roles.items():
            if any(fnmatchcase(cleaned, glob) for glob in globs):
                return replace(info, role=role)
        return info

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


class Extension(Policy):
    """A policy as its file has it, whose rules stand before those of another. Keys that are no
    lists override the other's, and so does each role in `roles`."""

    gradients: _Rules[Rule] = ()
    """Rules for gradients in FSDP's reduce-scatter; the first that selects a parameter decides, and
    what none selects is dense."""
    extends: Annotated[str, Field(min_length=1)]
    """The policy whose rules come after those of this file: a built-in name, or a file beside this
    one or in a folder below. Keys that are no lists of rules override the other policy's."""


def _resolved(document: Document) -> Policy:
    """The policy of a document, with those that it extends."""
    layers = [(document, _validate(document))]
    while isinstance(own := layers[-1][1], Extension):
        base = _base_of([document for document, _ in layers], own.extends)
        try:
            layers.append((base, _validate(base)))
        except PolicyError as error:
            said = f"{own.extends!r} is not a valid policy:\n{error}"
            raise_problems(layers[-1][0], [Problem(("extends",), said)])
    policy = layers.pop()[1]
    while layers:
        policy = _over(layers.pop()[1], policy)
    return policy


def _base_of(chain: Sequence[Document], said: str) -> Document:
    """What the last document extends; all of them extend each other.

    Raises:
        PolicyError: if there is no such policy, or it is one of them.
    """
    own = chain[-1]
    try:
        if is_path(said):
            base = read_file(os.path.join(os.path.dirname(own.source), _below(said)))
        else:
            base = read_builtin(said)
    except PolicyError as error:
        raise_problems(own, [Problem(("extends",), str(error))])
        raise
    if (base.path or base.source) in [one.path or one.source for one in chain]:
        around = " → ".join(one.source for one in (*chain, base))
        raise_problems(own, [Problem(("extends",), f"policies extend each other: {around}")])
    return base


def _below(said: str) -> str:
    """A path that stays in its folder, normalized. Policies come from other people, too, and are
    not to say which files are read.

    Raises:
        PolicyError: if it leads out of the folder.
    """
    path = os.path.normpath(said)
    if os.path.isabs(path) or os.path.splitdrive(path)[0] or path.split(os.sep)[0] == os.pardir:
        raise PolicyError(
            f"{short(said)} is not in the folder of this file: name a built-in policy, or a file "
            "beside this one or in a folder below, such as base.yaml"
        )
    return path


def _over(own: Policy, base: Policy) -> Policy:
    """`base` with the rules of `own` before its own, and with the other keys that `own` has."""
    update: dict[str, Any] = {}
    for name in Policy.model_fields:
        mine, theirs = getattr(own, name), getattr(base, name)
        if isinstance(theirs, tuple):
            update[name] = (*mine, *theirs)
        elif isinstance(theirs, dict):
            update[name] = mine | {key: theirs[key] for key in theirs if key not in mine}
        elif name in own.model_fields_set:
            update[name] = mine
    merged = base.model_copy(update=update)
    merged._origins = {name: own._origins[name] + base._origins[name] for name in own._origins}
    merged._source = own._source
    return merged


def _validate(document: Document) -> Policy:
    extends = isinstance(document.data, Mapping) and "extends" in document.data
    try:
        policy = (Extension if extends else Policy).model_validate(document.data)
    except ValidationError as error:
        raise_problems(document, translate(error, document.data, Extension))
        raise AssertionError("a ValidationError without errors") from error
    raise_problems(document, ())
    rules = {name: getattr(policy, name) for name in DIRECTIONS}
    policy._origins = {name: (document.source,) * len(of) for name, of in rules.items()}
    policy._source = document.source
    return policy

"""Policies: which gradients are compressed, and how.

A policy is a list of rules over the model's parameters. The first rule that matches decides; a
parameter that no rule matches is dense. `Policy.load` reads a policy from a YAML file, a built-in
name or a dict. A policy that extends another appends the other's rules to its own. Norms, biases
and other small parameters are a fraction of a percent of the elements and much of the error, so
they are compressed only if a rule names them.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
)

from tagc.codecs.config import InSchema, Strict, unit
from tagc.policy.document import (
    DICT,
    Document,
    PolicyError,
    Problem,
    builtin_names,
    is_path,
    raise_problems,
    read,
    read_builtin,
    read_file,
    short,
    translate,
)
from tagc.policy.roles import ParamInfo, Role, clean_name, roles_beside
from tagc.policy.rules import (
    DimensionRule,
    Glob,
    OneOrMore,
    ParameterRule,
    Rule,
    SitesConfig,
    check_replicated,
    problems_of_sites,
)


def _check_schema(value: object) -> object:
    # A Literal compares with ==, so 1.0 and true would pass for 1.
    if type(value) is not int or value != 1:
        raise ValueError(f"must be 1, the only schema so far, not {short(value)}")
    return value


def _as_rules(value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a non-empty list of rules, not {short(value)}")
    return tuple(value)


_Rule = TypeVar("_Rule")
_Rules = Annotated[
    tuple[_Rule, ...],
    BeforeValidator(_as_rules),
    InSchema(lambda array: {**array, "minItems": 1}),
]

DIRECTIONS = ("gradients", "parameters", "replicas")
"""A policy's lists of rules."""

Inside = Literal["native", "bfloat16", "int8"]
"""How the ranks of a host send each other the gradients that a policy compresses, to add them up
before they send one message to the other hosts."""

VARIABLE = "TAGC_POLICY"
"""The environment variable that names the policy if the program does not."""


Factor = Annotated[float, Field(ge=0.001, le=1000), unit("times the uncompressed run's")]


class Tuning(Strict):
    """Factors from an uncompressed run's settings to this policy's, measured for optimizers like
    Adam. They do not change what is sent: plan and metrics print them, and `tagc.wrap` if a setting
    should change.

    `rate_factor` times the uncompressed run's learning rate is best. The gradients that the
    optimizer gets have `norm_factor` times the norm of uncompressed ones, so multiply a clipping
    threshold by `norm_factor` to clip as often. `compressor.keep_rates(optimizer)` measures both;
    you can then keep your settings.
    """

    rate_factor: Factor = 1
    """Best learning rate, over that of an uncompressed run."""
    norm_factor: Factor | None = None
    """Norm of the gradients that the optimizer gets, over that of uncompressed ones. None means
    that it was not measured; no hint about clipping is then printed."""

    @property
    def asks(self) -> bool:
        """Whether settings that were tuned without compression should change."""
        return self.rate_factor != 1 or self.norm_factor not in (None, 1)

    @property
    def advice(self) -> str:
        """The hint for users, as one sentence."""
        rate, norm = (_times(factor) for factor in (self.rate_factor, self.norm_factor or 1))
        if not self.asks:
            also = "" if self.norm_factor is None else " and clipping threshold"
            return f"keep the learning rate{also} of your uncompressed run"
        also = "" if self.norm_factor is None else f", and {norm} clipping threshold"
        return (
            f"use {rate} learning rate{also} of your uncompressed run; or keep both, with "
            "compressor.keep_rates(optimizer) and compressor.clip_grad_norm_"
        )


def _times(factor: float) -> str:
    return "the" if factor == 1 else f"{factor:g} times the"


class Policy(Strict):
    """Ordered lists of rules: for the `gradients` in FSDP's reduce-scatter, the `parameters` in
    its all-gather, and the gradients in the all-reduce across `replicas` of the sharded model.
    Policies with the same content are equal, whatever their source.

    Load policies with `Policy.load`, which raises only PolicyError; the constructor raises
    pydantic's ValidationError, which is also a ValueError.
    """

    schema_version: Annotated[Literal[1], BeforeValidator(_check_schema)] = Field(alias="schema")
    """Version of the keys; 1 so far."""
    about: str = ""
    """One sentence that describes the policy."""
    gradients: _Rules[Rule]
    """Rules for gradients in FSDP's reduce-scatter. The first rule that selects a parameter
    decides; a parameter that no rule selects is dense."""
    parameters: _Rules[ParameterRule] = ()
    """Rules for parameters in FSDP's all-gather. The first rule that selects a parameter decides; a
    parameter that no rule selects is dense."""
    replicas: _Rules[Annotated[Rule, AfterValidator(check_replicated)]] = ()
    """Rules for gradients in the all-reduce across replicas of the sharded model. The first rule
    that selects a parameter decides; a parameter that no rule selects is dense."""
    inside: Inside = "native"
    """How the ranks of a host send each other the gradients that rules compress, if they add them
    up before the host sends one message: `native` in the gradients' own dtype, `bfloat16` in 2
    bytes, `int8` in 1 byte, stochastically rounded, with a scale for every 256 elements. Sums are
    in float32. Use fewer bytes if the link between the ranks of a host is slow (PCIe)."""
    dimensions: dict[str, DimensionRule] = Field(default={})
    """How activations travel in the groups of a mesh's dimensions of these names (tensor, pipeline,
    expert parallelism), for `tagc.init_device_mesh` and `tagc.dimension_options`. Dimensions
    without a rule are left to torch."""
    roles: dict[Role, OneOrMore[Glob]] = Field(default={})
    """Roles of this model's parameters by name: for each role a glob, or a list of globs, as in
    `name`. The first role that matches decides, before tagc's own table of names."""
    sites: SitesConfig | None = None
    """When sites exchange changes of parameters, if the policy is for `tagc.sites`. The rules for
    `gradients` then say how changes are sent. Other lists of rules must be empty."""
    tuning: Tuning | None = None
    """Factors between an uncompressed run's settings and this policy's; if omitted, no hint is
    printed."""

    _name: str = PrivateAttr(default=DICT)
    # The source of each rule of a list, and the policy's own source.
    _origins: dict[str, tuple[str, ...]] = PrivateAttr(default_factory=dict)
    _source: str = PrivateAttr(default=DICT)
    # Roles that only a parameter's neighbours tell.
    _beside: dict[str, Role] = PrivateAttr(default_factory=dict)

    @field_validator("roles")
    @classmethod
    def _sort(cls, roles: dict[Role, tuple[str, ...]]) -> dict[Role, tuple[str, ...]]:
        # As in `When`, the order of alternatives means nothing. The order of the roles counts.
        return {role: tuple(sorted(set(globs))) for role, globs in roles.items()}

    @classmethod
    def load(
        cls, source: "str | os.PathLike[str] | Mapping[str, Any] | Policy | None" = None
    ) -> "Policy":
        """Load a policy from a built-in name, a YAML file or a mapping; a Policy is returned as it
        is. None loads the policy that the environment variable `TAGC_POLICY` names, else `auto`.

        A string with a path separator or the suffix .yaml or .yml is a file; any other is a
        built-in name.

        Raises:
            PolicyError: if there is no such policy or it is not valid; the message lists every
                problem.
        """
        if isinstance(source, Policy):
            return source
        if source is None:
            named = os.environ.get(VARIABLE)
            try:
                return cls.load(named or "auto")
            except PolicyError as error:
                raise PolicyError(f"{VARIABLE}={named}: {error}") from None
        document = read(source)
        policy = _resolved(document)
        if policy.sites is not None:
            lists = "parameters", "replicas", "dimensions"
            others = {name: getattr(policy, name) for name in lists}
            found = problems_of_sites(policy.sites, policy.gradients, others)
            raise_problems(document, found)
        policy._name = DICT if isinstance(source, Mapping) else os.fsdecode(source)
        return policy

    @property
    def name(self) -> str:
        """The built-in name, the path of the file, or `<dict>`."""
        return self._name

    @property
    def hash(self) -> str:
        """SHA-256, in hex, of every key that changes a run; `about`, `tuning` and the name do
        not."""
        content = self.model_dump(mode="json", exclude={"about", "tuning"})
        content["roles"] = list(content["roles"].items())  # the first role that matches decides
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def with_inside(self, inside: Inside) -> "Policy":
        """The same policy with another value of `inside`; its name says so."""
        policy = self.model_copy(update={"inside": inside})
        policy._name = f"{self.name}, inside {inside}"
        return policy

    def origins(self, direction: str) -> tuple[str, ...]:
        """The file of each rule of this list, or `<dict>`."""
        return self._origins.get(direction, ())

    def inherits(self, direction: str, index: int) -> bool:
        """Whether a rule of this list comes from a policy that this one extends."""
        origins = self.origins(direction)
        return bool(origins) and origins[index] != self._source

    def describe(self, name: str, shape: Sequence[int], dtype: str = "") -> ParamInfo:
        """What rules ask of a parameter. Of its role `roles` decides before tagc's own table, and
        the names beside it (`for_model`) if that has none."""
        info = ParamInfo.of(name, tuple(shape), dtype)
        cleaned = clean_name(name)
        for role, globs in self.roles.items():
            if any(fnmatchcase(cleaned, glob) for glob in globs):
                return replace(info, role=role)
        beside = self._beside.get(cleaned)
        return info if beside is None else replace(info, role=beside)

    def for_model(self, names: Iterable[str]) -> "Policy":
        """The same policy, for a model whose parameters have these names: roles that only their
        neighbours tell are known."""
        policy = self.model_copy()
        policy._beside = roles_beside(names)
        return policy

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


def policies() -> dict[str, str]:
    """The built-in policies: name to `about`, sorted by name."""
    return {name: Policy.load(name).about for name in builtin_names()}


def data_parallel_policies() -> list[str]:
    """The built-in policies that differ in gradients or parameters of every step; the others have
    rules for dimensions in addition, or are for sites."""
    loaded = {name: Policy.load(name) for name in builtin_names()}
    return [name for name, p in loaded.items() if not p.dimensions and p.sites is None]


class Extension(Policy):
    """The content of a policy file that extends another policy. Its rules come before the other's.
    Its other keys override the other's, sections such as `sites` and `roles` key by key."""

    gradients: _Rules[Rule] = ()
    """Rules for gradients in FSDP's reduce-scatter. The first rule that selects a parameter
    decides; a parameter that no rule selects is dense."""
    extends: Annotated[str, Field(min_length=1)]
    """The policy whose rules come after the rules of this file: a built-in name, or a file beside
    this one or in a folder below. Keys that are not lists of rules override the other policy's, key
    by key in a section: `sites: {every: 64}` changes nothing else of `sites`."""


def _resolved(document: Document) -> Policy:
    """The policy of a document, merged with the policies that it extends."""
    layers = [(document, _validate(document))]
    while isinstance(own := layers[-1][1], Extension):
        base = _base_of([document for document, _ in layers], own.extends)
        try:
            layers.append((base, _validate(base)))
        except PolicyError as error:
            _refuse_base(layers[-1][0], f"{own.extends!r} is not a valid policy:\n{error}")
    policy = layers.pop()[1]
    while layers:
        policy = _over(layers.pop()[1], policy)
    return policy


def _base_of(chain: Sequence[Document], name: str) -> Document:
    """The document that the last one of the chain extends; each one extends the next."""
    own = chain[-1]
    try:
        if is_path(name):
            base = read_file(os.path.join(os.path.dirname(own.source), _below(name)))
        else:
            base = read_builtin(name)
    except PolicyError as error:
        _refuse_base(own, str(error))
    if (base.path or base.source) in [one.path or one.source for one in chain]:
        around = " → ".join(one.source for one in (*chain, base))
        _refuse_base(own, f"policies extend each other: {around}")
    return base


def _refuse_base(own: Document, text: str) -> NoReturn:
    raise_problems(own, [Problem(("extends",), text)])
    raise AssertionError("no problem was raised")


def _below(name: str) -> str:
    """A path that stays in its folder, normalized. A policy may come from someone else, so it must
    not choose which files are read."""
    path = os.path.normpath(name)
    if os.path.isabs(path) or os.path.splitdrive(path)[0] or path.split(os.sep)[0] == os.pardir:
        raise PolicyError(
            f"{short(name)} is not in the folder of this file: name a built-in policy, or a file "
            "beside this one or in a folder below, such as base.yaml"
        )
    return path


def _over(own: Policy, base: Policy) -> Policy:
    """`base`, with the rules of `own` before its rules and with the other keys set in `own`."""
    update: dict[str, Any] = {}
    for name in Policy.model_fields:
        mine, theirs = getattr(own, name), getattr(base, name)
        if isinstance(theirs, tuple):
            update[name] = (*mine, *theirs)
        elif name in own.model_fields_set:
            update[name] = _section(mine, theirs)
    merged = base.model_copy(update=update)
    merged._origins = {name: own._origins[name] + base._origins[name] for name in own._origins}
    merged._source = own._source
    return merged


def _section(mine: Any, theirs: Any) -> Any:
    """The value of a key that both policies may have: a section's keys, own before the other's."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        # Own keys come first: the first role that matches decides.
        own = {key: _section(value, theirs.get(key)) for key, value in mine.items()}
        return own | {key: theirs[key] for key in theirs if key not in mine}
    if isinstance(mine, Strict) and type(mine) is type(theirs):
        given = {key: getattr(mine, key) for key in mine.model_fields_set}
        update = {key: _section(value, getattr(theirs, key)) for key, value in given.items()}
        return theirs.model_copy(update=update)
    return mine


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

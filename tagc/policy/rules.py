"""Rules: the codec and feedback of the parameters that a condition selects."""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    cast,
)

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict

from tagc.codecs import CODECS, CodecConfig
from tagc.codecs.config import Block, InSchema, Strict, unit
from tagc.codecs.feedback import FeedbackConfig
from tagc.policy.document import Problem, short
from tagc.policy.roles import ParamInfo, Role, clean_name

SMALL = 16384
"""Elements below which a parameter is dense, unless a rule names it or states its `min_numel`."""

# Conditions


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
    DTYPE = 4
    SIZE = 5
    NO_MATRIX = 6
    SMALL = 7


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
    dtype: OneOrMore[Literal["bfloat16", "float16", "float32"]] | None = None
    """The dtype in which FSDP or DDP sends the parameter or its gradient, or a list of dtypes. A
    rule for other dtypes than the model's is an alternative, and need not select anything."""
    min_numel: _Numel | None = None
    """Fewest elements of the parameter, before sharding. Without this key, a rule that compresses
    and gives no name skips parameters below 16384 elements."""
    max_numel: _Numel | None = None
    """Most elements of the parameter, before sharding."""

    @field_validator("role", "name", "dtype")
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
        if self.dtype is not None and param.dtype not in self.dtype:
            return Miss(
                Near.DTYPE, f"sent in {param.dtype}, and the rule is for {' and '.join(self.dtype)}"
            )
        if self.min_numel is not None and param.numel < self.min_numel:
            return Miss(Near.SIZE, f"{param.numel:,} elements < min_numel {self.min_numel:,}")
        if self.max_numel is not None and param.numel > self.max_numel:
            return Miss(Near.SIZE, f"{param.numel:,} elements > max_numel {self.max_numel:,}")
        return None


# Codecs


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


class QuantizedActivationsConfig(CodecConfig):
    """Every element in `bits`, with a scale for every `block` elements.

    Nothing is kept between steps, so what a backward computes again has the same bits, also with
    `rounding: stochastic`: chance comes from the elements themselves.
    """

    kind: Literal["quantized"] = "quantized"
    """The codec's name."""
    bits: Annotated[Literal[4, 8], unit("bits per element")] = 8
    """Size of an element's code."""
    block: Block = 64
    """How many neighbouring elements share a scale of 16 bits."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest code, or randomly up or down with the right mean."""


class ExactActivationsConfig(CodecConfig):
    """Every bfloat16 element to the bit, in 12.25 bits: neighbours have similar exponents, which
    are packed. Tensors whose exponents do not fit, and other dtypes, travel as they are.

    All-gathers, all-to-alls, sends and receives have the bits of torch's own groups. Sums are added
    in float32 and rounded once, so with two ranks they have, too, but for the kind of NaN.
    """

    kind: Literal["exact"] = "exact"
    """The codec's name."""


GRADIENT_CONFIGS: tuple[type[CodecConfig], ...] = (
    *(kind.config for kind in CODECS if kind.config),
    AutoConfig,
)
PARAMETER_CONFIGS: tuple[type[CodecConfig], ...] = (
    *(kind.parameter_config for kind in CODECS if kind.parameter_config),
    AutoParametersConfig,
)
ACTIVATION_CONFIGS: tuple[type[CodecConfig], ...] = (
    QuantizedActivationsConfig,
    ExactActivationsConfig,
)

if TYPE_CHECKING:
    AnyGradientConfig: TypeAlias = Any
    AnyParameterConfig: TypeAlias = Any
    AnyActivationConfig: TypeAlias = QuantizedActivationsConfig | ExactActivationsConfig
else:
    # pydantic distinguishes them by their `kind`.
    AnyGradientConfig, AnyParameterConfig, AnyActivationConfig = (
        Annotated[Union[configs], Field(discriminator="kind")]  # noqa: UP007
        for configs in (GRADIENT_CONFIGS, PARAMETER_CONFIGS, ACTIVATION_CONFIGS)
    )


# Rules


class Selection(Strict):
    """The common part of rules for gradients and for parameters."""

    when: When
    """Conditions of the parameters to select; {} selects all."""
    codec: Any

    def miss(self, param: ParamInfo) -> Miss | None:
        """Why the rule does not select the parameter; None if it does.

        A rule that compresses and gives no `name` skips every parameter that is not a matrix (see
        `ParamInfo.no_matrix`; `role: ssm` does select state-space parameters with several
        dimensions). Unless it states `min_numel`, it also skips parameters with fewer than `SMALL`
        elements.
        """
        miss = self.when.miss(param)
        if miss is None and self.codec.compresses and self.when.name is None:
            asked_for = param.ndim > 1 and param.role == "ssm" and self.when.role
            if param.no_matrix and not asked_for:
                return Miss(Near.NO_MATRIX, f"{param.no_matrix}: no rule names it")
            if self.when.min_numel is None and param.numel < SMALL:
                return Miss(Near.SMALL, f"{param.numel:,} elements < {SMALL:,}: see min_numel")
        return miss


class Rule(Selection):
    """One rule: the gradients of the parameters that `when` selects are sent through `codec`, with
    `feedback`. The default `feedback` depends on the codec: `average` if it sends every element,
    `residual` if it selects, `none` if it is dense or rounds stochastically.
    """

    codec: AnyGradientConfig
    """How their gradients are sent."""
    feedback: FeedbackConfig = Field(default=cast(FeedbackConfig, None), validate_default=True)
    """What happens to the part of a gradient that was not sent; the default fits the codec."""

    @field_validator("feedback", mode="before")
    @classmethod
    def _default_feedback(cls, value: object, info: ValidationInfo) -> object:
        codec = info.data.get("codec")  # absent if it was invalid
        if value is None:
            return FeedbackConfig(kind="none" if codec is None else codec.allowed_feedback[0])
        return value

    @field_validator("feedback")
    @classmethod
    def _check_feedback(cls, value: FeedbackConfig, info: ValidationInfo) -> FeedbackConfig:
        codec = info.data.get("codec")
        if codec is None:
            return value
        kinds = codec.allowed_feedback
        if value.kind not in kinds:
            if value.kind in codec.feedback_kinds:
                raise ValueError(
                    f"kind {value.kind!r} does not fit {codec.description}; choose "
                    f"{' or '.join(kinds)}"
                )
            if codec.kind == "dense":
                raise ValueError(
                    f"kind {value.kind!r} has no effect: codec 'dense' sends everything; "
                    "leave feedback out"
                )
            raise ValueError(
                f"kind {value.kind!r} would forget most of what codec {codec.kind!r} does not "
                f"select; choose {' or '.join(kinds)}"
            )
        if codec.shares_support and value.kind == "none":
            raise ValueError("support 'shared' is chosen from residuals, and kind 'none' has none")
        return value


class ParameterRule(Selection):
    """One rule: the parameters that `when` selects are gathered through `codec`."""

    codec: AnyParameterConfig
    """How they are sent in FSDP's all-gather."""


def nearest_miss(rules: Sequence[Rule | ParameterRule], param: ParamInfo) -> Miss:
    """Why no rule that compresses selects the parameter: the miss of the nearest rule."""
    misses = [rule.miss(param) for rule in rules if rule.codec.compresses]
    return max(
        (m for m in misses if m is not None), default=Miss(Near.NOTHING, "no rule compresses")
    )


def first_match(rules: Sequence[Rule | ParameterRule], param: ParamInfo) -> int | None:
    """Index of the first rule that selects the parameter; None is dense."""
    for index, rule in enumerate(rules):
        if rule.miss(param) is None:
            return index
    return None


def check_replicated(rule: Rule) -> Rule:
    """Refuse a rule for replicas that cannot be followed there: ValueError with the key and the
    reason."""
    if rule.codec.shares_support:
        raise ValueError(
            "codec.support 'shared' is chosen by a shard's owner, and replicas have none"
        )
    return rule


# Dimensions of a mesh


class DimensionRule(Strict):
    """How activations and their gradients travel through the groups of one mesh dimension."""

    codec: AnyActivationConfig
    """How large floating tensors are sent. Everything else travels as it is."""


Steps = Annotated[int, Field(ge=1, le=2**31 - 1), unit("optimizer steps")]


class OuterConfig(Strict):
    """The optimizer that applies the average of the sites' changes: SGD with Nesterov momentum, as
    in DiLoCo (arXiv 2311.08105). `rate: 1` and `momentum: 0` average the parameters."""

    rate: Annotated[float, Field(ge=1e-6, le=100), unit("times the average")] = 0.7
    """Learning rate."""
    momentum: Annotated[float, Field(ge=0, lt=1), unit("share of the momentum")] = 0.9
    """Nesterov momentum. It needs 4 bytes per parameter of the own shard; 0 needs none."""


class SitesConfig(Strict):
    """When sites exchange changes of parameters (`tagc.sites`), and what they do with the average.
    The rules for `gradients` say how the changes are sent.
    """

    every: Steps = 32
    """How many optimizer steps a site takes between two exchanges of the same parameters."""
    together: Annotated[int, Field(ge=0, le=2**31 - 1), unit("optimizer steps")] = 0
    """How many of the first optimizer steps are each followed by an exchange of all parameters,
    averaged, as in post-local SGD (arXiv 1808.07217): while the loss falls steeply, sites that
    train apart fall behind. Each of these steps sends as much as `every` later ones."""
    fragments: Annotated[int, Field(ge=1, le=2**16), unit("parts")] = 1
    """In how many parts the model is exchanged, at staggered steps."""
    delay: Annotated[int, Field(ge=0, le=2**31 - 1), unit("optimizer steps")] = 0
    """How many optimizer steps an exchange may take. Training goes on meanwhile; then the average
    is applied. 0 waits for it. It must be less than `every` / `fragments`."""
    alpha: Annotated[float, Field(ge=0, lt=1), unit("share of the parameter")] = 0.0
    """The share of a site's own parameters that stays when the average is applied; the rest is the
    new common value. With `delay`, more than 0 keeps some of the progress made meanwhile."""
    outer: OuterConfig = OuterConfig()
    """How the average of the changes is applied."""

    @property
    def spacing(self) -> int:
        """The fewest optimizer steps between the exchanges of two fragments."""
        return self.every // self.fragments


def problems_of_sites(
    sites: SitesConfig, rules: Sequence[Rule], others: Mapping[str, object]
) -> Iterator[Problem]:
    """What is wrong with a policy for sites, given its rules for `gradients` and its other rules by
    key."""
    if sites.spacing < 1:
        text = f"{sites.fragments} fragments cannot be due at different ones of {sites.every} steps"
        yield Problem(("sites", "fragments"), text)
    elif sites.delay >= sites.spacing:
        text = (
            f"an exchange of {sites.delay} steps ends after the next one begins, {sites.spacing} "
            "steps later (every / fragments): give fewer"
        )
        yield Problem(("sites", "delay"), text)
    for key in (key for key, value in others.items() if value):
        text = (
            "sites exchange changes of parameters by the rules for gradients: leave this out, and "
            "give tagc.wrap a policy of its own for the traffic inside a site"
        )
        yield Problem((key,), text)
    for i, rule in enumerate(rules):
        if isinstance(rule.codec, AutoConfig):
            text = "codec 'auto' chooses by the time of a step, which sites do not wait for"
            yield Problem(("gradients", i, "codec"), text)
